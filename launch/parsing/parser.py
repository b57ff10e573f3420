"""Parses a command line to a configuration: the parser, and the passes over the arguments before it."""

import contextlib
import copy
import difflib
import errno
import functools
import json
import math
import re
from argparse import ArgumentError
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import jsonargparse
import jsonargparse._actions
import jsonargparse._typehints
import jsonargparse.typing
import yaml

from cloze.launch.parsing.error_messages import check_file, explain
from cloze.launch.parsing.fields import Described, describe, nulls
from cloze.launch.parsing.value_origins import Complete, Given, chunks, names_in_file, value_of
from cloze.pipeline.errors import STANDARD_STREAMS, UserError
from cloze.pipeline.storage import describe as cannot_be_read
from cloze.pipeline.untrusted import check_readable, dump_yaml, load_yaml
from cloze.version import PACKAGE

Config = TypeVar("Config")

_ACTIONS: Any = jsonargparse._actions
_TYPE_HINTS: Any = jsonargparse._typehints

# `class_path: MODULE.NAME` stands for any section. A file of fields must not run the code of a module.
jsonargparse.set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["cloze"])


def _load(load: Callable[[str], object], text: str) -> object:
    """A file or a value as `load` reads it, after the checks of `load_yaml`; a comment is not null, a tag no value."""
    if text.lstrip().startswith(("#", "!")) and "\n" not in text:
        raise yaml.YAMLError("a comment or a tag")
    return load_yaml(text, load)


jsonargparse.set_loader("yaml", partial(_load, jsonargparse.get_loader("yaml")), (yaml.YAMLError,))
jsonargparse.set_dumper("yaml", partial(dump_yaml, allow_unicode=True, sort_keys=False))  # the library's options
# A text in the place of a number or a boolean is read once more, without the loader.
_TYPE_HINTS.basic_json_or_yaml_load = partial(_load, _TYPE_HINTS.basic_json_or_yaml_load)


def _copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """As `copy.deepcopy`, for the library: for each element of a list it copies what it knows of the whole list, the
    values before and as they were given, which it reads alone. 200 sections took 6 s, and the time grew with their
    square.
    """
    if type(value) is dict and {"prev_val", "orig_val"} <= value.keys():
        shared = {name: value[name] for name in ("prev_val", "orig_val")}
        return copy.deepcopy({name: part for name, part in value.items() if name not in shared}, memo) | shared
    return copy.deepcopy(value, memo)


_TYPE_HINTS.deepcopy = _copied


def _of_classes(import_object: Callable[..., Any]) -> Callable[..., Any]:
    """As `import_object`, which the library asks first for a section's value; None for the name of a file: `small.yaml`
    would be a class `yaml`, whose import is refused.
    """

    def imported(name: str) -> Any:
        named = Path(name)
        return None if named.is_file() or named.suffix in (".yaml", ".yml", ".json") else import_object(name)

    return imported


_ACTIONS.import_object = _of_classes(_ACTIONS.import_object)


class _NotRead(Exception):
    """A file that a value names can't be read. No ValueError, for which the library would try another reading."""


def _reads_files_alone(read: Callable[[Any], str]) -> Callable[[Any], str]:
    """Let the library read only files of bounded size where a value names one, wherever that stands: a pipe has no end,
    and a corpus in the place of a folder would be read into memory.
    """

    def checked(named: Any) -> str:
        if named.relative == "-":
            raise _NotRead("found '-', expected a file: standard input holds no fields")
        try:
            check_readable(Path(named.absolute))
        except UserError as error:
            raise _NotRead(str(error)) from error
        return read(named)

    return checked


_NAMED_FILE: Any = jsonargparse.typing.Path
_NAMED_FILE.read_text = _reads_files_alone(_NAMED_FILE.read_text)

CONFIGS = PACKAGE / "configs"  # installed configurations, one folder per kind


def shipped(kind: str) -> dict[str, Path]:
    """The configurations of a kind (pretrain, finetune, prepare, model) that are installed with the code, by name."""
    return {path.stem: path for path in sorted((CONFIGS / kind).glob("*.yaml"))}


def named_file(flag: str, kind: str, value: str) -> str:
    """The file of a value of `--config` or a section: an existing path, else a shipped configuration by name.

    Raises:
        UserError: the value is a plain name and matches neither.
    """
    if not re.fullmatch(r"[A-Za-z][\w.-]*", value) or value in ("null", "None") or Path(value).is_file():
        return value  # a path, YAML or JSON: the parser's
    known = shipped(kind)
    if value in known:
        return str(known[value])
    if not known or Path(value).suffix:
        return value
    near = _alike(value, known) or difflib.get_close_matches(value, known, 1)
    others = [each.name for each in sorted(CONFIGS.iterdir()) if each.name != kind and value in shipped(each.name)]
    raise UserError(
        f"--{flag}: found no file {value!r}, expected a YAML file or one of {', '.join(known)}"
        + (
            f"; {value} is the name of one in configs/{' and configs/'.join(others)}"
            if others
            else f"; did you mean {' or '.join(near)}?"
            if near
            else ""
        )
    )


def _alike(value: str, known: Iterable[str]) -> list[str]:
    """Names that contain all parts of the value (bert-base-phase1 for bert-base), or only parts of it (base)."""
    parts = set(value.split("-"))
    return [name for name in known if parts <= set(name.split("-")) or parts >= set(name.split("-"))]


class Parser(jsonargparse.ArgumentParser):
    """The library's, whose `--print_config` prints the configuration as a command gets it."""

    complete: Callable[[jsonargparse.Namespace], None] | None = None
    """Completes the values of the command line that is parsed."""

    _found_defaults: jsonargparse.Namespace | None = None

    def get_defaults(self, skip_validation: bool = False, **named: Any) -> jsonargparse.Namespace:
        """The default values, found once: to find them takes most of a parse, and they stay the same."""
        if self._found_defaults is None:
            self._found_defaults = super().get_defaults(skip_validation=skip_validation, **named)
        return self._found_defaults.clone()

    def dump(self, namespace: jsonargparse.Namespace, *arguments: Any, **named: Any) -> str:
        """The values as YAML, completed."""
        if self.complete:
            self.complete(namespace)
        return super().dump(namespace, *arguments, **named)


@functools.cache
def build_parser(name: str, config: Any, words: str | None = None, configs: str = "") -> Parser:
    """The parser of a command: every field an option, but a required one positional, as in `cloze inspect FOLDER`,
    unless the command takes shipped configurations.

    Args:
        config: the dataclass of the command's fields.
        words: the field that takes the word or words without a flag.
        configs: the kind of shipped configurations that `--config` takes by name.
    """
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # --help is ours: see help_pages.py.
    parser = Parser(prog=f"cloze {name}", exit_on_error=False, allow_abbrev=False, add_help=False)
    parser.add_argument("--config", action="config")
    takes_texts = words is not None and get_type_hints(config)[words] == list[str]
    texts = [each.name for each in fields(config) if each.metadata.get("typed_text") and each.name != words]
    parser.add_class_arguments(config, None, as_positional=not configs, sub_configs=True, skip={words, *texts})
    if words:
        known = describe(config)
        for text in texts:
            parser.add_argument(f"--{text}", type=str, help=known[text].sentence)
        parser.add_argument(words, nargs="*" if takes_texts else None, type=str, help=known[words].sentence)
    return parser


def parse(
    name: str,
    config: type[Config],
    arguments: list[str],
    *,
    words: str | None = None,
    short: tuple[tuple[str, str], ...] = (),
    configs: str = "",
    complete: Complete | None = None,
) -> Config:
    """A command's configuration from its arguments.

    Args:
        config: the dataclass of its fields.
        words: the field that takes the word or words without a flag.
        short: short flags, each with the long one that it stands for.
        configs: the kind of shipped configurations that `--config` takes by name.
        complete: gives the values of fields that follow from others, and from where these come.

    Raises:
        UserError: an unknown field, a value of the wrong kind, a missing file, in one line.
    """
    kind: Any = config  # any dataclass
    parser = build_parser(name, kind, words, configs)
    kinds = get_type_hints(config)
    # Lists of texts, and lists of whole numbers that take a single number too. Other lists are typed in brackets.
    lists = {field for field, kind in kinds.items() if kind == list[str] or {int, list[int]} <= {*get_args(kind)}} - {
        words
    }
    for brief, long in short:
        arguments = [long + word[len(brief) :] if word.partition("=")[0] == brief else word for word in arguments]
    known = describe(kind)
    another = partial(build_parser.__wrapped__, name, kind, words, configs)
    try:
        arguments = _arranged(arguments, known, lists, configs)
        parser.complete = partial(_complete, another, arguments, complete) if complete else None
        given = parser.parse_args(arguments)
        if parser.complete:
            parser.complete(given)
        if null := next(nulls({field: each for field, each in known.items() if field != words}, given), None):
            raise UserError(f"cloze {name}: --{null[0]}: found null, expected {null[1]}; see cloze {name} --help")
        namespace = parser.instantiate(given)
    except BrokenPipeError:  # of --print_config
        raise
    except _NotRead as error:
        raise UserError(f"cloze {name}: {error}") from error
    except ImportError as error:
        if "is not allowed" not in str(error):  # as the library says of a class_path in a file's section
            raise
        raise UserError(f"cloze {name}: found a class_path in a section, expected its fields") from error
    except PermissionError as error:  # the library looks whether a value is the path of a file of fields
        raise UserError(f"cloze {name}: {cannot_be_read(error, '--config')}") from error
    except (ArgumentError, jsonargparse.ArgumentError, OSError, UnicodeError) as error:
        # Of --print_config, and of a file on a disk that fails: no field is wrong.
        if isinstance(error, OSError) and (error.filename in STANDARD_STREAMS.values() or error.errno == errno.EIO):
            raise
        flags = {action.dest: f"--{action.dest}" for action in parser._actions if action.option_strings}
        flags |= {long[2:]: brief for brief, long in short}
        raise UserError(
            f"cloze {name}: {explain(str(error), known, arguments, flags)}; see cloze {name} --help"
        ) from error
    except RecursionError as error:
        raise UserError(f"cloze {name}: found values that are nested too deep, expected sections of values") from error
    parsed = config(**{field.name: getattr(namespace, field.name) for field in fields(kind)})
    _check_values(name, parsed)
    return parsed


def _check_values(name: str, parsed: Any) -> None:
    """Raise UserError for a number that is infinite or none, and for an empty text, in any dataclass of fields."""
    if (wrong := _infinite(parsed)) is not None:
        raise UserError(
            f"cloze {name}: --{wrong}: found a value that is infinite or no number, expected a number; see "
            f"cloze {name} --help"
        )
    if (unset := _empty(parsed)) is not None:
        raise UserError(
            f"cloze {name}: {unset}: found an empty text, such as an unset variable of the shell gives, expected a "
            f"value; give one, or leave it out; see cloze {name} --help"
        )


def _complete(
    another: Callable[[], Parser], words: list[str], complete: Complete, namespace: jsonargparse.Namespace
) -> None:
    """Set the fields whose values follow from what the words give.

    Args:
        another: makes a second parser, since the library can't parse again with the parser that is parsing.
    """
    given = list(chunks(words))

    def untyped(name: str) -> Any:
        others = [word for option, chunk in given if option not in (name, "print_config") for word in chunk]
        parser = another()
        # --print_config works without the required fields; this parser needs a value for each
        missing = [action for action in parser._actions if action.required and namespace.get(action.dest) is None]
        fill = [word for action in missing for word in (*action.option_strings[:1], "-")]
        return parser.parse_args([*others, *fill])[name]

    files = [value_of(chunk) or "" for name, chunk in given if name == "config"]
    origins = Given(
        namespace.get,
        untyped,
        frozenset(name for name, _ in given if name not in ("", "config")),
        frozenset(name for file in files for name in names_in_file(file)),
    )
    for name, value in complete(origins).items():
        namespace[name] = value


def _infinite(values: object, prefix: str = "") -> str | None:
    """The dotted name of the first infinite or NaN value, which no field accepts; None if there is none."""
    if isinstance(values, float):
        return None if math.isfinite(values) else prefix
    if isinstance(values, dict):
        parts = values.items()
    elif isinstance(values, list):
        return next((found for part in values if (found := _infinite(part, prefix)) is not None), None)
    else:
        parts = (vars(values) if is_dataclass(values) else {}).items()
    names = ((f"{prefix}.{name}" if prefix else str(name), part) for name, part in parts)
    return next((found for name, part in names if (found := _infinite(part, name)) is not None), None)


def _empty(values: Any, prefix: str = "") -> str | None:
    """The dotted name of the first field that is an empty text without having it for a default, or has one among its
    texts; None if there is none. An empty path would be the current folder.
    """
    for field in fields(values):
        value, name = getattr(values, field.name), f"{prefix}{field.name}"
        if field.metadata.get("typed_text"):
            continue
        parts = {name: value}
        if isinstance(value, list):
            parts = {f"{name}.{number}": part for number, part in enumerate(value)}
        elif field.type == dict[str, str]:
            parts = {f"{name}.{key}": part for key, part in value.items()}
        for place, part in parts.items():
            if part == "" and (place != name or field.default != ""):
                return place
            if is_dataclass(part) and (found := _empty(part, f"{place}.")) is not None:
                return found
    return None


def _listed(value: str) -> list[str]:
    """The texts of a value, which may be a YAML list of them; a list of anything else is left to be refused."""
    found: object = None
    if value.startswith("["):
        with contextlib.suppress(yaml.YAMLError):
            found = load_yaml(value)
    return found if isinstance(found, list) else [value]


def _arranged(
    arguments: list[str],
    known: dict[str, Described],
    lists: Collection[str],
    configs: str,
) -> list[str]:
    """The command line as the library reads it.

    - `--config FILE` comes first, then `--SECTION FILE`, so that single fields win whatever the order.
    - Words without an option stand in one piece.
    - `--input a b`, or `--input a --input b`, becomes one list: a shell expands a glob to several words, and of a
      repeated option the library would use only the last one.
    - An option of true or false without a value, as `--follow`, gets the value true.

    Raises:
        UserError: a file is missing, is no regular one, or holds anything but fields.
    """
    sections = {name for name, field in known.items() if field.is_section}
    switches = {name for name, field in known.items() if field.is_switch}
    words: list[str] = []
    whole: list[str] = []
    files: list[str] = []
    options: list[str] = []
    joined: dict[str, list[str]] = {}
    for name, chunk in chunks(arguments, switches, lists):
        option = chunk[0].partition("=")[0][2:]
        if not name:
            words += chunk
        elif option == "config" or option in sections:
            if (given := value_of(chunk)) is None:
                raise UserError(f"--{option}: found no value, expected a YAML file")
            value = named_file(option, configs if option == "config" else option, given)
            check_file(option, value, known)
            (whole if option == "config" else files).extend((f"--{option}", value))
        elif name in lists:
            values = [chunk[0].partition("=")[2]] if "=" in chunk[0] else chunk[1:]
            joined.setdefault(name, []).extend(values if len(values) != 1 else _listed(values[0]))
        else:
            options += chunk
    options += [word for name, values in joined.items() for word in (f"--{name}", json.dumps(values))]
    if "--" in words:
        words.remove("--")  # the first one; what follows it are words, whatever they begin with
        return [*whole, *files, *options, "--", *words]
    return whole + files + words + options
