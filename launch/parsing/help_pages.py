"""`--help`: the most used fields first; all of them by `--help all`, a section's by its name."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass

from cloze.launch.parsing.fields import Described, describe, shown
from cloze.launch.parsing.parser import shipped
from cloze.pipeline.errors import UserError, did_you_mean
from cloze.pipeline.references import load

_WIDEST = 100  # columns; longer lines are hard to read
_INDENT = 26  # where sentences begin, behind two blanks and a name
ALL = "all"


@dataclass(frozen=True)
class Page:
    """What the help page of a command says, beside the sentences of its fields."""

    name: str
    about: str
    """A phrase, as in the list of commands."""
    config: str
    """`module:name` of the dataclass of its fields."""
    words: str | None = None
    """The field that takes the word or words without a flag."""
    short: tuple[tuple[str, str], ...] = ()
    """Short flags, each with the long one that it stands for."""
    configs: str = ""
    """The folder of configs/ whose files `--config` takes by name; the required fields of such a command are flags,
    those of others positional."""
    main: tuple[str, ...] = ()
    """What `--help` shows beside the fields that must be given: what most runs need or many change."""
    listed: tuple[tuple[str, str], ...] = ()
    """Fields whose values can be listed, though their types don't, each with the `module:name` of a table of them,
    whose values may say what they are (`about`)."""
    examples: tuple[str, ...] = ()
    """Command lines, as they are typed."""

    @property
    def fields(self) -> dict[str, Described]:
        """The fields by their dotted names."""
        return describe(load(self.config))

    def is_word(self, field: Described) -> bool:
        """Whether a field is typed without a flag."""
        return field.name == self.words or (field.default is MISSING and not self.configs)

    def table_of(self, field: str) -> Iterable[str]:
        """The table of a field's values; empty if there is none."""
        return load(dict(self.listed)[field]) if field in dict(self.listed) else ()


def explain_command(page: Page, topic: str) -> str:
    """The help of a command, for a terminal.

    Args:
        topic: empty: the most used fields; all; the name of a section or of a field.

    Raises:
        UserError: there is no such topic.
    """
    known = page.fields
    if not topic:
        return _first_page(page, known)
    if topic == ALL:
        return _everything(page, known)
    found = [
        each for each in known.values() if topic in (each.name, each.section) or topic == each.name.rpartition(".")[2]
    ]
    if not found:
        sections = [each.name for each in known.values() if each.is_section]
        topics = [ALL, *known, *(name.rpartition(".")[2] for name in known)]
        raise UserError(
            f"cloze {page.name} --help: found {topic!r}, expected {', '.join([ALL, *sections])} or a field"
            + did_you_mean(topic, topics)
        )
    return "\n".join(_entries(page, found))


def _first_page(page: Page, known: dict[str, Described]) -> str:
    required = [each for each in known.values() if each.default is MISSING]
    named = [known[name] for name in page.main]
    lines = [*_head(page, required), ""]
    lines += _entries(page, [*required, *(each for each in named if each not in required)])
    lines += [*_entry("--config", _config_sentence(page)), *_examples(page), ""]
    rest = [each for each in known.values() if each not in (*required, *named) and not each.is_section]
    if rest:
        sections = [each.name for each in known.values() if each.is_section]
        some = f", --help {sections[0]} those of a section ({', '.join(sections)})" if sections else ""
        lines += _wrapped(
            f"--help all explains {len(rest)} more fields{some}; --print_config prints the whole configuration.", ""
        )
    return "\n".join(lines).rstrip()


def _everything(page: Page, known: dict[str, Described]) -> str:
    own = [each for each in known.values() if not each.section and not each.is_section]
    required = [each for each in own if each.default is MISSING]
    lines = [*_head(page, required), ""]
    lines += _entries(page, [*required, *(each for each in own if each not in required)])
    lines += _entry("--config", _config_sentence(page))
    lines += _entry("--print_config", "Print the configuration of the command as YAML, and end.")
    lines += ["", *_wrapped("A file's value is taken back by null: --NAME null.", "")]
    for section in (each for each in known.values() if each.is_section):
        inner = [each for each in known.values() if each.section == section.name and not each.is_section]
        lines += ["", *_wrapped(section.sentence.rstrip("."), "", ":")]
        if _takes_file(page, section):
            lines += _entry(f"--{section.name}", _file_sentence(section.name.rpartition(".")[2]))
        lines += _entries(page, inner)
    return "\n".join([*lines, *_examples(page)])


def _examples(page: Page) -> list[str]:
    return ["", "examples:", *(f"  {line}" for line in page.examples)]


def _head(page: Page, required: list[Described]) -> list[str]:
    places: list[str] = []
    flags: list[str] = []
    for described in required:
        if page.is_word(described):
            places.append(described.name.upper())
        else:
            flags.append(f"{_flag(page, described)} {_place(page, described)}")
    if page.words and page.words not in {described.name for described in required}:
        places.append(f"[{page.words.upper()} ...]")
    usage = " ".join(["usage: cloze", page.name, *places, *flags, "[--field value ...]"])
    return [*_wrapped(usage, " " * 8), "", *_wrapped(f"{page.about[:1].upper()}{page.about[1:]}.", "")]


def _flag(page: Page, described: Described) -> str:
    """The flag, short where it has a short form."""
    long = {whole: brief for brief, whole in page.short}
    return long.get(f"--{described.name}", f"--{described.name}")


def _place(page: Page, described: Described) -> str:
    return _flag(page, described).lstrip("-").rpartition(".")[2].upper()


def _takes_file(page: Page, section: Described) -> bool:
    """Whether a section's own flag takes a file of its fields: `--train` of fine-tuning is short for another one."""
    return f"--{section.name}" not in dict(page.short)


def _entries(page: Page, fields: Iterable[Described]) -> list[str]:
    lines = []
    for described in fields:
        if described.is_section and not _takes_file(page, described):
            continue
        name = described.name.upper() if page.is_word(described) else _flag(page, described)
        if described.is_section:
            last = described.name.rpartition(".")[2]
            sentence = f"{described.sentence} {_file_sentence(last)}"
        else:
            sentence = f"{_plain(described)}{_listed(page.table_of(described.name))} {_remark(described)}".rstrip()
        lines += _entry(name, sentence)
    return lines


def _listed(values: Iterable[str]) -> str:
    """The values of a table, each with what is said of it there."""
    rows = values if isinstance(values, Mapping) else dict.fromkeys(values)
    said = [each if isinstance(each, str) else getattr(each, "about", "") for each in rows.values()]
    lines = [f"{name}: {about}" if about else name for name, about in zip(values, said, strict=True)]
    return f" One of: {('; ' if any(said) else ', ').join(lines)}." if lines else ""


def _plain(described: Described) -> str:
    """The field's description, with null explained as "not given"."""
    if described.default in (None, [], ""):
        return re.sub(r"\b(?:null|empty):", "without it:", described.sentence)
    return described.sentence


def _remark(described: Described) -> str:
    """Accepted values and default of a field, unless its description has them."""
    parts = []
    if described.expected.endswith("texts"):
        parts.append("one or more")
    elif described.expected != "a text":
        parts.append(described.expected + (" or null" if described.nullable and described.default is not None else ""))
    if described.default not in (MISSING, None, "") and described.default not in ([], {}):
        parts.append(f"default: {shown(described.default)}")
    return f"({'; '.join(parts)})" if parts else ""


def _config_sentence(page: Page) -> str:
    names = list(shipped(page.configs)) if page.configs else []
    return "YAML file of fields, overridden by flags" + (f"; or one of: {', '.join(names)}." if names else ".")


def _file_sentence(kind: str) -> str:
    names = list(shipped(kind))
    return "A YAML file of its fields" + (f", or one of: {', '.join(names)}." if names else ".")


def _entry(name: str, sentence: str) -> list[str]:
    lines = _wrapped(sentence, " " * _INDENT)
    if len(name) + 4 > _INDENT:
        return [f"  {name}", " " * _INDENT + lines[0], *lines[1:]]
    return [f"  {name:<{_INDENT - 2}}{lines[0]}", *lines[1:]]


def _wrapped(text: str, indent: str, end: str = "") -> list[str]:
    """Lines of a text, all but the first with an indent for which the first leaves room."""
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    lines = textwrap.wrap(text + end, max(width - len(indent), 30), break_long_words=False, break_on_hyphens=False)
    return [lines[0], *(indent + line for line in lines[1:])]
