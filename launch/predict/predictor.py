"""`Predictor`: runs operations on a trained model, from Python, the command line and the server."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cloze.launch.config.model import ModelConfig
from cloze.launch.predict.answers import AnswerQuestion, Span
from cloze.launch.predict.blanks import FillMask, Guess, Score, SentenceScore
from cloze.launch.predict.choices import Choice, Choose
from cloze.launch.predict.labels import Classify, Label
from cloze.launch.predict.operation import Batch, Operation, Result, Row, Value, shown
from cloze.launch.predict.rows import given_rows, listed
from cloze.launch.predict.table import OPERATIONS
from cloze.launch.predict.tags import Tag, TagWords
from cloze.launch.predict.tokenize import Tokenize, Tokens
from cloze.launch.predict.vectors import (
    Attend,
    Attentions,
    Compare,
    Embed,
    Features,
    FindWord,
    TokenVectors,
    WordInContext,
    in_contexts,
)
from cloze.launch.pretrained.finding import fetched_run, model_path
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.pretrained.loading import load_model
from cloze.launch.system.devices import to_device
from cloze.launch.texts.encoding import Encoding
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.collate import concatenated

# Texts that are read ahead and sorted by length: enough for batches of similar lengths, few enough for a fast first
# result.
CHUNK_ROWS = 1024
# Tokens of one forward: enough to use two cores or a GPU well; larger batches were not faster on a CPU.
BATCH_TOKENS = 4096


class Predictor:
    """A model and its tokenizer, ready for use.

    >>> model = Predictor.from_folder("runs/small-hf")
    >>> model.fill_mask("The capital of [MASK] is Paris.")

    Each method takes one text; `classify`, `tag`, `answer` and `embed` take lists, too. `map` takes an operation and
    any number of texts, runs batches of similar lengths, and yields results as they are computed.

    Args:
        loaded: the LoadedModel, whose model, tokenizer and config are attributes here, too.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config

    @classmethod
    def from_folder(cls, folder: str | Path, step: int | Literal["best"] | None = None) -> Predictor:
        """Load a Hugging Face folder of an encoder, or a Cloze run (of pretraining: the checkpoint `step`; "best": the
        one of the best evaluation; None: the newest good one).

        Raises:
            UserError, ModelError: the folder holds neither, is damaged, or has no such checkpoint.
        """
        return cls(load_model(model_name(folder), step))

    @classmethod
    def from_hub(cls, name: str | Path, **options: Any) -> Predictor:
        """Load a folder, or a model by its name on the hub; options are those of
        `cloze.launch.config.model.ModelConfig`: revision, cache_dir, offline, pickled_weights.

        Raises:
            UserError, ModelError: there is no such model, or as `from_folder`.
        """
        fetched_run.cache_clear()  # a run in a store may have gone on since an earlier call
        return cls.from_folder(model_path(ModelConfig(model_name(name), **options)))

    # ---- one text, or a list ----

    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Guess]]:
        """The `top_k` most probable tokens for each [MASK] of a text, most probable first.

        Raises:
            UserError: there is no [MASK], or the text is longer than the model's positions.
        """
        return self._one(FillMask(top_k=top_k), text)

    def score(self, text: str) -> SentenceScore:
        """Pseudo-log-likelihood of a text, and of each token; higher is more probable."""
        return self._one(Score(), text)

    def classify(
        self,
        text: str | Iterable[str | tuple[str, str]],
        pair: str | Iterable[str] | None = None,
        top_k: int | None = None,
    ) -> list[Label] | list[list[Label]]:
        """Labels of a text or pair, the most probable first; for a list (pairs as tuples, or as two lists) a list of
        labels each. Texts longer than the model reads are truncated, with a warning.
        """
        results = self._each(Classify(top_k=top_k), text, pair)
        self._warn(sum(result.cut_tokens for result in results))
        found = [result.labels for result in results]
        return found[0] if isinstance(text, str) else found

    def tag(
        self, text: str | Iterable[str], aggregation: Literal["none", "simple", "first", "average", "max"] = "first"
    ) -> list[Tag] | list[list[Tag]]:
        """Tagged words of a text of any length; for a list of texts a list each; `aggregation` as in `TagWords`."""
        results = self._each(TagWords(aggregation=aggregation), text)
        return results[0] if isinstance(text, str) else results

    def answer(
        self, question: str | Iterable[str], context: str | Iterable[str], top_k: int = 1, **options: Any
    ) -> list[Span] | list[list[Span]]:
        """The best answers in a context of any length; for a list of questions, with one context or one each, a list
        each. Further options are those of `AnswerQuestion`.
        """
        results = self._each(AnswerQuestion(top_k=top_k, **options), question, context)
        return results[0] if isinstance(question, str) else results

    def choose(self, text: str, choices: Iterable[str]) -> list[Choice]:
        """Choices ranked as continuations of a text, the most probable first; at least two. Texts longer than the model
        reads are truncated, with a warning.
        """
        (result,) = self.map(Choose(), [Row(text, choices=tuple(listed("choices", choices)))])
        self._warn(result.cut_tokens)
        return result.ranking

    def similarity(
        self,
        text: str,
        other: str,
        pooling: Literal["cls", "mean", "max"] | None = None,
        layer: int = -1,
        dimensions: int | None = None,
    ) -> float:
        """Cosine of the vectors of two texts, -1 to 1; pooling, layer and dimensions as in `embed`."""
        result = self._one(Compare(pooling=pooling, layer=layer, dimensions=dimensions), text, other)
        self._warn(result.cut_tokens)
        return result.cosine

    def embed(
        self,
        texts: Iterable[str | tuple[str, str]],
        pooling: Literal["cls", "mean", "max"] | None = None,
        layer: int = -1,
        dimensions: int | None = None,
    ) -> np.ndarray:
        """One vector per text, (N, hidden size) fp32. Texts longer than the model reads are truncated, with a warning.

        Args:
            pooling: cls, mean, max; None: as the model was trained, else mean.
            layer: 0 embeddings, 1 ..., -1 last.
            dimensions: keep the first numbers as unit vectors, (N, dimensions).
        """
        results = list(self.map(Embed(pooling=pooling, layer=layer, dimensions=dimensions), texts))
        self._warn(sum(result.cut_tokens for result in results))
        return (
            np.stack([result.vector for result in results])
            if results
            else np.empty((0, dimensions or self.config.hidden_size), np.float32)
        )

    def features(self, text: str, pair: str | None = None, layer: int = -1) -> TokenVectors:
        """The vector of every token, special tokens included."""
        return self._one(Features(layer=layer), text, pair)

    def attention(self, text: str, pair: str | None = None) -> Attentions:
        """The attention probabilities of every head of every layer."""
        return self._one(Attend(), text, pair)

    def word(self, word: str, texts: Iterable[str | Row], layer: int = -1) -> list[WordInContext]:
        """The vectors of all occurrences of a word in some texts, with their cosines to each other and to its word
        embedding.
        """
        return in_contexts(self.map(FindWord(layer, word=word), texts))

    def tokenize(self, text: str, pair: str | None = None) -> Tokens:
        """Tokens, ids and other inputs of the model for a text of any length, or a pair."""
        return self._one(Tokenize(), text, pair)

    # ---- any number of texts ----

    def map(self, operation: Operation, texts: Iterable[str | tuple[str, str] | Row]) -> Iterator[Result]:
        """Yield results in the order of the texts (or pairs), which run in batches of similar lengths.

        Raises:
            UserError: the model lacks the head, or a text is refused; results of earlier chunks have been yielded.
        """
        return (result for _, result in self.map_rows(operation, texts))

    def map_rows(
        self, operation: Operation, texts: Iterable[str | tuple[str, str] | Row]
    ) -> Iterator[tuple[Row, Result]]:
        """As `map`, each result behind the text or pair that it is of."""
        self.require(operation)
        rows = given_rows(texts)
        while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
            results = self.run(operation, [(row, list(self.prepare(operation, row))) for row in chunk])
            yield from zip(chunk, results, strict=True)

    def require(self, operation: Operation) -> None:
        """Raise UserError if this model does not support the operation with its options."""
        if not self.has_head(operation):
            kind = type(self.model).__name__
            raise UserError(
                f"{self.loaded.source}: found a {kind}, expected a model with the head for "
                f"{operation.name}; its operations are {', '.join(self.abilities())}"
            )
        operation.check(self.loaded)

    def has_head(self, operation: type[Operation] | Operation) -> bool:
        head = operation.head
        return head is None or type(self.model).__name__ == head or hasattr(self.model, head)

    def abilities(self) -> list[str]:
        """Names of the operations that this model supports."""
        return [name for name, entry in OPERATIONS.items() if self.has_head(entry.load())]

    def prepare(self, operation: Operation, row: Row) -> Iterator[Encoding]:
        """Encode one text; needs no device.

        Raises:
            UserError: as `Operation.encode`.
        """
        operation.check_row(row, self.loaded.columns)
        yield from operation.encode(self.loaded.encoder, row)

    @torch.inference_mode()
    def run(
        self,
        operation: Operation,
        prepared: Sequence[tuple[Row, list[Encoding]]],
        turn: AbstractContextManager[Any] | None = None,
    ) -> list[Value]:
        """Results of prepared texts, which may come from different requests: sequences do not influence each other.

        Args:
            turn: held during each forward; a lock for threads that share the model.
        """
        operation = operation.with_model_defaults(self.loaded)
        flat = [encoding for _, encodings in prepared for encoding in encodings]
        values: list[Value] = [None] * len(flat)
        for places in batches([len(encoding) for encoding in flat]):
            batch = self._batch([flat[place] for place in places])
            with turn or nullcontext():
                of_batch = operation.read(self.model, batch)
            for place, value in zip(places, of_batch, strict=True):
                values[place] = value
        results, start = [], 0
        for row, encodings in prepared:
            end = start + len(encodings)
            results.append(operation.finish(self.loaded, row, encodings, values[start:end]))
            start = end
        return results

    def _batch(self, encodings: list[Encoding]) -> Batch:
        bounds = np.array([0, *itertools.accumulate(map(len, encodings))])
        ids = np.array([token for each in encodings for token in each.ids], np.int64)
        seconds = np.array([each.segment_b_start for each in encodings])
        (inputs,) = concatenated(ids, bounds, seconds, np.array([len(encodings)]), self.config.segments)
        batch = Batch(encodings, bounds.tolist(), inputs)
        if blanks := batch.blanks():
            inputs["input_ids"][blanks] = self.tokenizer.special_tokens.mask
        return replace(batch, inputs=to_device(inputs, torch.device(self.loaded.device)))

    def _each(
        self, operation: Operation, text: str | Iterable[Any], pair: str | Iterable[str] | None = None
    ) -> list[Value]:
        """Results of a text or a list of texts, with one second text for all, one each, or none."""
        if isinstance(text, str):
            if pair is not None and not isinstance(pair, str):
                raise UserError(
                    "texts: found one text with a list of second ones, expected one second text, or two lists"
                )
            return [self._one(operation, text, pair)]
        texts = list(listed("texts", text))
        if pair is None:
            return list(self.map(operation, texts))
        seconds = [pair] * len(texts) if isinstance(pair, str) else list(listed("second texts", pair))
        if len(seconds) != len(texts):
            raise UserError(f"texts: found {len(texts)} texts with {len(seconds)} second ones, expected as many")
        return list(self.map(operation, list(zip(texts, seconds, strict=True))))

    def _one(self, operation: Operation, text: str, pair: str | None = None) -> Any:
        encoder = self.loaded.encoder
        before = encoder.longer_texts
        (result,) = self.map(operation, [Row(text, pair)])
        if encoder.longer_texts > before:
            warnings.warn(
                f"the text has more than the {encoder.truncation.max_length} tokens that the model "
                "was trained on; expect lower accuracy there, or divide it",
                stacklevel=3,
            )
        return result

    def _warn(self, cut_tokens: int) -> None:
        if cut_tokens:
            longest = self.loaded.encoder.truncation.max_length
            warnings.warn(f"{cut_tokens} tokens beyond the {longest} that the model reads were truncated", stacklevel=3)


def model_name(model: object) -> str:
    """The path, URL or name of a model as text, with ~ replaced by the home folder.

    Raises:
        UserError: it is empty, or neither text nor path.
    """
    if not isinstance(model, str | os.PathLike) or not str(model).strip():
        raise UserError(
            f"model: found {shown(model)}, expected the folder of a Cloze run or a Hugging Face folder, or "
            "the name of a hub model"
        )
    text = str(model)
    return os.path.expanduser(text)


def batches(lengths: Sequence[int], batch_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of sequences in batches of similar lengths, each of at most `batch_tokens` tokens or one sequence."""
    batch: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and tokens + lengths[place] > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += lengths[place]
    if batch:
        yield batch
