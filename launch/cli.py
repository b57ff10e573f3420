"""`cloze COMMAND`: from the words of the command line to the command's function, and its exit status."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from cloze.launch.commands import COMMANDS, explain, help_topic, load, parse, split_command, usage, with_operation
from cloze.launch.run.preemption import Starting
from cloze.launch.system.environment.launchers import read_environment
from cloze.launch.system.environment.parents import end_with_parent
from cloze.launch.system.environment.process import fewer_imports, prepare_process, protect_process
from cloze.launch.system.exit_status import Ending
from cloze.launch.system.local_launcher import hear_stops, run_ranks
from cloze.launch.system.streams import print_aside, print_line
from cloze.pipeline.errors import UserError
from cloze.version import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 complete, 1 other processes of the run are gone, 2 an error that the user can fix,
    75 stopped early with a checkpoint, 130 stopped by Ctrl-C, 141 the reader of the output has closed it.
    """
    end_with_parent()
    protect_process()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0].startswith("--local_rank="):  # of `deepspeed`, which sets LOCAL_RANK too
        arguments = arguments[1:]
    with Ending() as ending, ExitStack() as during:
        call = called(arguments, during)
        hear_stops()  # help, for which `called` has returned early
        ending.status = call() or 0
    return ending.status


def called(arguments: list[str], during: ExitStack) -> Callable[[], int | None]:
    """What the words of a command line call: help, or a command's function with its configuration.

    Args:
        during: takes the context in which a training starts.

    Raises:
        UserError: there is no such command, or the words do not make its configuration.
    """
    group = arguments[0] if arguments and any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else ""
    if arguments[bool(group) :][:1] in ([], ["-h"], ["--help"]):
        return partial(print, usage(group))
    if arguments[0] == "help":  # as others have it
        return called([*arguments[1:], "--help"], during)
    if arguments[0] in ("--version", "-V"):
        return partial(print, f"cloze {__version__}")
    for word in arguments:  # which may be any bytes: those that aren't UTF-8 stand in them as surrogates
        if word.encode(errors="ignore").decode() != word:
            raise UserError(
                f"cloze: found the word '{os.fsencode(word).decode(errors='backslashreplace')}', expected "
                "UTF-8, as configurations and manifests are written; rename the file or the folder"
            )
    name, rest = split_command(with_operation(arguments))
    topic = help_topic(rest)
    if topic is not None:
        return partial(print, explain(name, topic))
    command = COMMANDS[name]
    if command.trains:
        during.enter_context(Starting(_say))
    if command.trains or not command.resumes:
        hear_stops()
    config = parse(name, rest)  # before the command's module, which may import for seconds
    if command.resumes and command.resumes(config):
        during.enter_context(Starting(_say))
    hear_stops()
    if command.checks:
        load(command.checks)(config)
    if command.trains and config.processes != 1 and _starts_ranks(config.processes):
        during.close()  # from here on a signal is for the ranks
        return partial(run_ranks, name, rest, config.processes)
    if not command.prepares:
        return partial(load(command.function), config)
    if command.trains:
        _say(f"cloze {name}: loading PyTorch and DeepSpeed")
    elif read_environment().is_main and sys.stderr.isatty():
        print_aside(f"cloze {name}: loading PyTorch")
    environment = prepare_process()
    with fewer_imports():
        function = load(command.function)
    return partial(function, config, environment)


def _starts_ranks(processes: int | str) -> bool:
    """Whether this process must start the ranks: not if it is one of them.

    Raises:
        UserError: a launcher has started another number.
    """
    environment = read_environment()
    if environment.launcher == "single":
        return True
    if processes not in ("auto", environment.world_size):
        raise UserError(
            f"processes: found {processes} in a run of which {environment.launcher} has started "
            f"{environment.world_size}, expected the same; leave it to the launcher"
        )
    return False


def _say(line: str) -> None:
    """Print a line if this is the main rank."""
    if read_environment().is_main:
        print_line(line)
