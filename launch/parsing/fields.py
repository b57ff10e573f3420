"""The fields of a configuration for help and messages: dotted names, descriptions, accepted values."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import Namespace

from cloze.pipeline.bounds import bounds_of

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Described:
    """A field, or a section of fields."""

    name: str
    """Dotted, as behind `--`."""
    kind: Any
    """Its type; for a section the section's dataclass."""
    sentence: str
    """The sentence under it in its dataclass."""
    default: object
    """dataclasses.MISSING if it must be given."""

    @property
    def is_section(self) -> bool:
        return is_dataclass(self.kind)

    @property
    def section(self) -> str:
        """The section of the field; empty for the command's own fields."""
        return self.name.rpartition(".")[0]

    @property
    def nullable(self) -> bool:
        """Whether null is accepted."""
        return NoneType in _members(self.kind)

    @property
    def items(self) -> type | None:
        """The dataclass of its items, if it is a list of such."""
        item = next(iter(get_args(self.kind)), None)
        return item if get_origin(self.kind) is list and isinstance(item, type) and is_dataclass(item) else None

    @property
    def choices(self) -> list[str]:
        """The values that can be listed, as they are typed."""
        return [value for member in _members(self.kind) for value in _listed(member)]

    @property
    def takes_files(self) -> bool:
        """Whether a value may be a file: not for numbers and enumerated values."""
        return not all(
            member in (int, float, bool, NoneType) or get_origin(member) is Literal for member in _members(self.kind)
        )

    @property
    def is_switch(self) -> bool:
        """Whether its values are true and false (or null)."""
        return set(_members(self.kind)) - {NoneType} == {bool}

    @property
    def expected(self) -> str:
        """Accepted values in words, without null."""
        return in_words(self.kind)


@functools.cache
def describe(config: type) -> dict[str, Described]:
    """The fields of a command's dataclass and of its sections, by their dotted names, in the order of declaration."""
    return {each.name: each for each in _describe(config, "")}


def _describe(config: Any, prefix: str) -> Iterator[Described]:
    # A field's sentence stands in the class that declares it.
    docs = {
        doc.arg_name: doc.description
        for kind in reversed(config.__mro__[:-1])
        for doc in parse_from_object(kind).params
    }
    kinds = get_type_hints(config)
    for field in fields(config):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        kind = kinds[field.name]
        sentence = " ".join((docs.get(field.name) or "").split())
        if allowed := bounds_of(config).get(field.name):
            sentence += f" {str(allowed).capitalize()}."
        yield Described(prefix + field.name, kind, sentence, default)
        if is_dataclass(kind):
            for inner in _describe(kind, f"{prefix}{field.name}."):
                # A section's defaults may differ from those of its class.
                value = (
                    getattr(default, inner.name.rpartition(".")[2])
                    if inner.section == prefix + field.name
                    else (inner.default)
                )
                yield Described(inner.name, inner.kind, inner.sentence, value)


def nulls(known: Mapping[str, Described], values: Any) -> Iterator[tuple[str, str]]:
    """The fields that are null in a file although they do not take it, which the library lets through, and what they
    take; those of sections in a list too.

    Args:
        values: the library's namespace of what was given.
    """
    for name, field in known.items():
        value = values.get(name, MISSING)
        if value is None and not field.nullable and not field.is_section:
            yield name, field.expected
        if not field.is_section:
            inside = (*_members(field.kind), field.items)
            sections = [describe(kind) for kind in inside if isinstance(kind, type) and is_dataclass(kind)]
            for part in value if isinstance(value, list) else [value]:
                for section in sections if isinstance(part, Namespace) else ():
                    yield from ((f"{name}.{inner}", expected) for inner, expected in nulls(section, part))


def _members(kind: object) -> tuple[object, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _listed(member: object) -> list[str]:
    if member is bool:
        return ["true", "false"]
    return [str(value) for value in get_args(member)] if get_origin(member) is Literal else []


def in_words(kind: object) -> str:
    """The accepted values of a type in words: `a number`, `one of: a, b`, `a whole number or auto`."""
    members = [member for member in _members(kind) if member is not NoneType]
    return " or ".join(_in_words(member, alone=len(members) == 1) for member in members)


def _in_words(kind: Any, alone: bool) -> str:
    if get_origin(kind) is Literal:
        values = _listed(kind)
        return f"one of: {', '.join(values)}" if alone and len(values) > 1 else " or ".join(values)
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if is_dataclass(item):
            return f"a list of {{{', '.join(field.name for field in fields(item))}}}"
        if get_origin(item) is Literal:
            return f"a list of {', '.join(_listed(item))}"
        return {str: "one or more texts", int: "a list of whole numbers, as [1, 2]"}.get(
            item, "a list of numbers, as [0.1, 0.2]"
        )
    if get_origin(kind) is dict or kind is dict:
        return "names and values, as {name: value}"
    if is_dataclass(kind):
        return "a YAML file of its fields, or {name: value}"
    return _KINDS[kind]


def shown(value: object) -> str:
    """A value as it is typed in YAML: true, null, [0.9, 0.999]."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return "null" if value is None else str(value)
