"""`cloze tokenize`: prints tokens and ids of texts by a model's tokenizer; imports no torch."""

from __future__ import annotations

from pathlib import Path

from cloze.launch.predict.files import write_results
from cloze.launch.predict.output import as_json, encoded, print_table, wants_table
from cloze.launch.predict.rows import read_rows
from cloze.launch.predict.tokens import TokenizeConfig, encode_whole, tokens_of
from cloze.launch.pretrained.finding import model_path
from cloze.launch.run import runs
from cloze.launch.texts.encoding import TRUNCATION
from cloze.launch.texts.tables import COLUMNS, columns_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def tokenize(config: TokenizeConfig) -> int:
    """Print the inputs of a model for texts. Needs only the model's tokenizer.

    Returns:
        The exit status.
    """
    folder = model_path(config)
    tokenizer = Tokenizer.from_folder(runs.tokenizer_folder(folder))
    described = runs.model_folder(folder) / "config.json"
    notes = runs.read_fields(described) if described.exists() else {}
    words = notes.get(TRUNCATION, {}).get("words")
    rows = read_rows(config, columns_of(notes.get(COLUMNS)))
    results = ((row, tokens_of(tokenizer, encode_whole(tokenizer, row, words))) for row in rows)
    if config.output:
        print(f"wrote {write_results(Path(config.output), config, None, results):,} results to {config.output}")
        return 0
    table = []
    for row, shown in results:
        if wants_table(config):
            columns = zip(shown.tokens, shown.input_ids, shown.token_type_ids, shown.offsets, strict=True)
            table += [
                {
                    "token": token,
                    "id": str(number),
                    "segment": str(segment),
                    "mask": "1",
                    "characters": f"{offset[0]}-{offset[1]}",
                }
                for token, number, segment, offset in columns
            ]
        else:
            print(encoded(as_json(config, row, shown)))
    if table:
        print_table(table)
    return 0
