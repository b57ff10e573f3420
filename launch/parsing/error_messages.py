"""Error messages for wrong command line arguments and YAML files, in place of those of jsonargparse."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path

import yaml

from cloze.launch.parsing.fields import Described, describe, shown
from cloze.launch.parsing.value_origins import chunks, value_of
from cloze.pipeline.errors import UserError, did_you_mean
from cloze.pipeline.fields import Fields
from cloze.pipeline.untrusted import check_readable, load_yaml, naming

_LONGEST = 80  # characters of a value that are quoted
# Further messages of the library as patterns, each with ours, in which the groups of its pattern are filled.
_OTHERS = (
    (
        r"(?:Spaces not allowed in keys|Empty nested key|Key must be a string, got): (.*)",
        "found the name {}, expected the name of a field",
    ),
    (r"argument (--[\w.]+)[^:]*: expected (?:one|at least one) argument", "{}: found no value, expected one"),
    (
        r"print_config",
        "--print_config: found a value that it doesn't take, expected none, or =skip_default for what differs",
    ),
    (r"^Unexpected config: (.{,60})", "--config: found {!r}, expected fields with values, as in `name: value`"),
)


def quoted(value: object) -> str:
    """A value on one line, shortened if long, in quotes unless it is a plain word."""
    text = " ".join(str(value).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return text if re.fullmatch(r"[\w.,+\-/:*]+", text) else repr(text)


def nearest(name: str, known: Mapping[str, Described], flags: Mapping[str, str], section: str = "") -> str:
    """A hint at the field with the nearest name, fields of the same section first.

    Args:
        flags: as of `explain`.
    """
    last = {each.rpartition(".")[2]: each for each in known}
    last |= {each.rpartition(".")[2]: each for each in known if section and each.startswith(f"{section}.")}
    near = difflib.get_close_matches(name, [*known, *last], 1)
    if not near:
        return ""
    field = last.get(near[0], near[0])
    return f"; did you mean {flags[field] if field in flags else f'{field.upper()}, which is typed without a flag'}?"


def check_file(flag: str, value: str, known: Mapping[str, Described]) -> None:
    """Whether what a flag names, a YAML file or YAML itself, is a mapping of names to values, sections to fields.

    Args:
        known: the command's fields.

    Raises:
        UserError: it is missing, unreadable or not such a mapping; with line and column for invalid YAML.
    """
    path = Path(value)
    try:
        is_file = bool(value) and path.exists()
    except (OSError, ValueError):  # too long for a name, or no name at all: YAML itself
        is_file = False
    expected = "expected a YAML file of NAME: VALUE lines"
    if is_file and path.is_file():
        check_readable(path)
        with naming(path):
            name, text = value, path.read_bytes()
    elif not is_file and ("\n" in value or value.lstrip().startswith("{")):  # YAML itself, as a sweep gives it
        name, text = quoted(value), value.encode()
    else:
        found = "no regular file" if is_file and not path.is_dir() else "a folder" if is_file else "no file"
        raise UserError(f"--{flag}: found {found} {quoted(value)}, {expected}")
    try:
        values = load_yaml(text.decode(), name=name)
    except UnicodeDecodeError as error:
        raise UserError(f"--{flag}: found bytes in {name} that are no UTF-8, {expected}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = f" ({problem})" if (problem := getattr(error, "problem", None)) else ""
        raise UserError(f"--{flag}: found malformed YAML in {name}{where}{what}, {expected}") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else "a list" if isinstance(values, list) else "a single value"
        raise UserError(f"--{flag}: found {kind} in {name}, {expected}")
    for key in _names(values):
        if not isinstance(key, str) or key.startswith("__"):  # the library has names of its own like __path__
            raise UserError(f"--{flag}: found the name {quoted(key)} in {name}, expected the name of a field")
    if flag == "config" and "config" in values:
        raise UserError(f"--{flag}: found a config in {name}, expected fields; give each file by a --config of its own")
    if twice := [name for name, count in Counter(_leaves(values)).items() if count > 1]:
        raise UserError(f"--{flag}: found {twice[0]} twice in {name}, by its dotted name too, {expected}; remove one")
    if apart := next(_beside(values, set(_sections(values))), None):  # the library would lose it, in one of the orders
        raise UserError(
            f"--{flag}: found {apart} beside its section in {name}, expected it in the section; move it there"
        )
    for key, inner in values.items() if flag == "config" else ():
        if key in known and known[key].is_section and not isinstance(inner, (dict, str)):
            raise UserError(
                f"--config: found {quoted(shown(inner))} for {key} in {name}, expected {known[key].expected}"
            )


def _leaves(values: Fields, prefix: str = "") -> Iterator[str]:
    """The dotted names of all values that are no sections; a name may have dots itself."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _sections(values: Fields, prefix: str = "") -> Iterator[str]:
    """The dotted names of all sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}"
            yield from _sections(value, f"{prefix}{name}.")


def _beside(values: Fields, sections: set[str], prefix: str = "") -> Iterator[str]:
    """The fields with a dotted name of which a part is one of the sections."""
    for name, value in values.items():
        if any(prefix + name[: dot.start()] in sections for dot in re.finditer(r"\.", name)):
            yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _beside(value, sections, f"{prefix}{name}.")


def _names(values: Fields) -> list[str]:
    inner = [name for value in values.values() if isinstance(value, dict) for name in _names(value)]
    return [*values, *inner]


def explain(message: str, known: Mapping[str, Described], words: list[str], flags: Mapping[str, str]) -> str:
    """Our message for an error of jsonargparse.

    Args:
        message: the library's.
        known: the command's fields.
        words: the command line, of which values are quoted.
        flags: of the fields that have one, as they are typed; the others stand without.
    """
    message = " ".join(message.split())
    missing = re.search(r"arguments are required: (.*)$", message)
    asked = missing[1].split(", ") if missing else []
    if asked and all(name in known for name in asked):  # not of a section in a list, which the next rules name
        # If an argument before it is missing, the library reports a list of words as missing too, even if given.
        names = [name for name in asked if known[name].default is MISSING]
        return f"expected {', '.join(flags.get(name, name.upper()) for name in names)}, found none"
    if line := _wrong_value(message, known, words, flags) or _unknown(message, known, words, flags):
        return line
    for pattern, line in _OTHERS:
        if match := re.search(pattern, message):
            return line.format(*match.groups())
    return "found a value that its field does not take, expected one that the help names"


def _unknown(message: str, known: Mapping[str, Described], words: list[str], flags: Mapping[str, str]) -> str | None:
    if match := re.search(r"unrecognized arguments: (\S+)", message):
        name = match[1].partition("=")[0]
        if name.startswith("-"):
            return f"found {name}, which is no option" + nearest(name.lstrip("-").removesuffix("+"), known, flags)
        return f"found {quoted(match[1])}, expected a --field before it"
    if match := re.search(r"Group '([\w.]+)' does not accept option '([^']*)'", message):
        # The group is a section, or the part before the dot of a name with a dot.
        return f"{match[1]}: found {quoted(match[2])}, which is no field of it" + nearest(
            match[2], known, flags, match[1]
        )
    if match := re.search(r"Option '([^']*)' is not accepted|No action for key \"([^\"]*)\"", message):
        name = match[1] or match[2]
        return f"found {quoted(name)}, which is no field" + nearest(name, known, flags)
    if "no longer supported" in message:  # of the library's own options, which it hides
        name = next((word for word in words if word.startswith("--print_")), "--print_shtab")
        return f"found {name.partition('=')[0]}, which is no option"
    return None


def _wrong_value(
    message: str, known: Mapping[str, Described], words: list[str], flags: Mapping[str, str]
) -> str | None:
    keys = re.findall(r'Parser key "([\w.]+)"', message) or re.findall(r"argument (?:--)?([\w.]+)[^:]*:", message)[:1]
    if not keys or keys[0] not in known:
        return None
    if known[keys[0]].items:
        return _wrong_item(message, known[keys[0]], keys, words)
    field = known[[key for key in keys if key in known][-1]]
    if nested := re.search(r"NestedArg\(key='([^']*)'", message):
        return f"found --{field.name}.{nested[1]}, which is no option; --{field.name} takes {field.expected}"
    if inside := re.search(r'Parser key "[\w.]+".*Option \'([^\']*)\' is not accepted', message):
        # A field of several types, as data, a folder or a section. The library's errors for the other types come later.
        return f"--{field.name}: found {quoted(inside[1])} in it, which is no field there; it takes {field.expected}"
    if needed := re.search(r"arguments are required: (\w+)", message):
        return f"--{field.name}: found no {needed[1]} in a section of it, expected one; it takes {field.expected}"
    if inner := re.search(r'Parser key "[\w.]+".*(Group \'|Option \'|No action for key)', message):
        return _unknown(message[inner.start(1) :], known, words, flags)
    value = re.search(r"(?:Got|Given) value: (.*)$", message) or re.search(
        r"(?:Unable to load config|Importing) ['\"](.*?)['\"]", message
    )
    typed = _typed(field.name, words)
    if not re.search("Expected|Unable|Union|Importing", message):
        return f"--{field.name}: found no value, expected {field.expected}"
    found = typed if typed is not None else value[1] if value else None
    return (
        f"--{field.name}: found {'another value' if found is None else quoted(found)}, expected {field.expected}"
        + (" or null" if field.nullable else "")
        + did_you_mean(found or "", field.choices)
    )


def _wrong_item(message: str, field: Described, keys: list[str], words: list[str]) -> str:
    """The message for a wrong list of sections, or a wrong item in it."""
    inner = describe(field.items)
    if match := re.search(r"Option '([^']*)' is not accepted", message):
        return f"--{field.name}: found {quoted(match[1])}, which is no field of it, expected {field.expected}"
    got = re.search(r"Got value: (.*?)(?: Subclass types.*)?$", message)
    if got and keys[-1] in inner:
        return f"--{field.name}: found {quoted(got[1])} for {keys[-1]}, expected {inner[keys[-1]].expected}"
    value = got[1] if got else _typed(field.name, words)
    return f"--{field.name}: found {'no value' if value is None else quoted(value)}, expected {field.expected}"


def _typed(name: str, words: list[str]) -> str | None:
    """The last value of a flag on the command line; None if the value is in a file."""
    return next((value_of(chunk) for option, chunk in reversed([*chunks(words)]) if option == name), None)
