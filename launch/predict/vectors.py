"""Operations of any encoder: vectors of texts (`embed`, `similarity`), of tokens (`features`), attention weights."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cloze.launch.predict.config import Input, PairInput, typed_text
from cloze.launch.predict.operation import Batch, Model, Operation, Row, Value, shown_vector
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import figure
from cloze.launch.system.pictures import check_ending
from cloze.launch.texts.encoding import Encoding, TextEncoder
from cloze.launch.texts.settings import normalized
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class OfLayer(Operation):
    """An operation on the vectors of one layer."""

    layer: int = -1
    """Layer whose output is taken: 1 to the number of layers, 0 for the embeddings, or counted from the end (-1)."""

    def check(self, loaded: LoadedModel) -> None:
        layers = loaded.config.num_hidden_layers
        if not -layers - 1 <= self.layer <= layers:
            raise UserError(f"layer: found {self.layer}, expected {-layers - 1} to {layers}, the model's layers")

    def hidden(self, model: Model, batch: Batch) -> Value:
        """Hidden states of the layer, (T, hidden size)."""
        encoder: Model = getattr(model, "bert", model)
        if self.layer == -1:
            return encoder(**batch.inputs).last_hidden_state
        return encoder(**batch.inputs, output_hidden_states=True).hidden_states[self.layer]

    def read(self, model: Model, batch: Batch) -> list[Value]:
        """The hidden states of each sequence's tokens."""
        return batch.split(self.hidden(model, batch))


@dataclass(frozen=True)
class Pooled(OfLayer):
    """An operation on one vector per text."""

    pooling: Literal["cls", "mean", "max"] | None = None
    """Vector of [CLS], or mean or maximum over all tokens, special ones included; null: as the model was trained,
    otherwise mean."""
    dimensions: int | None = None
    """Number of leading vector components that are kept and then divided by their norm; null: all."""

    def check(self, loaded: LoadedModel) -> None:
        super().check(loaded)
        if self.dimensions is not None and not 1 <= self.dimensions <= loaded.config.hidden_size:
            raise UserError(
                f"dimensions: found {self.dimensions}, expected 1 to {loaded.config.hidden_size}, the size "
                "of the model's vectors"
            )

    def with_model_defaults(self, loaded: LoadedModel) -> Operation:
        return replace(self, pooling=self.pooling or loaded.vectors.pooling)

    def cut(self, vector: np.ndarray) -> np.ndarray:
        """Keep the first `dimensions` numbers as a unit vector, (dimensions,); without `dimensions` the vector as it
        is.
        """
        return vector if self.dimensions is None else normalized(vector[: self.dimensions])

    def read(self, model: Model, batch: Batch) -> list[Value]:
        from cloze.model.sentence_vectors import pool

        assert self.pooling is not None, "`with_model_defaults` comes first"
        vectors = pool(self.hidden(model, batch), self.pooling, batch.inputs["sequence_offsets"])
        return list(vectors.float().cpu().numpy())


@dataclass(frozen=True)
class Embedding:
    """The vector of a text."""

    vector: np.ndarray
    """(hidden,) fp32, or (dimensions,)."""
    cut_tokens: int
    """Tokens of a long text that the model has not seen."""


@dataclass(frozen=True)
class Embed(Pooled):
    """One vector for each text or pair; a model fine-tuned with the task embed gives unit vectors as in its
    training.
    """

    name = "embed"

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        return [encoder.encode(row.text, row.pair, cut=True, place=row.place)]

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        return self.dimensions or loaded.config.hidden_size

    def table_lines(self, row: Row, result: Embedding) -> Iterator[dict[str, str]]:
        yield {"text": row.both, "vector": shown_vector(result.vector)}

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> Embedding:
        vector, learned = values[0], loaded.vectors
        as_learned = self.pooling == learned.pooling and self.layer in (-1, loaded.config.num_hidden_layers)
        if learned.normalize and as_learned:
            vector = normalized(vector)
        return Embedding(self.cut(vector), encodings[0].cut_tokens)


@dataclass(frozen=True)
class EmbedConfig(Embed, PairInput):
    """One vector for each text."""

    outputs = (*Input.outputs, ".npy")

    output: str | None = None
    """File for the vectors: *.npy, an array (texts, hidden) fp32; *.parquet, *.csv, *.tsv: with the input table's
    columns; *.jsonl: JSON objects; null: they are printed."""
    picture: str | None = None
    """Image file (*.png, *.pdf, *.svg) for the two principal components of the vectors, one point per text; the vectors
    are then not printed."""
    colour_column: str | None = None
    """Column of the table by whose values the points of the picture are coloured; null: all have one colour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ending("picture", self.picture)
        if self.format and self.picture:
            raise UserError(
                f"format: found {self.format} beside picture, expected null: with it nothing is printed; leave "
                "--format out"
            )
        if self.colour_column and not self.picture:
            raise UserError(
                f"colour_column: found {self.colour_column} without a picture, expected none; name the image with "
                "--picture"
            )
        if self.colour_column and not self.file:
            raise UserError(
                f"colour_column: found {self.colour_column} without a table, expected none; name the table with --file"
            )


@dataclass(frozen=True)
class Similarity:
    """Cosine of the vectors of two texts."""

    cosine: float
    cut_tokens: int
    """Tokens of long texts that the model has not seen."""


@dataclass(frozen=True)
class Compare(Pooled):
    """Similarity of two texts: the cosine of their vectors."""

    name, takes_pair = "similarity", "always"

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        return [encoder.encode(text, cut=True, place=row.place) for text in (row.text, row.second)]

    def table_lines(self, row: Row, result: Similarity) -> Iterator[dict[str, str]]:
        yield {"text": row.text, "other": row.pair or "", "cosine": figure(result.cosine)}

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> Similarity:
        return Similarity(cosine(*map(self.cut, values)), sum(each.cut_tokens for each in encodings))


@dataclass(frozen=True)
class SimilarityConfig(Compare, Input):
    """Compare texts: on the command line the first one with each of the others, in a file the two texts of each
    line.
    """

    def given(self) -> Iterator[Row]:
        if len(self.text) == 1:
            raise UserError("text: found one text, expected at least two to compare")
        yield from (Row(self.text[0], other) for other in self.text[1:])


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Cosine of two vectors (hidden,), -1 to 1 whatever the rounding."""
    return float(np.clip(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)), -1.0, 1.0))


@dataclass(frozen=True)
class TokenVectors:
    """A vector for each token, special tokens included; n tokens."""

    tokens: list[str]
    offsets: list[tuple[int, int]]
    """Characters of each token; (0, 0) for special ones."""
    vectors: np.ndarray
    """(n, hidden) fp32."""


@dataclass(frozen=True)
class Features(OfLayer):
    """The vector of every token."""

    name = "features"

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        return loaded.config.hidden_size * sum(map(len, encodings))

    def table_lines(self, row: Row, result: TokenVectors) -> Iterator[dict[str, str]]:
        for token, (start, end), vector in zip(result.tokens, result.offsets, result.vectors, strict=True):
            yield {"token": token, "characters": f"{start}-{end}", "vector": shown_vector(vector)}

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> TokenVectors:
        names = loaded.tokenizer.tokens
        return TokenVectors([names[token] for token in encodings[0].ids], encodings[0].offsets, values[0])


@dataclass(frozen=True)
class FeaturesConfig(Features, PairInput):
    """A vector for each token, or for all occurrences of a word."""

    word: str | None = typed_text()
    """Print only the vectors of this word, each with its cosine to the word's static vector and to the other
    vectors."""
    attention: str | None = None
    """Image file (*.png, *.pdf, *.svg) for the attention heads of the single text that is given."""

    def __post_init__(self) -> None:
        beside = {"word": self.word, "layer": None if self.layer == -1 else self.layer, "format": self.format}
        if self.attention and (without_effect := [name for name, value in beside.items() if value is not None]):
            raise UserError(
                f"{without_effect[0]}: found {beside[without_effect[0]]!r} beside attention, expected none: all layers "
                "are drawn, and nothing is printed"
            )
        if self.output and (self.word or self.attention):
            raise UserError(
                f"output: found {self.output} with {'word' if self.word else 'attention'}, expected null: "
                "the vectors of all tokens are written; leave --output out"
            )
        check_ending("attention", self.attention)
        super().__post_init__()


@dataclass(frozen=True)
class Attentions:
    """Attention probabilities of a text; n tokens."""

    tokens: list[str]
    weights: np.ndarray
    """(layers, heads, n, n) fp32: probabilities; a row is a token that looks, a column one that is looked at."""


@dataclass(frozen=True)
class Attend(Operation):
    """The attention probabilities of every head for a text or pair; [MASK] in the text is a mask token."""

    name = "attention"

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        return [encoder.encode(row.text, row.pair, blanks=encoder.has_blank(row.text), place=row.place)]

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        heads = loaded.config.num_hidden_layers * loaded.config.num_attention_heads
        return heads * sum(len(each) ** 2 for each in encodings)

    def read(self, model: Model, batch: Batch) -> list[Value]:
        encoder: Model = getattr(model, "bert", model)
        layers = encoder(**batch.inputs, output_attentions=True).attentions
        host = [layer.float().cpu().numpy() for layer in layers]
        return [
            np.stack([layer[row, :, : len(each), : len(each)] for layer in host])
            for row, each in enumerate(batch.encodings)
        ]

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> Attentions:
        names = loaded.tokenizer.tokens
        return Attentions([names[token] for token in encodings[0].ids], values[0])


@dataclass(frozen=True)
class Occurrence:
    """An occurrence of a word in a text: characters `start` to `end` (exclusive)."""

    text: str
    start: int
    end: int
    vector: np.ndarray
    """(hidden,) fp32: the mean over the word's tokens."""
    static: np.ndarray
    """(hidden,) fp32: the mean of the tokens' rows in the word embedding, which no context has changed."""
    cosine_to_static: float


@dataclass(frozen=True)
class WordInContext(Occurrence):
    """An occurrence, with the cosines of its vector to those of other occurrences."""

    cosines: list[float]
    """Cosines to every occurrence, in their order, itself included."""


@dataclass(frozen=True)
class FindWord(OfLayer):
    """The vectors of all occurrences of a word in a text, and its word embedding."""

    name, key = "word", "occurrences"

    word: str = field(kw_only=True)
    """Word, as the tokenizer sees it (without case, if it drops case)."""

    def check(self, loaded: LoadedModel) -> None:
        super().check(loaded)
        if not loaded.tokenizer.encode(self.word):
            raise UserError(f"word: found {self.word!r}, expected a word")

    def encode(self, encoder: TextEncoder, row: Row) -> list[Encoding]:
        (encoding,) = super().encode(encoder, row)
        if not self._found(encoder.tokenizer, row, encoding):
            raise UserError(f"{row.place}: found no {self.word!r} in {row.text!r}, expected it in every text")
        return [encoding]

    def numbers(self, loaded: LoadedModel, encodings: Sequence[Encoding]) -> int:
        return 2 * loaded.config.hidden_size * len(self._places(loaded.tokenizer, encodings[0]))

    def finish(
        self, loaded: LoadedModel, row: Row, encodings: Sequence[Encoding], values: Sequence[Value]
    ) -> list[Occurrence]:
        table, occurrences = getattr(loaded.model, "bert", loaded.model).embeddings.word.weight, []
        for text, (start, end), low, high in self._found(loaded.tokenizer, row, encodings[0]):
            vector = values[0][low:high].mean(0)
            static = table.detach()[encodings[0].ids[low:high]].float().mean(0).cpu().numpy()
            occurrences.append(Occurrence(text, start, end, vector, static, cosine(vector, static)))
        return occurrences

    def _places(self, tokenizer: Tokenizer, encoding: Encoding) -> list[tuple[int, int]]:
        """Token ranges (end exclusive) of whole words with the word's tokens."""
        # With a tokenizer that includes the space before a word, the word has other tokens without a space.
        written = [self.word, f" {self.word}"] if tokenizer.first_word_differs else [self.word]
        forms = [list(ids) for ids in dict.fromkeys(tuple(tokenizer.encode(form)) for form in written)]
        return [
            (place, place + len(ids))
            for place in range(len(encoding))
            for ids in forms
            if _has_word_at(encoding, place, ids)
        ]

    def _found(self, tokenizer: Tokenizer, row: Row, encoding: Encoding) -> list[tuple[str, tuple[int, int], int, int]]:
        """Text, characters and token range of each occurrence."""
        unknown, words, found = tokenizer.special_tokens.unknown, tokenizer.normalize(self.word).split(), []
        for low, high in self._places(tokenizer, encoding):
            text = row.text if encoding.parts[low] == 1 else row.second
            span = encoding.offsets[low][0], encoding.offsets[high - 1][1]
            if unknown in encoding.ids[low:high] and tokenizer.normalize(text[slice(*span)]).split() != words:
                continue  # [UNK] can be another word
            found.append((text, span, low, high))
        return found


def in_contexts(results: Iterable[list[Occurrence]]) -> list[WordInContext]:
    """The occurrences of a word in some texts (results of FindWord), each with its cosines to all."""
    everywhere = [each for occurrences in results for each in occurrences]
    return [
        WordInContext(**vars(each), cosines=[cosine(each.vector, other.vector) for other in everywhere])
        for each in everywhere
    ]


def _has_word_at(encoding: Encoding, place: int, ids: list[int]) -> bool:
    """Whether there are whole words with these tokens at `place`."""
    end = place + len(ids)
    return encoding.ids[place:end] == ids and not encoding.continues[place] and not encoding.continues[end]
