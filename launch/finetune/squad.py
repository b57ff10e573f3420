"""SQuAD's files and metrics: exact match and F1 as in the official scripts."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cloze.launch.texts.tables import parse_json, read_text
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


@dataclass(frozen=True)
class Question:
    """A question about a text.

    Args:
        answers: (text, first character) of each right one, none if it has no answer.
    """

    id: str
    text: str
    context: int
    """Number of the text."""
    answers: tuple[tuple[str, int], ...]


def read_squad(path: str | Path) -> tuple[list[str], list[Question], bool]:
    """Texts and questions of a file of SQuAD 1.1 or 2.0, and whether it has answers.

    Raises:
        UserError: the file has another form, or an answer is not at its offset.
    """
    path = Path(path)
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: can't be read as SQuAD's JSON ({error}), expected an object with 'data'") from error
    paragraphs = [
        part
        for number, article in enumerate(_field(path, "", content, "data", list))
        for part in _field(path, f"data[{number}]", article, "paragraphs", list)
    ]
    contexts: list[str] = []
    questions: list[Question] = []
    without: list[str] = []
    for number, paragraph in enumerate(paragraphs):
        place = f"paragraph {number + 1}"
        contexts.append(_field(path, place, paragraph, "context", str))
        for qa in _field(path, place, paragraph, "qas", list):
            questions.append(_question(path, f"{place}, question {len(questions) + 1}", qa, number, contexts[number]))
            if "answers" not in qa:
                without.append(questions[-1].id)
    if not questions:
        raise UserError(f"{path}: found no questions, expected examples")
    if without and len(without) < len(questions):
        raise UserError(
            f"{path}: question {without[0]}: found no field answers, which {len(questions) - len(without):,} of "
            f"{len(questions):,} questions have, expected it of all or of none; give it answers, [] if there is none"
        )
    return contexts, questions, not without


Kind = TypeVar("Kind")

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _field(path: Path, place: str, holder: object, name: str, kind: type[Kind]) -> Kind:
    """A field of an object of the file.

    Raises:
        UserError: naming what was found instead.
    """
    if not isinstance(holder, dict):
        found, expected = _KINDS[type(holder)], f"an object with {name!r}"
    elif name not in holder:
        found, expected = f"the fields {', '.join(map(repr, holder))}" if holder else "no fields", repr(name)
    elif not isinstance(holder[name], kind):
        found, expected = f"{name!r} as {_KINDS[type(holder[name])]}", _KINDS[kind]
    else:
        return holder[name]
    raise _not_squad(path, place, found, expected)


def _not_squad(path: Path, place: str, found: str, expected: str) -> UserError:
    where = f"{place}: " if place else ""
    return UserError(
        f"{path}: can't be read as SQuAD: {where}found {found}, expected {expected}; "
        "articles in data have paragraphs, these context and qas, these id, question and answers"
    )


def _start(path: Path, place: str, answer: Fields) -> int:
    value: Any = _field(path, place, answer, "answer_start", object)
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _not_squad(path, place, f"'answer_start' as {_KINDS[type(value)]}", "a number") from error


def _question(path: Path, place: str, qa: object, number: int, context: str) -> Question:
    text = _field(path, place, qa, "question", str)
    assert isinstance(qa, dict), "it has a field"
    identity = str(_field(path, place, qa, "id", object))
    listed = _field(path, place, qa, "answers", list) if "answers" in qa else []
    answers = tuple(
        (_field(path, f"{place}, answers", answer, "text", str), _start(path, f"{place}, answers", answer))
        for answer in listed
    )
    for answer, start in answers:
        if start < 0 or context[start : start + len(answer)] != answer or not answer:
            raise UserError(
                f"{path}: question {identity}: found {context[start : start + len(answer)]!r} at character "
                f"{start} of its text, expected the answer {answer!r}; fix answer_start"
            )
    return Question(identity, text, number, answers)


def normalized_words(answer: str) -> list[str]:
    """Words in lower case, without punctuation and articles (SQuAD's evaluate-v1.1.py and v2.0)."""
    kept = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return _ARTICLES.sub(" ", kept).split()


def normalized_characters(answer: str) -> list[str]:
    """Single letters and digits in lower case, without punctuation: for Chinese, which has no spaces."""
    return [character for character in answer.lower() if unicodedata.category(character)[0] not in "PZSC"]


def exact_match(answer: str, right: str, units: Callable[[str], list[str]]) -> float:
    """1 if both are equal after normalisation, else 0."""
    return float(units(answer) == units(right))


def f1(answer: str, right: str, units: Callable[[str], list[str]], version_2: bool) -> float:
    """F1 of the units that the two have in common; if neither has any, 1 by the script of SQuAD 2.0 and 0 by that of
    1.1.
    """
    guessed, true = units(answer), units(right)
    if not guessed or not true:
        return float(version_2 and guessed == true)
    common = sum((Counter(guessed) & Counter(true)).values())
    return 2 * common / (len(guessed) + len(true))


def squad_scores(
    questions: list[Question], answers: list[str], units: Callable[[str], list[str]], version_2: bool
) -> np.ndarray:
    """Exact match and F1 of each answer against the best of the right ones, (questions, 2), 0 to 1.

    SQuAD 2.0's script ignores right answers without units; if none is left, giving no answer is right.
    """
    scores = []
    for question, answer in zip(questions, answers, strict=True):
        right = [text for text, _ in question.answers if units(text) or not version_2] or [""]
        scores.append(
            [
                max(exact_match(answer, text, units) for text in right),
                max(f1(answer, text, units, version_2) for text in right),
            ]
        )
    return np.array(scores)


def squad_metrics(
    questions: list[Question], answers: list[str], units: Callable[[str], list[str]], version_2: bool
) -> dict[str, float]:
    """In percent, by the official scripts' names: exact_match and f1 (1.1); exact, f1, HasAns_, NoAns_ (2.0, which
    has exact_match here too).

    Args:
        answers: the best answer to each question; empty for no answer.
        version_2: whether questions may have no answer.
    """
    scores = 100 * squad_scores(questions, answers, units, version_2)
    values = {"exact_match": float(scores[:, 0].mean()), "f1": float(scores[:, 1].mean())}
    if not version_2:
        return values
    none = np.array([not question.answers for question in questions])
    values |= {"exact": values["exact_match"], "total": len(questions)}
    for name, chosen in (("HasAns", ~none), ("NoAns", none)):
        if chosen.any():
            values |= {
                f"{name}_exact": float(scores[chosen, 0].mean()),
                f"{name}_f1": float(scores[chosen, 1].mean()),
                f"{name}_total": int(chosen.sum()),
            }
    return values


def best_threshold(scores: np.ndarray, none: np.ndarray, answered: np.ndarray, odds: np.ndarray) -> tuple[float, float]:
    """Mean of scores (N,) if no answer is given above the best threshold of `odds`, and that threshold.

    Args:
        none: whether a question has no answer. answered: whether a text was predicted at all. All (N,).

    If never answering is best, the threshold is below all odds (the official script returns 0, as if odds were
    probabilities).
    """
    order = np.argsort(odds, kind="stable")
    gains = np.where(none, -1.0 * answered, scores)[order]
    totals = none.sum() + np.concatenate([[0.0], np.cumsum(gains)])
    best = int(totals.argmax())
    return float(totals[best] / len(scores)), float(odds[order][best - 1]) if best else float(odds.min() - 1)
