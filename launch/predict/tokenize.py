"""The operation `tokenize`: tokens, ids and characters of a text, as a model reads it. `cloze tokenize` needs only the
model's tokenizer and imports no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cloze.launch.predict.config import PairInput
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value
from cloze.launch.predict.output import print_results, write_results
from cloze.launch.predict.rows import read_rows
from cloze.launch.pretrained.finding import model_path
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.run import integrity, runs
from cloze.launch.system.console import Console
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.settings import TRUNCATION, Truncation, words_in
from cloze.launch.texts.tables import COLUMNS, columns_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_NO_LIMIT = 1 << 40  # tokens


@dataclass(frozen=True)
class Tokens:
    """A text or pair as a model reads it, special tokens included: lists with one entry per token."""

    tokens: list[str]
    input_ids: list[int]
    token_type_ids: list[int]
    attention_mask: list[int]
    offsets: list[tuple[int, int]]
    """Characters of each token; (0, 0) for special ones."""


@dataclass(frozen=True)
class Tokenize(Operation):
    """The inputs of a model for a text or pair of any length."""

    name = "tokenize"

    def encode(self, encoder: TextEncoder, row: Row) -> Iterable[Encoding]:
        return super().encode(whole_encoder(encoder.tokenizer, encoder.truncation.words), row)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        return [None] * len(batch.encodings)  # the model is not run

    def table_lines(self, row: Row, result: Tokens) -> Iterator[dict[str, str]]:
        columns = zip(result.tokens, result.input_ids, result.token_type_ids, result.offsets, strict=True)
        for token, number, segment, (start, end) in columns:
            yield {
                "token": token,
                "id": str(number),
                "segment": str(segment),
                "mask": "1",
                "characters": f"{start}-{end}",
            }

    def finish(self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]) -> Tokens:
        return tokens_of(loaded.tokenizer, encodings[0], loaded.config.segments)


@dataclass(frozen=True)
class TokenizeConfig(Tokenize, PairInput):
    """The inputs of a model for texts: tokens, ids, segments, mask, and the characters of each token."""

    model: str
    """The folder of a tokenizer (of `cloze vocab`, say), of a Cloze run or of a Hugging Face model, the URL of a run in
    an object store, or the name of a hub model."""


def whole_encoder(tokenizer: Tokenizer, words: Literal["characters"] | None) -> TextEncoder:
    """An encoder of texts of any length.

    Args:
        words: field of the model's Truncation.
    """
    return TextEncoder(tokenizer, _NO_LIMIT, truncation=Truncation(_NO_LIMIT, words=words))


def tokens_of(tokenizer: Tokenizer, encoding: Encoding, segments: tuple[int, int] = (0, 1)) -> Tokens:
    """The Tokens of a sequence.

    Args:
        segments: segment ids of the model.
    """
    names = [tokenizer.tokens[token] for token in encoding.ids]
    types = [segments[number] for number in encoding.segments]
    return Tokens(names, encoding.ids, types, [1] * len(encoding), encoding.offsets)


def tokenize(config: TokenizeConfig) -> int:
    """Print the inputs of a model for texts. Needs only the model's tokenizer.

    Returns:
        The exit status.
    """
    folder = model_path(config)
    tokenizer = Tokenizer.from_folder(integrity.tokenizer_folder(folder))
    described = runs.model_folder(folder) / "config.json"
    notes = runs.read_fields(described) if described.exists() else {}
    encoder = whole_encoder(tokenizer, words_in(notes.get(TRUNCATION)))
    rows = read_rows(config, columns_of(notes.get(COLUMNS)))
    results = ((row, tokens_of(tokenizer, encoder.encode(row.text, row.pair, place=row.place))) for row in rows)
    if config.output:
        number = write_results(Path(config.output), config, None, results)
        Console().say(f"wrote {number:,} results to {config.output}")
    else:
        print_results(config, results)
    return 0
