"""The description of a server's model, by which the page names it and chooses the fields that it shows."""

import re
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from cloze.launch.predict.blanks import FillMask
from cloze.launch.predict.labels import Classify
from cloze.launch.predict.predictor import Predictor
from cloze.launch.predict.tags import TagWords
from cloze.launch.pretrained.card_examples import Example, card_examples, row_examples
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.run import runs
from cloze.pipeline.fields import Fields
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# Texts with a blank, of which a small vocabulary may have all words of one: of facts, of stories, of documentation.
_BLANKS = (
    "The capital of [MASK] is Paris.",
    "She went to the [MASK].",
    "Return the [MASK] of the object.",
    "This is the [MASK].",
    "the [MASK] is",
)
# From so many letters on a token is a word to a reader; most shorter ones are in a vocabulary as parts of others.
_LETTERS_OF_A_WORD = 3


def describe(predictor: Predictor, name: str, *, shows_rows: bool = False) -> Fields:
    """The answer of GET /model.

    Args:
        name: the model as the command names it.
        shows_rows: whether rows of the validation file may be examples; they may be of no concern to other machines.
    """
    loaded = predictor.loaded
    labelled = predictor.has_head(Classify) or predictor.has_head(TagWords)
    return {
        "model": name,
        "class": type(loaded.model).__name__,
        "revision": loaded.revision,
        "labels": list(loaded.model.head.labels) if labelled else [],
        "operations": predictor.abilities(),
        "pairs": _pairs(loaded),
        "columns": list(loaded.columns.texts) if loaded.columns else [],
        "examples": [asdict(example) for example in _examples(predictor, shows_rows)],
    }


def _examples(predictor: Predictor, shows_rows: bool) -> list[Example]:
    """Those of the model card; without any, the first rows of the file by which the run was measured, or for a
    masked-LM head a text of which the vocabulary has all words, if none of ours then one of its own words.
    """
    loaded = predictor.loaded
    folder, columns = Path(loaded.source), loaded.columns
    if examples := card_examples(folder):
        return examples
    if columns and not columns.choices:
        if not shows_rows or folder.name != runs.MODEL:  # the model of a fine-tuning run lies beside its predictions
            return []
        return row_examples(folder.parent / runs.PREDICTIONS / "validation.jsonl", columns.texts)
    if predictor.has_head(FillMask):
        known = [text for text in _BLANKS if _covers(loaded.tokenizer, text.replace("[MASK]", ""))]
        return [Example(text) for text in (known or _of_vocabulary(loaded.tokenizer))[:1]]
    return []


def _of_vocabulary(tokenizer: Tokenizer) -> list[str]:
    """A blank between words of the vocabulary, or letters where it has no words: of another language, of proteins. The
    first ones: of a vocabulary that was trained here the most frequent.
    """

    def first(least: int) -> list[str]:
        texts = (tokenizer.decode([token]).strip() for token in np.flatnonzero(~tokenizer.continues_word).tolist())
        return list(
            islice((each for each in texts if len(each) >= least and each.isalpha() and _covers(tokenizer, each)), 3)
        )

    words = first(_LETTERS_OF_A_WORD) or first(1)
    return [" ".join([*words[:2], "[MASK]", *words[2:]])] if words else []


def _covers(tokenizer: Tokenizer, text: str) -> bool:
    """Whether no word of a text is unknown or cut into pieces."""
    ids = tokenizer.encode(text)
    return len(ids) <= len(re.findall(r"\w+|[^\w\s]", text)) and not {*ids} & {*tokenizer.special_tokens.ids}


def _pairs(loaded: LoadedModel) -> Literal["never", "maybe", "always"]:
    """Whether a classifier reads pairs of texts; maybe: its training is not known."""
    if not loaded.encoder.takes_pairs:
        return "never"
    if loaded.columns is None:
        return "maybe"
    return "always" if len(loaded.columns.texts) == 2 else "never"
