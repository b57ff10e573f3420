"""From the words of a command line to a configuration: the parser, and the passes over the words before it."""

from __future__ import annotations

import difflib
import json
import re
from argparse import ArgumentError
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, get_type_hints

import jsonargparse
import yaml
from docstring_parser import parse_from_object

import cloze
from cloze.pipeline.errors import UserError
from cloze.pipeline.yaml_text import load_yaml

Config = TypeVar("Config")

# What reads files and values for jsonargparse, with a bound on what they expand to.
jsonargparse.set_loader("yaml", partial(load_yaml, load=jsonargparse.get_loader("yaml")), (yaml.YAMLError,))

CONFIGS = Path(cloze.__file__).parent / "configs"  # those that are installed with the code, a folder a kind


def shipped(kind: str) -> dict[str, Path]:
    """The configurations of a kind (pretrain, finetune, prepare, model) that are installed with the code, by name."""
    return {path.stem: path for path in sorted((CONFIGS / kind).glob("*.yaml"))}


def named_file(flag: str, kind: str, value: str) -> str:
    """The file that `--config` or a section names: what exists, else a shipped one by its name.

    Raises:
        UserError: the value is a bare name of neither.
    """
    if not re.fullmatch(r"[A-Za-z][\w.-]*", value) or value in ("null", "None") or Path(value).exists():
        return value  # a path, YAML or JSON: the parser's
    known = shipped(kind)
    if value in known:
        return str(known[value])
    if not known or Path(value).suffix:
        return value
    near = difflib.get_close_matches(value, known, 1)
    raise UserError(f"--{flag}: found no file {value!r}, expected a YAML file or one of {', '.join(known)}"
                    + (f"; did you mean {near[0]}?" if near else ""))


def build_parser(name: str, config: type, help: str = "", words: str | None = None) -> jsonargparse.ArgumentParser:
    """The parser of a command: every field an option, required ones without a default positional where one names it.

    Args:
        config: the dataclass of the command's fields.
        words: the field that takes the word or words without a flag.
    """
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"cloze {name}", description=f"{help[:1].upper()}{help[1:]}.", exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of the fields below; options override it.")
    # data and output of a run are flags; what a command looks at stands without one: `cloze inspect FOLDER`.
    positional = name not in {"pretrain", "finetune", "deepspeed-config", "vocab", "prepare"}
    takes_texts = words is not None and get_type_hints(config)[words] == list[str]
    texts = [each.name for each in fields(config) if each.metadata.get("typed_text")]
    parser.add_class_arguments(config, None, as_positional=positional, sub_configs=True, skip={words, *texts})
    if words:
        # A field's sentence stands in the class that declares it.
        docs = {doc.arg_name: doc.description for kind in config.__mro__[:-1] for doc in parse_from_object(kind).params}
        for text in texts:
            parser.add_argument(f"--{text}", type=str, help=docs[text])
        parser.add_argument(words, nargs="*" if takes_texts else None, type=str, help=docs[words])
    return parser


def parse(name: str, config: type[Config], arguments: list[str], *, words: str | None = None,
          short: tuple[tuple[str, str], ...] = (), configs: str = "", help: str = "") -> Config:
    """A command's configuration from its arguments.

    Args:
        config: the dataclass of its fields.
        words: the field that takes the word or words without a flag.
        short: short flags, each with the long one that it stands for.
        configs: the kind of shipped configurations that `--config` takes by name.
        help: what the command does, for --help.

    Raises:
        UserError: an unknown field, a value of the wrong kind, a missing file, in one line.
    """
    parser = build_parser(name, config, help, words)
    kinds = get_type_hints(config)
    lists = {field for field, kind in kinds.items() if kind == list[str]} - {words}
    for brief, long in short:
        arguments = [long + word[len(brief):] if word.partition("=")[0] == brief else word for word in arguments]
    sections = {field for field, kind in kinds.items() if is_dataclass(kind)}
    arguments = _join_lists(arguments, lists)
    if kinds.get(words) == list[str]:
        arguments = words_first(arguments)
    try:
        words_in_order = _files_first(arguments, sections, configs)
        namespace = parser.instantiate(parser.parse_args(words_in_order))
    except BrokenPipeError:  # of --help and --print_config
        raise
    except (ArgumentError, jsonargparse.ArgumentError, OSError, UnicodeError) as error:
        raise UserError(f"cloze {name}: {_one_line(str(error), parser)}; see cloze {name} --help") from error
    except RecursionError as error:
        raise UserError(f"cloze {name}: found values that are nested too deep, expected sections of values") from error
    return config(**{field.name: getattr(namespace, field.name) for field in fields(config)})


def _join_lists(arguments: list[str], names: set[str]) -> list[str]:
    """`--input a b` as the list that jsonargparse reads: several words are what a shell makes of a glob."""
    result, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option[2:] not in names:
            result.append(word)
            continue
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        is_list = len(values) == 1 and values[0].startswith("[")
        result += [option, values[0] if is_list else json.dumps(values)]
    return result


def words_first(arguments: list[str]) -> list[str]:
    """Move options with their values to the end: argparse takes a list of words in one piece only."""
    words, options, rest = [], [], iter(arguments)
    for word in rest:
        if not word.startswith("--"):
            words.append(word)
            continue
        options.append(word)
        if "=" not in word and word not in ("--help", "--print_config"):
            options += [value for value in [next(rest, None)] if value is not None]
    return words + options


def _files_first(arguments: list[str], sections: set[str], configs: str) -> list[str]:
    """Move `--config FILE`, then `--SECTION FILE`, to the front, so that single fields win whatever the order."""
    whole, files, rest, words = [], [], [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--config" or option[2:] in sections:
            chosen = whole if option == "--config" else files
            value = value if equals else next(words, None)
            kind = configs if option == "--config" else option[2:]
            chosen += [option] if value is None else [option, named_file(option[2:], kind, value)]
        else:
            rest.append(word)
    return whole + files + rest


# What jsonargparse calls kinds of values, in words.
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "NoneType": "null", "str": "a text",
          "dict": "a mapping (NAME: VALUE)", "list": "a list"}


def _one_line(message: str, parser: jsonargparse.ArgumentParser) -> str:
    """What jsonargparse found wrong, in our words, with the nearest field if one is unknown."""
    message = " ".join(message.split())
    if denied := re.search(r"\[Errno \d+\] ([^:]+): '(.*?)'", message):  # data may be a file, and is looked at
        return f"{denied[2]}: {denied[1].lower()}"
    key = re.search(r'Parser key "([\w.]+)"', message)
    field = f"--{key[1]}" if key else "--config"
    value = re.search(r"(?:Got|Given) value: (.*)$", message)
    # Inside a value that may be of several kinds, as data: a folder or a section.
    if unknown := re.search(r"Option '([\w.]+)' is not accepted", message):
        return f"{field}: found {unknown[1]!r} in it, which is no field there; {field}.help lists them"
    if kinds := re.findall(r"Expected an? (typing\.Literal\[[^\]]*\]|<class '\w+'>|\w+)", message):
        return f"{field}: found {value[1] if value else 'another'}, expected {' or '.join(map(_kind, kinds))}"
    if unknown := re.search(r"unrecognized arguments: (\S+)", message):
        name = unknown[1].partition("=")[0]
        if not name.startswith("--"):
            return f"found {name!r}, which no field takes; a list stands behind its --field"
        return f"found {name}, which is no option" + _nearest(name[2:], parser)
    if unknown := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return f"{unknown[1]}: found {unknown[2]!r}, which is no field of it" + _nearest(unknown[2], parser, unknown[1])
    if unknown := re.search(r"does not accept option '([\w.]+)'|No action for key \"([\w.]+)\"", message):
        name = unknown[1] or unknown[2]
        return f"found {name!r}, which is no field" + _nearest(name, parser)
    if missing := re.search(r"arguments are required: (.*)$", message):
        flags = {action.dest for action in parser._actions if action.option_strings}
        names = (f"--{name}" if name in flags else name for name in missing[1].split(", "))
        return f"expected {', '.join(names)}, found none"
    if file := re.search(r"(?:Unable to load config|File does not exist:) ['\"]([^'\"]*)['\"]", message):
        found = "no fields in" if Path(file[1]).is_file() else "no file"
        return f"{field}: found {found} {file[1]}, expected a YAML file of NAME: VALUE lines"
    if flag := re.search(r"argument (--[\w.]+): expected one argument", message):
        return f"{flag[1]}: found no value, expected one"
    if trouble := re.search(r"(?:Problems parsing config|Unexpected config): (.*)$", message):
        where = trouble[1].replace(' in "<unicode string>",', "")
        return f"--config: found what is no YAML of NAME: VALUE lines ({where})"
    return message


def _kind(name: str) -> str:
    """A kind of values in words."""
    if name.startswith("typing.Literal"):
        return " or ".join(value.strip("'\" ") for value in name[len("typing.Literal[") : -1].split(","))
    bare = re.sub(r"<class '(\w+)'>", r"\1", name)
    return _KINDS.get(bare, bare)


def _nearest(name: str, parser: jsonargparse.ArgumentParser, section: str = "") -> str:
    """A hint at the option of the nearest name; of fields of a section those are asked first."""
    known = [action.dest for action in parser._actions]
    last = {dest.rsplit(".", 1)[-1]: dest for dest in known}
    last |= {dest.rsplit(".", 1)[-1]: dest for dest in known if section and dest.startswith(f"{section}.")}
    near = difflib.get_close_matches(name, [*known, *last], 1)
    return f"; did you mean --{last.get(near[0], near[0])}?" if near else ""
