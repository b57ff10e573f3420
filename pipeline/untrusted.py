"""Reads YAML and JSON that others wrote, with bounds on depth and on what aliases expand to; writes YAML to match."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from cloze.pipeline.errors import UserError

# A configuration has some hundred values; nested aliases can expand ten lines to a billion.
MOST_VALUES = 100_000
# Read at once. The largest published tokenizer.json has 33 MB (Gemma 3's), the manifest of a million shards 150.
MOST_BYTES = 1 << 29
MOST_COUNTED = 1 << 60  # of samples, tokens and bytes, so that their sums are 64-bit integers
# Sections of a configuration are nested 5 deep. libyaml builds nested values by recursion with no bound of its own, and
# overflows the stack at some 50,000.
MOST_LEVELS = 64
# Numbers to the base of 8 and 60 in YAML 1.1: 010 is 8 there, 2:08 is 128, and 1:30.5 is 90.5.
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][0-9_]*(:[0-5]?[0-9])+|[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*)")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# Far above any field's number and below what no float holds, of which Python can't make one (308 decimal digits).
_MANY_DIGITS = re.compile(r"[-+]?[0-9][xb]?[0-9a-fA-F_]{256,}")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):
    """A class of its own, since `yaml.SafeDumper` is that of the user's program too."""


# A text that YAML 1.2 reads as a number, as 1e-3, and PyYAML's writer, which knows YAML 1.1, leaves without quotes.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.?|\.[0-9])[0-9_]*[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def dump_yaml(value: object, **options: Any) -> str:
    """As `yaml.safe_dump`, with quotes around each text that would be read as a number."""
    return str(yaml.dump(value, Dumper=_Dumper, **options))


def _load_safely(text: str) -> object:
    """As `yaml.safe_load`, which is Python throughout: a run's config.yaml takes 3 ms instead of 30."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def load_yaml(text: str, load: Callable[[str], object] = _load_safely, *, name: str = "configuration") -> object:
    """Parse YAML with `load`, after a check that it does not exhaust the memory and is read as it looks.

    Args:
        name: name of the file, for messages.

    Raises:
        UserError: it has more than MOST_VALUES values, as they are or with expanded aliases, or is nested too deep.
        yaml.YAMLError: it is not YAML, a section has a name twice, a number has the base 8 or 60 without saying so, or
            hundreds of digits, a text holds the character 0, or a value is not what its form or tag says.
    """
    too_deep = f"{name}: found values that are nested too deep, or contain themselves, expected sections of values"
    deep, values, wrong = _survey(text)
    if deep:
        raise UserError(too_deep)
    if values > MOST_VALUES:
        raise UserError(f"{name}: found more than {MOST_VALUES:,} values, expected a configuration; shorten it")
    if wrong is not None:
        event, problem = wrong
        mark: Any = event.start_mark
        raise yaml.constructor.ConstructorError(problem=f"{event.value!r:.60} {problem}", problem_mark=mark)
    try:
        if "*" in text and "&" in text:
            values = _expanded(yaml.compose(text, yaml.SafeLoader), {})
            if values > MOST_VALUES:
                raise UserError(
                    f"{name}: found YAML whose aliases expand to {values:,} values, expected at most "
                    f"{MOST_VALUES:,}; write the values out"
                )
        return load(text)
    except RecursionError as error:
        raise UserError(too_deep) from error
    except UserError:  # also a ValueError
        raise
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        # The 13th month, a number of 5,000 digits, `!!bool 2`: the library lets through what its conversions raise.
        raise yaml.constructor.ConstructorError(problem="a value is not what its form or tag says") from error


def load_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON as `json.loads`, but what is nested more than MOST_LEVELS deep or has too many digits is an error like
    all others: whoever goes down into it needs no bound of its own.

    Args:
        pairs: makes an object of its fields in their order.

    Raises:
        json.JSONDecodeError: it is not JSON, nested too deep, or has a number of thousands of digits.
        UnicodeDecodeError: it is no text.
        ValueError: of `pairs`.
    """
    try:
        content = json.loads(text, object_pairs_hook=pairs)
        if not _is_shallow(content):
            raise RecursionError
        return content
    except RecursionError:
        raise json.JSONDecodeError("Values are nested too deep", "", 0) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        if "digits" not in str(error):  # of `pairs`
            raise
        raise json.JSONDecodeError("A number has too many digits", "", 0) from None  # Python converts 4,300 at once


def _is_shallow(content: object) -> bool:
    """Whether lists and objects are nested at most MOST_LEVELS deep."""
    level = [content]
    for _ in range(MOST_LEVELS):
        lists = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [value for values in lists for value in values if isinstance(value, (dict, list))]
    return not level


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these fields, for `load_json`.

    Raises:
        ValueError: a field comes twice.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"found the field {twice[:60]!r} twice")
    return made


_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of an escaped pair, or alone


def check_characters(text: str | bytes, content: object) -> None:
    """Raise ValueError for JSON that has half of a character in a text, which no file of UTF-8 takes.

    Args:
        text: what the content was parsed from.
    """
    if _HALF.search(text if isinstance(text, str) else text.decode("latin-1")):
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half of a character (a lone surrogate)") from None


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Name the file in the error of the system that a read from it ends with, as on a disk that fails: Python names it
    where it can't be opened alone.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it can't be read.
        UserError: as `check_readable`.
        ValueError: as `load_json` and `check_characters`.
    """
    check_readable(path)
    with naming(path):
        text = path.read_bytes()
    content = load_json(text)
    check_characters(text, content)
    return content


def fields_if_readable(path: Path) -> dict[str, Any]:
    """The fields of a JSON file that a run can do without; none if it is missing or damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value of JSON is a number to compute with: Python also reads NaN, 1e999 as infinity, and whole numbers
    that no float holds, and takes `true` for 1.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def are_counts(values: Iterable[object], most: int = MOST_COUNTED) -> bool:
    """Whether all are integers from 0 to `most`."""
    return all(type(value) is int and 0 <= value <= most for value in values)


def check_readable(path: object) -> None:
    """Raise UserError for what is no regular file, or too large to be read at once (holes take no disk). Of an object
    in a store nothing is asked: it is bounded where it is read (`StorePath.read_bytes`).
    """
    if not isinstance(path, Path):
        return
    check_regular(path)
    if path.exists() and (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{path}: found {size:,} bytes, expected at most {MOST_BYTES:,}; replace it by what it was")


def check_regular(path: Path) -> None:
    """Raise UserError for what is there and no regular file: a pipe or a device may have no end."""
    if path.is_dir():
        raise UserError(f"{path}: found a folder, expected a file; move it away, then run the same command again")
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: found no regular file, expected one; remove it")


def _survey(text: str) -> tuple[bool, int, tuple[yaml.ScalarEvent, str] | None]:
    """Whether values are nested too deep, how many there are, and the first that is refused.

    Events come from a parser without recursion. Counting ends at the bounds.
    """
    values, wrong = 0, None
    # The names of each open section, None of a list; whether a name comes next there.
    names: list[set[str] | None] = []
    name_next: list[bool] = []
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            names.pop()
            name_next.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        values += 1
        if isinstance(event, yaml.ScalarEvent) and (event.implicit[0] or event.tag in _NUMBERS):
            if _OTHER_BASE.fullmatch(event.value):
                wrong = wrong or (
                    event,
                    "has the base 8 or 60 in YAML: write a decimal number, or quotes around a text",
                )
            if _MANY_DIGITS.fullmatch(event.value):
                wrong = wrong or (event, "has more than 256 digits: write a smaller number, or quotes around a text")
        if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:  # of which no path can be made
            wrong = wrong or (event, "holds the character 0")
        known = names[-1] if names else None
        if known is not None:
            # A section may be merged with several.
            if name_next[-1] and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
                if event.value in known:
                    wrong = wrong or (event, "stands there twice")
                known.add(event.value)
            name_next[-1] = not name_next[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            names.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            name_next.append(True)
        if len(names) > MOST_LEVELS or values > MOST_VALUES:
            break
    return len(names) > MOST_LEVELS, values, wrong


def _expanded(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Number of values in a tree of nodes with expanded aliases; RecursionError if one contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in known:
        if not known[id(node)]:
            raise RecursionError
        return known[id(node)]
    known[id(node)] = 0  # marks nodes that are being expanded
    parts = (part for each in node.value for part in (each if isinstance(each, tuple) else (each,)))
    known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]
