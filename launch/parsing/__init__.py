"""The command line: parsing, help, completion, configurations by name."""

from cloze.launch.parsing.completion import completion_script
from cloze.launch.parsing.help_pages import Page, explain_command
from cloze.launch.parsing.parser import build_parser, parse, shipped
from cloze.launch.parsing.value_origins import Complete, Given, chunks, value_of

__all__ = [
    "Complete",
    "Given",
    "Page",
    "build_parser",
    "chunks",
    "completion_script",
    "explain_command",
    "parse",
    "shipped",
    "value_of",
]
