"""Suite `blimp`: minimal pairs (arXiv 1912.00582); how often the acceptable sentence of a pair is more probable."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cloze.launch.evaluate.likelihood import (
    Hidden,
    ScoringProgress,
    check_finite,
    log_likelihoods,
    num_tokens,
    warn_of_longer,
)
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.system.console import Console
from cloze.launch.system.devices import SLOW_BF16, bf16_slowdown
from cloze.launch.texts.encoding import half_character
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.untrusted import check_readable, load_json, unique_fields

# BLiMP's 13 terms are 12 phenomena: the paper counts the two paradigms of s-selection as argument structure.
_PHENOMENA = {"s-selection": "argument_structure"}
# Nats below which two sentences that bf16 has scored are scored again in fp32: nine times the standard deviation of
# what bf16 changes in their difference, which docs/evaluate.md has.
CLOSE = 0.25


@dataclass(frozen=True)
class Pair:
    """Two sentences, with their paradigm and phenomenon."""

    good: str
    bad: str
    paradigm: str
    phenomenon: str
    place: str
    """File and line, for messages."""


def read_pairs(folder: Path, every_nth: int = 1) -> list[Pair]:
    """The pairs of all *.jsonl files of a folder. The paradigm is `UID`, else the file's name; the phenomenon is
    `linguistics_term`, else the paradigm.

    Raises:
        UserError: there is no such file, or a line is not a pair.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(
            f"data: found no *.jsonl file in {folder}, expected a folder of files with sentence_good and "
            "sentence_bad in each line"
        )
    left = [path for path in folder.rglob("*") if ".jsonl" in path.name.lower() and path not in files]
    if left:
        Console().warn(f"{folder}: left out {len(left)} files that are no *.jsonl of the folder itself, as {left[0]}")
    pairs: list[Pair] = []
    phenomena: dict[str, str] = {}
    for path in files:
        check_readable(path)
        with readable_errors(path):
            content = path.read_bytes().split(b"\n")  # not splitlines, which also splits inside strings
        lines = [(number, line) for number, line in enumerate(content, 1) if line.strip()]
        if not lines:
            raise UserError(f"{path}: found no pair, expected one in each line; move the file away")
        for number, line in lines[::every_nth]:
            pairs.append(pair := _pair(line, path.stem, f"{path}:{number}"))
            if (before := phenomena.setdefault(pair.paradigm, pair.phenomenon)) != pair.phenomenon:
                raise UserError(
                    f"{pair.place}: found the phenomenon {pair.phenomenon!r:.60} of the paradigm "
                    f"{pair.paradigm!r:.60}, expected {before!r:.60}, as in the lines before"
                )
    return pairs


def _pair(line: bytes, name: str, place: str) -> Pair:
    try:
        content = load_json(line, unique_fields)
        good, bad = content["sentence_good"], content["sentence_bad"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{place}: found no pair ({type(error).__name__}: {error}), expected an object with "
            "sentence_good and sentence_bad"
        ) from error
    for text in (good, bad):
        if not isinstance(text, str):
            raise UserError(f"{place}: found {text!r:.60}, expected a sentence")
    names = [content.get("UID"), content.get("linguistics_term")]
    for found in names:
        if not isinstance(found, str | None):
            raise UserError(f"{place}: found {found!r:.60}, expected the name of a paradigm or a phenomenon, or none")
    paradigm = names[0] or name
    term = names[1] or paradigm
    for found in (paradigm, term):
        if half := half_character(found):
            raise UserError(f"{place}: found {half}, in the name of a paradigm or a phenomenon; correct it")
    return Pair(good, bad, paradigm, _PHENOMENA.get(term, term), place)


def score_pairs(
    loaded: LoadedModel,
    pairs: list[Pair],
    precision: str,
    hidden: Hidden,
    progress: ScoringProgress,
) -> np.ndarray:
    """Log-probability of the good sentence minus that of the bad one, (n,) float64. Repeated sentences are scored once.

    Args:
        precision: fp32; bf16; or auto: bf16, and fp32 for pairs whose difference in bf16 is below `CLOSE`; all in fp32
            on a CPU whose products in bf16 are slow.
        hidden: what is hidden when a token is predicted.

    Raises:
        UserError: a sentence is empty, or longer than the model's positions.
    """
    texts = {pair.good: pair.place for pair in reversed(pairs)} | {pair.bad: pair.place for pair in reversed(pairs)}
    number = {text: place for place, text in enumerate(texts)}
    encodings = [loaded.encoder.encode(text, place=place) for text, place in texts.items()]
    sides = np.array([[number[pair.good], number[pair.bad]] for pair in pairs])
    places = list(texts.values())
    warn_of_longer(loaded, encodings)
    progress.total = num_tokens(encodings, hidden)
    if precision == "auto" and bf16_slowdown(torch.device(loaded.device)) >= SLOW_BF16:
        precision = "fp32"
    score = partial(log_likelihoods, loaded, hidden=hidden, progress=progress)
    scores = score(encodings, bf16=precision != "fp32")
    check_finite(scores, places.__getitem__)
    differences = scores[sides[:, 0]] - scores[sides[:, 1]]
    if precision == "auto":
        close = np.abs(differences) < CLOSE
        again = np.unique(sides[close])
        chosen = [encodings[place] for place in again]
        progress.total += num_tokens(chosen, hidden)
        scores[again] = score(chosen)
        check_finite(scores, places.__getitem__)
        # Both sentences of a pair are scored in the same precision.
        differences = np.where(close, scores[sides[:, 0]] - scores[sides[:, 1]], differences)
    return differences


def accuracies(pairs: list[Pair], differences: np.ndarray) -> Fields:
    """Percent of pairs whose good sentence is more probable (ties count as wrong): for each paradigm; means over each
    phenomenon, over all paradigms, and over the phenomena.
    """
    right, phenomenon = defaultdict(list), {}
    for pair, difference in zip(pairs, differences, strict=True):
        right[pair.paradigm].append(bool(difference > 0))
        phenomenon[pair.paradigm] = pair.phenomenon
    paradigms = {name: 100 * statistics.fmean(values) for name, values in sorted(right.items())}
    groups = defaultdict(list)
    for name, value in paradigms.items():
        groups[phenomenon[name]].append(value)
    phenomena = {name: statistics.fmean(values) for name, values in sorted(groups.items())}
    return {
        "paradigms": paradigms,
        "phenomena": phenomena,
        "mean_of_paradigms": statistics.fmean(paradigms.values()),
        "mean_of_phenomena": statistics.fmean(phenomena.values()),
    }
