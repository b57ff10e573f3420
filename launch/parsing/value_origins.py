"""Where the values of a configuration come from: typed on the command line, named in a file, or defaults."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloze.pipeline.untrusted import load_yaml


@dataclass(frozen=True)
class Given:
    """The values of a configuration before it is made, by dotted names, and where they come from."""

    value: Callable[[str], Any]
    """The value of a field."""
    untyped: Callable[[str], Any]
    """The value that a field would have if it were not typed."""
    typed: frozenset[str]
    """Names of the fields and sections on the command line."""
    in_files: frozenset[str]
    """Names of the fields and sections in the files of `--config`."""

    def has_section(self, name: str) -> bool:
        """Whether a section was given as a whole, as `--model base`, or in a file of `--config`; its single fields that
        were typed do not count.
        """
        return name in self.typed | self.in_files

    def fields_of(self, section: str) -> list[str]:
        """The fields of a section that were typed, without the section's name."""
        begin = f"{section}."
        return sorted(name.removeprefix(begin) for name in self.typed if name.startswith(begin))


Complete = Callable[[Given], dict[str, object]]
"""What completes a configuration by what was given: the values of further fields by their dotted names."""


def chunks(
    words: list[str], switches: Collection[str] = (), lists: Collection[str] = ()
) -> Iterator[tuple[str, list[str]]]:
    """The options of a command line, each by its name with its words; "" with those that belong to none.

    Args:
        switches: options whose value may be missing: it is true then.
        lists: options that take all words up to the next option.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name = word[2:].partition("=")[0].removesuffix("+")  # the library's own form for one more value
        if word == "--":  # what follows are words, whatever they begin with
            yield "", [word, *rest]
            return
        if not word.startswith("--"):
            yield "", [word]
        elif "=" in word or name in ("help", "print_config"):
            yield name, [word]
        elif name in lists:
            count = next((place for place, each in enumerate(rest) if each.startswith("--")), len(rest))
            yield name, [word, *(rest.popleft() for _ in range(count))]
        elif name in switches and (not rest or rest[0].startswith("--")):
            yield name, [word, "true"]
        else:
            yield name, [word, *([rest.popleft()] if rest else [])]


def value_of(chunk: list[str]) -> str | None:
    """The value in the words of an option, `--name VALUE` or `--name=VALUE`; None: there is none."""
    _, equals, value = chunk[0].partition("=")
    return value if equals else next(iter(chunk[1:]), None)


def names_in_file(value: str) -> set[str]:
    """The fields and sections in a value of `--config`: a file, or YAML itself."""
    path = Path(value)
    text = value if "\n" in value or value.lstrip().startswith("{") else path.read_text(encoding="utf-8")
    values = load_yaml(text, name=value)
    return {str(name).partition(".")[0] for name in values} if isinstance(values, dict) else set()
