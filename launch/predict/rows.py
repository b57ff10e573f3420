"""Input texts: from the command line, a file, standard input or Python."""

import codecs
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from cloze.launch.predict.config import Input
from cloze.launch.predict.operation import Operation, Row, shown
from cloze.launch.system.console import Console
from cloze.launch.texts import tables
from cloze.launch.texts.tables import Columns
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import at_rest, check_replaceable, readable_errors
from cloze.pipeline.stores.places import to_local
from cloze.pipeline.untrusted import check_regular, load_json, unique_fields

_CONLL = (".conll", ".conllu", ".conll03", ".conll2003")
_SQUAD = re.compile(rb'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
_BEGINNING = 4096  # number of bytes that are checked for SQuAD's format
_GZIP = b"\x1f\x8b\x08"  # how its files begin (RFC 1952)
_SHOWN_LINES = 5  # number of empty lines listed in a warning

_Item = TypeVar("_Item")


def check_file(config: Input) -> None:
    """Raise UserError for a missing file of texts, or one in a format that only training reads, and for a path where no
    result can be written.
    """
    if config.output:
        check_replaceable(to_local(config.output, "output"))
    if config.file in (None, "-"):
        return
    path = Path(config.file)
    if not path.exists():
        raise UserError(f"file: found no {config.file}, expected a file of texts")
    if config.lines is not None or path.is_dir():
        return
    if tables.ending(path) in tables.ENDINGS:  # which is read more than once; a pipe of lines is not
        check_regular(path)
    if not path.is_file():
        return
    if tables.ending(path) in _CONLL:
        raise UserError(
            f"file: found {path}, CoNLL by its name, which is for training, expected a text a line or a "
            "table: `cloze finetune --test` predicts CoNLL's words; --lines text takes each line as a text"
        )
    if path.suffix.lower() == ".json":
        with readable_errors(path), open(path, "rb") as file:
            begin = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8)
        if _SQUAD.match(begin):
            raise UserError(
                f"file: found SQuAD's JSON in {path}, which is for training, expected {_lines_of(config)}; "
                "`cloze finetune --test` predicts the answers to its questions"
            )
        if begin.lstrip().startswith(b"["):
            raise UserError(f"file: found a JSON list in {path}, expected {_lines_of(config)}")


def _lines_of(config: Input) -> str:
    needed = type(config).fields[: 1 if config.takes_pair == "never" else 2]
    return f"JSON lines: on each an object with {' and '.join(needed)}"


def read_rows(config: Input, learned: Columns | None = None) -> Iterator[Row]:
    """Read texts or pairs with their places.

    Args:
        learned: columns that the model was trained on.

    Raises:
        UserError: there are no texts; a line is not UTF-8 or not a JSON object, or lacks a field; a table lacks a
        column.
    """
    if config.text:
        yield from config.given()
        return
    kind = type(config)
    fields = kind.fields
    if config.file in (None, "-"):
        if config.file is None and sys.stdin.isatty():
            raise UserError(
                f"text: found none, expected a {fields[0]} on the command line, --file, or lines on standard input"
            )
        try:
            with at_rest(sys.stdin.buffer, "standard input"):
                yield from _parse(sys.stdin.buffer, "standard input", config)
        except OSError as error:
            raise UserError(
                f"standard input: {error.strerror or error}; expected lines of texts, or give --file"
            ) from error
        return
    check_file(config)
    path = Path(config.file)
    if config.lines is None and (tables.ending(path) in tables.ENDINGS or path.is_dir()):
        yield from _from_table(path, tuple(config.text_columns), learned, kind)
        return
    if config.text_columns:
        raise UserError(
            f"text_columns: found {', '.join(config.text_columns)} with {path}, whose lines have no names, "
            f"expected a table: {', '.join(tables.ENDINGS)}"
        )
    try:
        with open(path, "rb") as file, at_rest(file, path):
            yield from _parse(file, config.file, config)
    except OSError as error:
        raise UserError(f"file: {config.file}: {error.strerror}; expected a file of texts") from error


def given_rows(texts: Iterable[str | tuple[str, str] | Row]) -> Iterator[Row]:
    """Texts or pairs given from Python, with their places: those that are not a Row are numbered.

    Raises:
        UserError: they are not a list, or one is neither text nor pair.
    """
    for number, given in enumerate(listed("texts", texts), 1):
        if isinstance(given, Row):
            row = given
        elif isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(each, str) for each in given):
            row = Row(given[0], given[1], f"text {number}")
        else:
            row = Row(given, place=f"text {number}")  # type: ignore[arg-type]  # refused below if it is no text
        wrong = [
            each
            for each in (row.text, *(() if row.pair is None else (row.pair,)), *row.choices)
            if not isinstance(each, str)
        ]
        if wrong:
            raise UserError(
                f"{row.place}: found {shown(wrong[0])}, expected a text, or a pair of texts as a tuple of two"
            )
        yield row


def listed(name: str, given: Iterable[_Item]) -> Iterable[_Item]:
    """The given collection if it is a list or another ordered collection of texts.

    Raises:
        UserError: it is one text, or no collection.
    """
    if isinstance(given, str):
        raise UserError(f"{name}: found one text, expected a list of them; put it between brackets: [text]")
    if isinstance(given, bytes | Mapping | Set | Row) or not isinstance(given, Iterable):
        raise UserError(f"{name}: found {shown(given)} of type {type(given).__name__}, expected a list of texts")
    return given


def _from_table(path: Path, asked: tuple[str, ...], learned: Columns | None, kind: type[Operation]) -> Iterator[Row]:
    """A Row for each row of a table, with all of its columns."""
    # With columns that are named the file has its names in its first line.
    reading = tables.open_table(path, *((learned.header, learned.texts[0]) if learned and not asked else ()))
    columns = _find_columns(path, reading.columns, asked, learned, kind)
    # With the operation's own field names the second text is optional in JSON objects.
    optional = kind.takes_pair == "maybe" and columns.texts == kind.fields and not asked
    for row in reading.rows:
        if kind.takes_choices:
            shared = " ".join(row.text(name) for name in columns.texts)
            yield Row(shared, None, row.place, _choices(row, columns), row.values)
            continue
        first_text, *others = columns.texts
        pair = None
        if others and not (optional and row.values.get(others[0]) is None):
            pair = row.text(others[0])
        yield Row(row.text(first_text), pair, row.place, values=row.values)


def _find_columns(
    path: Path, found: tuple[str, ...], asked: tuple[str, ...], learned: Columns | None, kind: type[Operation]
) -> Columns:
    """The columns of a table with the texts: those given, else those of the model's training, else the operation's
    field names.
    """
    own = (
        Columns(kind.fields[:1], kind.fields[1:])
        if kind.takes_choices
        else Columns(kind.fields if kind.takes_pair != "never" else kind.fields[:1])
    )
    needed = kind.fields[: 2 if kind.takes_choices or kind.takes_pair == "always" else 1]
    if asked:
        wanted = Columns(asked[:1], asked[1:]) if kind.takes_choices else Columns(asked)
        needed = asked
    elif learned and not (set(needed) <= set(found) and not set(learned.names) <= set(found)):
        wanted = learned if kind.takes_pair != "never" else replace(learned, texts=learned.texts[:1])
        needed = wanted.names
    else:
        wanted = own
    if missing := [name for name in needed if name not in found]:
        said = tables.missing_columns(path, found, {"text_columns": missing})
        raise UserError(f"{said}, or add --lines text if each of its lines is a text")
    if len(wanted.texts) > 2 and not kind.takes_choices:
        raise UserError(f"text_columns: found {len(wanted.texts)} columns, expected one, or two for pairs")
    return wanted


def _choices(row: tables.TableRow, columns: Columns) -> tuple[str, ...]:
    """The choices of a row: one column each, or one column with a list."""
    if len(columns.choices) == 1:
        found = row.values.get(columns.choices[0])
        if not isinstance(found, list) or not all(isinstance(choice, str) for choice in found):
            raise UserError(f"{row.place}: found {columns.choices[0]} = {found!r:.60}, expected a list of texts")
        return tuple(found)
    return tuple(" ".join(row.text(name) for name in (*columns.prefix, choice)) for choice in columns.choices)


def _parse(file: BinaryIO, name: str, config: Input) -> Iterator[Row]:
    """Rows of lines. Empty lines are skipped with a warning at the end; with an array as output, whose rows correspond
    to lines, an empty line before another text is an error.
    """
    parse, empty, texts = (_from_json if config.lines == "json" else _from_line), [], 0
    by_number = (config.output or "").endswith(".npy")
    for number, content in enumerate(iter(partial(file.readline, tables.LONGEST_LINE), b""), 1):
        place = f"{name}:{number}"
        if len(content) == tables.LONGEST_LINE:
            raise UserError(f"{place}: found a line of {len(content):,} bytes or more, expected a text on each")
        if number == 1:
            content = content.removeprefix(codecs.BOM_UTF8)  # byte order mark, written by some editors
        try:
            line = content.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            is_packed = number == 1 and content.startswith(_GZIP)
            advice = "; of packed files only tables are read: unpack it" if is_packed else ""
            said = f"{place}: found bytes that are no UTF-8, expected text ({error.reason}){advice}"
            raise UserError(said) from error
        if "\0" in line:
            raise UserError(f"{place}: found a byte 0x00, as of UTF-16, expected text in UTF-8; convert it")
        if not line.strip():
            empty.append(number)
            continue
        if by_number and empty:
            raise UserError(
                f"{name}:{empty[0]}: found an empty line, expected a text on each: rows of {config.output} "
                "are found by the numbers of lines; remove it, or write *.jsonl, which has the texts"
            )
        texts += 1
        yield parse(line, place, type(config))
    if not texts:
        raise UserError(f"{name}: found no line{' but empty ones' * bool(empty)}, expected at least one text")
    if empty:
        lines = ", ".join(map(str, empty[:_SHOWN_LINES])) + ", ..." * (len(empty) > _SHOWN_LINES)
        Console().warn(f"{name}: left out {len(empty):,} empty line{'s' * (len(empty) > 1)} ({lines})")


def _from_line(line: str, place: str, kind: type[Operation]) -> Row:
    parts = line.split("\t")
    if kind.takes_choices:
        return Row(parts[0], None, place, tuple(parts[1:]))
    if len(parts) > 2:
        raise UserError(f"{place}: found {len(parts)} columns, expected a text, or two with a tab between them")
    return Row(parts[0], parts[1] if len(parts) > 1 else None, place)


def _from_json(line: str, place: str, kind: type[Operation]) -> Row:
    fields = kind.fields
    try:
        content = load_json(line, unique_fields)
    except ValueError as error:
        raise UserError(f"{place}: found no JSON ({error}), expected an object with {fields[0]!r}") from error
    if not isinstance(content, dict) or not isinstance(content.get(fields[0]), str):
        raise UserError(f"{place}: found no text {fields[0]!r}, expected a JSON object with it")
    pair = content.get(fields[1])
    if kind.takes_choices:
        if not isinstance(pair, list) or not all(isinstance(choice, str) for choice in pair):
            raise UserError(f"{place}: found {fields[1]} = {pair!r:.60}, expected a list of texts")
        return Row(content[fields[0]], None, place, tuple(pair))
    if pair is not None and not isinstance(pair, str):
        raise UserError(f"{place}: found {fields[1]} = {pair!r:.60}, expected a text")
    return Row(content[fields[0]], pair, place)
