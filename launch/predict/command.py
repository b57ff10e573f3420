"""`cloze predict ...`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cloze.launch.predict.config import EmbedConfig, FeaturesConfig, Input, ScoreConfig
from cloze.launch.predict.operation import Row
from cloze.launch.predict.output import (
    as_json,
    draw_attention,
    encoded,
    plain,
    print_table,
    table_rows,
    wants_table,
    write_vectors,
)
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.rows import read_rows
from cloze.launch.predict.vectors import WordInContext
from cloze.launch.pretrained.hub import model_path
from cloze.launch.system.console import Console
from cloze.pipeline.errors import UserError


def predict(config: Input) -> int:
    """Print the results of an operation for every text; returns the exit status."""
    predictor = Predictor.from_folder(model_path(config))
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
        longest = predictor.loaded.encoder.truncation.max_length
        Console().warn(f"{cut:,} tokens of texts beyond the {longest} that the model reads were cut")
    _warn_of_longer_texts(predictor)
    return 0


def _warn_of_longer_texts(predictor: Predictor) -> None:
    encoder = predictor.loaded.encoder
    if encoder.longer_texts:
        Console().warn(f"found {encoder.longer_texts:,} texts of more than the {encoder.truncation.max_length} tokens "
                       "that the model has learned from; expect less of it there, or divide them")


def _noting(rows: Iterable[Row], seen: list[Row]) -> Iterator[Row]:
    for row in rows:
        seen.append(row)
        yield row


def _print(config: Input, results: Iterator[tuple[Row, Any]]) -> int:
    """Print results as they come (a table at the end); returns the tokens that were cut."""
    cut = 0
    if not wants_table(config):
        for row, result in results:
            print(encoded(as_json(config, row, result)), flush=True)
            cut += getattr(result, "cut_tokens", 0)
        return cut
    found = list(results)
    if isinstance(config, ScoreConfig):
        found.sort(key=lambda item: -item[1].log_probability)
    print_table(line for row, result in found for line in table_rows(row, result))
    return sum(getattr(result, "cut_tokens", 0) for _, result in found)


def _look_inside(predictor: Predictor, config: FeaturesConfig) -> int:
    rows = list(read_rows(config))
    if config.attention:
        if len(rows) != 1:
            raise UserError(f"attention: found {len(rows)} texts, expected one to draw")
        draw_attention(predictor.attention(rows[0].text, rows[0].pair), Path(config.attention))
        layers, heads = predictor.config.num_hidden_layers, predictor.config.num_attention_heads
        Console().say(f"drew {layers} layers of {heads} heads to {config.attention}")
    if config.word:
        _print_words(config, predictor.word(config.word, rows, config.layer))
    _warn_of_longer_texts(predictor)
    return 0


def _print_words(config: FeaturesConfig, words: list[WordInContext]) -> None:
    if not wants_table(config):
        for word in words:
            print(encoded(plain(word)), flush=True)
        return
    print_table(
        {"text": word.text, "characters": f"{word.start}-{word.end}", "to static": f"{word.cosine_to_static:.3f}"}
        | {f"to {number}": f"{value:.3f}" for number, value in enumerate(word.cosines, 1)}
        for word in words
    )
