"""`cloze COMMAND`: one table of commands; each is a function of one configuration dataclass."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import select
import signal
import sys
import time
from argparse import ArgumentError
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, get_type_hints

from launch import __version__
from launch.environment import protect_process, read_environment
from model.config import ModelError
from pipeline.errors import UserError

if TYPE_CHECKING:  # imported where it is used: worker processes import this module too, and parse nothing
    import jsonargparse

EXIT_USER_ERROR = 2
# torchrun looks at its workers every 0.1 s (--monitor-interval), but a busy machine takes seconds to end a process.
SAID_SECONDS = 10.0


@dataclass(frozen=True)
class Command:
    """A function `module:name`, the dataclass it takes, the field that takes the word or words without a flag, and
    short flags for others.
    """

    help: str
    function: str
    config: str
    words: str | None = None
    short: tuple[tuple[str, str], ...] = ()


def _prediction(help: str, config: str) -> Command:
    return Command(help, "launch.predicting.commands:predict", f"launch.predicting.config:{config}", words="text")


COMMANDS = {
    "vocab": Command("train a vocabulary on raw text", "launch.data_commands:vocab", "pipeline.config:PrepareConfig"),
    "prepare": Command("turn raw text into shards", "launch.data_commands:prepare", "pipeline.config:PrepareConfig"),
    "inspect": Command("show what shards hold", "launch.data_commands:inspect", "pipeline.config:InspectConfig"),
    "verify": Command("check every shard against its hash", "launch.data_commands:verify",
                      "pipeline.config:VerifyConfig"),
    "pretrain": Command("train a model on shards", "launch.pretrain:pretrain", "launch.config:PretrainConfig"),
    "deepspeed-config": Command("print what DeepSpeed would be given", "launch.pretrain:print_deepspeed_config",
                                "launch.config:DeepSpeedConfig"),
    "export": Command("write a Hugging Face folder", "launch.export:export", "launch.config:ExportConfig"),
    "finetune": Command("train a model for a task", "launch.finetune:finetune",
                        "launch.config:FinetuneConfig", words="task", short=(("--train", "--train_file"),)),
    "predict fill-mask": _prediction("fill the blanks of texts", "FillMaskConfig"),
    "predict classify": _prediction("label texts or pairs of texts", "ClassifyConfig"),
    "predict tag": _prediction("tag the words of texts: entities, parts of speech", "TagConfig"),
    "predict answer": _prediction("answer questions from a text", "AnswerConfig"),
    "predict choose": _prediction("choose which text goes on with another best", "ChooseConfig"),
    "predict similarity": _prediction("how alike texts are", "SimilarityConfig"),
    "predict embed": _prediction("one vector for each text", "EmbedConfig"),
    "predict features": _prediction("vectors of tokens or of a word, a picture of attention", "FeaturesConfig"),
    "predict score": _prediction("rank texts by their probability", "ScoreConfig"),
    "evaluate": Command("measure a model on a suite", "launch.evaluate.command:evaluate",
                        "launch.evaluate.config:EvaluateConfig"),
    "serve": Command("answer over HTTP, with a page to try it", "launch.serve:serve",
                     "launch.serving.config:ServeConfig"),
    "tokenize": Command("show what a model is given for texts", "launch.predicting.commands:tokenize",
                        "launch.predicting.config:TokenizeConfig", words="text"),
    "doctor": Command("examine the environment, on all its machines", "launch.doctor:doctor",
                      "launch.config:DoctorConfig"),
    "quickstart": Command("the whole chain in minutes, on text that every Python has", "launch.quickstart:quickstart",
                          "launch.config:QuickstartConfig"),
}


def _load(reference: str):
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def build_parser(name: str) -> jsonargparse.ArgumentParser:
    """The parser of a command: every field an option, required ones without a default positional where one names it."""
    import jsonargparse
    from docstring_parser import parse_from_object

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    command = COMMANDS[name]
    config = _load(command.config)
    parser = jsonargparse.ArgumentParser(
        prog=f"cloze {name}", description=f"{command.help[0].upper()}{command.help[1:]}.", exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of the fields below; options override it.")
    # data and output of a run are flags; what a command looks at stands without one: `cloze inspect FOLDER`.
    positional = name not in {"pretrain", "finetune", "deepspeed-config", "vocab", "prepare"}
    takes_texts = command.words is not None and get_type_hints(config)[command.words] == list[str]
    texts = [each.name for each in fields(config) if each.metadata.get("typed_text")]
    parser.add_class_arguments(config, None, as_positional=positional, sub_configs=True, skip={command.words, *texts})
    if command.words:
        # A field's sentence stands in the class that declares it.
        docs = {doc.arg_name: doc.description for kind in config.__mro__[:-1] for doc in parse_from_object(kind).params}
        for text in texts:
            parser.add_argument(f"--{text}", type=str, help=docs[text])
        parser.add_argument(command.words, nargs="*" if takes_texts else None, type=str, help=docs[command.words])
    return parser


def parse(name: str, arguments: list[str]):
    """The command's configuration from its arguments.

    Raises:
        UserError: an unknown field, a value of the wrong kind, a missing file, in one line.
    """
    import jsonargparse

    parser = build_parser(name)
    config = _load(COMMANDS[name].config)
    kinds = get_type_hints(config)
    lists = {field for field, kind in kinds.items() if kind == list[str]} - {COMMANDS[name].words}
    for short, long in COMMANDS[name].short:
        arguments = [long + word[len(short):] if word.partition("=")[0] == short else word for word in arguments]
    sections = {field for field, kind in kinds.items() if is_dataclass(kind)}
    if kinds.get(COMMANDS[name].words) == list[str]:
        arguments = _words_first(arguments)
    try:
        namespace = parser.instantiate(parser.parse_args(_files_first(_join_lists(arguments, lists), sections)))
    except BrokenPipeError:  # of --help and --print_config
        raise
    except (ArgumentError, jsonargparse.ArgumentError, OSError, UnicodeError) as error:
        raise UserError(f"cloze {name}: {_one_line(str(error), parser)}; see cloze {name} --help") from error
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


def _words_first(arguments: list[str]) -> list[str]:
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


def _files_first(arguments: list[str], sections: set[str]) -> list[str]:
    """Move `--config FILE`, then `--SECTION FILE`, to the front, so that single fields win whatever the order."""
    whole, files, rest, words = [], [], [], iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--config" or option[2:] in sections:
            chosen = whole if option == "--config" else files
            chosen += [word] if equals else [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
    return whole + files + rest


def _one_line(message: str, parser: jsonargparse.ArgumentParser) -> str:
    """jsonargparse's message without its line breaks and Python names, and the nearest field if one is unknown."""
    message = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    unknown = re.search(r"(?:option|arguments?:?) '?(?:--)?([\w.]+)", message)
    if "not accept" in message or "unrecognized" in message:
        known = [action.dest for action in parser._actions]
        last = {dest.rsplit(".", 1)[-1]: dest for dest in known}
        near = unknown and difflib.get_close_matches(unknown[1], [*known, *last], 1)
        if near:
            message += f"; did you mean {last.get(near[0], near[0])}?"
    return message


def usage(first_word: str = "") -> str:
    """What `cloze --help` prints; with a first word, such as predict, only of the commands that begin with it."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(first_word)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in shown.items()]
    return "\n".join([
        "usage: cloze COMMAND [--config FILE.yaml] [--field value ...]", "", "commands:", *lines, "",
        "`cloze COMMAND --help` explains every field; `--print_config` prints the resolved configuration.",
    ])


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or two, and what is left.

    Raises:
        UserError: there is no such command.
    """
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in COMMANDS:
            return name, arguments[length:]
    word = arguments[0]
    two = " ".join(arguments[:2])
    near = [*difflib.get_close_matches(two, COMMANDS, 1), *difflib.get_close_matches(word, COMMANDS, 1)]
    raise UserError(f"cloze: found command {word!r}, expected one of {', '.join(COMMANDS)}"
                    + (f"; did you mean {near[0]}?" if near else ""))


def _waits(said: bool) -> bool:
    """Whether this rank waits, with its message still to be said or said, since launchers end all ranks when one ends.

    Before the ranks have met all look at the same, as a rule: rank 0 says it, and the others are ended before they do.
    Later each says what went wrong on it, and none ends before the others have said theirs.
    """
    distributed = sys.modules.get("launch.distributed")  # which is not imported for this, and torch with it
    met = distributed is not None and distributed.have_met()
    try:
        environment = read_environment()
    except UserError:  # the environment may be what is wrong
        return False
    if said:
        return met and environment.world_size > 1
    return not met and not environment.is_main


def _nobody_reads(output) -> bool:
    """Whether the other end of a pipe is closed, as that of standard output behind `| head`."""
    ends = select.poll()
    try:
        ends.register(output, 0)  # errors are told without asking for them
    except (TypeError, ValueError):  # no file of the system's: a notebook's, or none at all
        return False
    return bool(ends.poll(0))


def _run(arguments: list[str]) -> int:
    group = arguments[0] if arguments and any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else ""
    if arguments[bool(group) :] in ([], ["-h"], ["--help"]):
        print(usage(group))
        return 0
    if arguments[0] == "--version":
        print(f"cloze {__version__}")
        return 0
    name, rest = split_command(arguments)
    config = parse(name, rest)  # before the command's module, which may import for seconds
    return _load(COMMANDS[name].function)(config) or 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 complete, 2 an error that the user can mend, 75 stopped early with a checkpoint,
    141 nobody reads the output any more.
    """
    protect_process()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0].startswith("--local_rank="):  # of `deepspeed`, which sets LOCAL_RANK too
        arguments = arguments[1:]
    try:
        status = _run(arguments)
        if sys.stdout:
            sys.stdout.flush()  # what the exit would write could not be caught here
        return status
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        return 128 + signal.SIGPIPE  # the shell's convention for what dies of it
    except (UserError, ModelError) as error:
        if _waits(said=False):
            time.sleep(SAID_SECONDS)
        # In one piece: other processes write to the same terminal, and print() may write the line's end by itself.
        print(f"error: {error}\n", end="", file=sys.stderr, flush=True)
        if _waits(said=True):
            time.sleep(SAID_SECONDS)
        return EXIT_USER_ERROR
