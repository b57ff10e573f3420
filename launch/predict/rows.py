"""Texts from the command line, a file or standard input."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterable, Iterator

from cloze.launch.predict.config import AnswerConfig, ChooseConfig, Input, PairInput, SimilarityConfig
from cloze.launch.predict.operation import Operation, Row
from cloze.pipeline.errors import UserError


def read_rows(config: Input) -> Iterator[Row]:
    """Texts or pairs with their places.

    Raises:
        UserError: there are none, a line is no UTF-8 or no JSON object, or lacks a field.
    """
    if config.text:
        yield from _given(config)
        return
    kind = type(config) if isinstance(config, Operation) else Operation
    fields = kind.fields
    if config.file in (None, "-"):
        if config.file is None and sys.stdin.isatty():
            raise UserError(f"text: found none, expected a {fields[0]} on the command line, --file, or lines on "
                            "standard input")
        yield from _parse(sys.stdin.buffer, "standard input", config.lines == "json", kind)
        return
    as_json = config.lines == "json" if config.lines else config.file.endswith((".jsonl", ".json"))
    try:
        with open(config.file, "rb") as file:
            yield from _parse(file, config.file, as_json, kind)
    except OSError as error:
        raise UserError(f"file: {config.file}: {error.strerror}; expected a file of texts") from error


def _given(config: Input) -> Iterator[Row]:
    if isinstance(config, SimilarityConfig):
        if len(config.text) == 1:
            raise UserError("text: found one text, expected at least two to compare")
        yield from (Row(config.text[0], other) for other in config.text[1:])
        return
    if isinstance(config, ChooseConfig):
        yield Row(config.text[0], choices=tuple(config.text[1:]))
        return
    pair = None
    if isinstance(config, AnswerConfig):
        pair = config.context
        if pair is None:
            raise UserError("context: found none, expected --context with the text in which the question is answered")
    elif isinstance(config, PairInput):
        pair = config.pair
    for number, text in enumerate(config.text, 1):
        yield Row(text, pair, "text" if len(config.text) == 1 else f"text {number}")


def _parse(file: Iterable[bytes], name: str, as_json: bool, kind: type[Operation]) -> Iterator[Row]:
    number = 0
    for number, content in enumerate(file, 1):
        place = f"{name}:{number}"
        if number == 1:
            content = content.removeprefix(codecs.BOM_UTF8)  # some editors put it there
        try:
            line = content.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: found bytes that are no UTF-8, expected text ({error.reason})") from error
        yield (_from_json if as_json else _from_line)(line, place, kind)
    if not number:
        raise UserError(f"{name}: found no line, expected at least one text")


def _from_line(line: str, place: str, kind: type[Operation]) -> Row:
    parts = line.split("\t")
    if kind.takes_choices:
        return Row(parts[0], None, place, tuple(parts[1:]))
    if len(parts) > 2:
        raise UserError(f"{place}: found {len(parts)} columns, expected a text, or two with a tab between them")
    return Row(*parts, place=place)


def _from_json(line: str, place: str, kind: type[Operation]) -> Row:
    fields = kind.fields
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: found no JSON ({error}), expected an object with {fields[0]!r}") from error
    if not isinstance(content, dict) or not isinstance(content.get(fields[0]), str):
        raise UserError(f"{place}: found no text {fields[0]!r}, expected a JSON object with it")
    pair = content.get(fields[1])
    if kind.takes_choices:
        if not isinstance(pair, list) or not all(isinstance(choice, str) for choice in pair):
            raise UserError(f"{place}: found {fields[1]} = {pair!r}, expected a list of texts")
        return Row(content[fields[0]], None, place, tuple(pair))
    if pair is not None and not isinstance(pair, str):
        raise UserError(f"{place}: found {fields[1]} = {pair!r}, expected a text")
    return Row(content[fields[0]], pair, place)
