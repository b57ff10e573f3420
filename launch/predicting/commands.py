"""`cloze predict ...` and `cloze tokenize`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from launch import runs
from launch.console import Console, Output
from launch.predicting.config import EmbedConfig, FeaturesConfig, Input, ScoreConfig, TokenizeConfig
from launch.predicting.operation import Row
from launch.predicting.output import as_json, draw_attention, plain, table_rows, write_vectors
from launch.predicting.rows import read_rows
from launch.predicting.tokens import encode_whole, tokens_of
from launch.predicting.vectors import WordInContext
from pipeline.encoding import TRUNCATION
from pipeline.errors import UserError
from pipeline.tokenizer import Tokenizer


def predict(config: Input) -> int:
    """Print the results of an operation for every text; returns the exit status."""
    from launch.predict import Predictor

    predictor = Predictor.from_folder(config.folder())
    if isinstance(config, FeaturesConfig) and (config.word or config.attention):
        return _look_inside(predictor, config)
    rows, seen = read_rows(config), []
    results = ((seen.pop(0), result) for result in predictor.map(config, _noting(rows, seen)))
    if isinstance(config, EmbedConfig) and config.output:
        number, cut = write_vectors(Path(config.output), results)
        Console().say(f"wrote {number:,} vectors of {predictor.config.hidden_size} numbers to {config.output}")
    else:
        cut = _print(config, results)
    if cut:
        Console().warn(f"{cut:,} tokens of texts beyond the {predictor.encoder.truncation.max_length} that the model "
                       "reads were cut")
    return 0


def _noting(rows: Iterable[Row], seen: list[Row]) -> Iterator[Row]:
    for row in rows:
        seen.append(row)
        yield row


def _print(config: Input, results: Iterator[tuple[Row, Any]]) -> int:
    """Print results as they come (a table at the end); returns the tokens that were cut."""
    cut = 0
    if not _wants_table(config):
        for row, result in results:
            print(json.dumps(as_json(config, row, result), ensure_ascii=False), flush=True)
            cut += getattr(result, "cut_tokens", 0)
        return cut
    found = list(results)
    if isinstance(config, ScoreConfig):
        found.sort(key=lambda item: -item[1].log_probability)
    _print_table(line for row, result in found for line in table_rows(row, result))
    return sum(getattr(result, "cut_tokens", 0) for _, result in found)


def _wants_table(config: Input) -> bool:
    return config.format == "table" or (config.format is None and sys.stdout.isatty())


def _print_table(lines: Iterable[dict[str, str]]) -> None:
    lines = list(lines)
    if not lines:
        print("(nothing found)")
        return
    table = Table()
    for name in lines[0]:
        table.add_column(name)
    before: dict[str, str] = {}
    for line in lines:
        shown = dict(line)
        for name in ("text", "question"):  # a text stands at its first line only
            if name in line and len(line) > 2 and before.get(name) == line[name]:
                shown[name] = ""
        table.add_row(*(escape(value) for value in shown.values()))
        before = line
    Output().print(table)


def _look_inside(predictor: Any, config: FeaturesConfig) -> int:
    rows = list(read_rows(config))
    if config.attention:
        if len(rows) != 1:
            raise UserError(f"attention: found {len(rows)} texts, expected one to draw")
        draw_attention(predictor.attention(rows[0].text, rows[0].pair), Path(config.attention))
        layers, heads = predictor.config.num_hidden_layers, predictor.config.num_attention_heads
        Console().say(f"drew {layers} layers of {heads} heads to {config.attention}")
    if config.word:
        _print_words(config, predictor.word(config.word, rows, config.layer))
    return 0


def _print_words(config: FeaturesConfig, words: list[WordInContext]) -> None:
    if not _wants_table(config):
        for word in words:
            print(json.dumps(plain(word), ensure_ascii=False), flush=True)
        return
    _print_table(
        {"text": word.text, "characters": f"{word.start}-{word.end}", "to static": f"{word.cosine_to_static:.3f}"}
        | {f"to {number}": f"{value:.3f}" for number, value in enumerate(word.cosines, 1)}
        for word in words
    )


def tokenize(config: TokenizeConfig) -> int:
    """Print what a model would be given; returns the exit status. Needs no model, only its tokenizer."""
    folder = config.folder()
    tokenizer = Tokenizer.from_folder(runs.tokenizer_folder(folder))
    described = runs.model_folder(folder) / "config.json"
    notes = json.loads(described.read_text(encoding="utf-8")) if described.exists() else {}
    words = notes.get(TRUNCATION, {}).get("words")
    table = []
    for row in read_rows(config):
        shown = tokens_of(tokenizer, encode_whole(tokenizer, row, words))
        if _wants_table(config):
            columns = zip(shown.tokens, shown.input_ids, shown.token_type_ids, shown.offsets, strict=True)
            table += [{"token": token, "id": str(number), "segment": str(segment), "mask": "1",
                       "characters": f"{offset[0]}-{offset[1]}"} for token, number, segment, offset in columns]
        else:
            print(json.dumps(as_json(config, row, shown), ensure_ascii=False))
    if table:
        _print_table(table)
    return 0
