"""`cloze COMMAND`: the table of commands (each a function of one configuration dataclass), `main`, exit statuses."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import select
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloze import __version__
from cloze.launch.config import CompletionConfig
from cloze.launch.run.preemption import Starting
from cloze.launch.system.environment import (
    end_with_parent,
    fewer_imports,
    prepare_process,
    protect_process,
    read_environment,
)
from cloze.launch.system.ranks import run_ranks
from cloze.model.config import ModelError
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import describe

if TYPE_CHECKING:  # imported where it is used: worker processes import this module too, and parse nothing
    import jsonargparse

    from cloze.launch import parsing

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
# torchrun looks at its workers every 0.1 s (--monitor-interval), but a busy machine takes seconds to end a process.
SAID_SECONDS = 10.0
# Refusals of the file system, wherever they are met, and folders in the place of files, or files in theirs: no command
# can go on without what it was given.
_USERS_TO_FIX = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR}


@dataclass(frozen=True)
class Command:
    """A row of the table of commands; what it names is imported when the command is run."""

    help: str
    function: str
    """`module:name`, called with the configuration; with the environment too, if it prepares."""
    config: str
    """`module:name` of the dataclass of its fields."""
    words: str | None = None
    """The field that takes the word or words without a flag."""
    short: tuple[tuple[str, str], ...] = ()
    """Short flags, each with the long one that it stands for."""
    configs: str = ""
    """The folder of configs/ whose files `--config` takes by name."""
    prepares: bool = False
    """Whether the process is prepared, as DeepSpeed wants it, before the function's module is imported."""
    trains: bool = False
    """Whether the configuration's `processes` are started, each with the same command."""
    checks: str = ""
    """`module:name`, called with the configuration before torch is imported, which takes seconds: raises UserError for
    what is not there."""
    main: tuple[str, ...] = ()
    """What `--help` shows beside the fields that must be given: what most runs need or many change."""
    listed: tuple[tuple[str, str], ...] = ()
    """Fields whose values can be listed, though their types don't, each with the `module:name` of a table of them."""
    examples: tuple[str, ...] = ()
    """Command lines, as they are typed."""


def _prediction(help: str, config: str, main: str, *examples: str) -> Command:
    return Command(
        help,
        "cloze.launch.predict.command:predict",
        f"cloze.launch.predict.config:{config}",
        words="text",
        checks="cloze.launch.predict.precheck:check_inputs",
        main=("text", *main.split(), "file", "text_columns", "output"),
        examples=examples,
    )


_RUN_FIELDS = (
    "train.max_steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.learning_rate",
    "train.precision",
)


COMMANDS = {
    "vocab": Command(
        "train a vocabulary on raw text",
        "cloze.launch.tools.data:vocab",
        "cloze.pipeline.config:PrepareConfig",
        configs="prepare",
        main=(
            "input",
            "output",
            "vocab_size",
            "vocabulary.model",
            "vocabulary.lowercase",
            "source.format",
            "source.text_field",
        ),
        examples=("cloze vocab --config books --input 'books-*.jsonl.gz' --output runs/vocab --vocab_size 8192",),
    ),
    "prepare": Command(
        "convert raw text to shards",
        "cloze.launch.tools.data:prepare",
        "cloze.pipeline.config:PrepareConfig",
        configs="prepare",
        main=(
            "input",
            "output",
            "tokenizer",
            "max_length",
            "mask_sets",
            "workers",
            "source.format",
            "source.text_field",
            "samples.objective",
            "masking.rate",
            "split.validation",
        ),
        examples=(
            "cloze prepare --config books --input texts/ --tokenizer runs/vocab --output runs/shards",
            "cloze prepare --input texts/ --tokenizer runs/vocab --output runs/shards --workers 8",
        ),
    ),
    "inspect": Command(
        "show the contents of shards",
        "cloze.launch.tools.data:inspect",
        "cloze.pipeline.config:InspectConfig",
        main=("split", "samples"),
        examples=("cloze inspect runs/shards --samples 2",),
    ),
    "verify": Command(
        "check every shard against its hash",
        "cloze.launch.tools.data:verify",
        "cloze.pipeline.config:VerifyConfig",
        examples=("cloze verify runs/shards",),
    ),
    "pretrain": Command(
        "train a model on shards",
        "cloze.launch.pretrain.command:pretrain",
        "cloze.launch.config:PretrainConfig",
        configs="pretrain",
        prepares=True,
        trains=True,
        checks="cloze.launch.pretrain.precheck:check_inputs",
        main=(
            "model",
            "processes",
            *_RUN_FIELDS,
            "train.time_budget_hours",
            "init_from",
            "evaluation.every_steps",
            "checkpoint.every_steps",
        ),
        examples=(
            "cloze pretrain --config small --data runs/shards --output runs/small",
            "cloze pretrain --config small --data runs/shards --output runs/mini --model mini --processes 2",
            "torchrun --nproc-per-node 8 -m cloze pretrain --config roberta-base --data shards --output run",
        ),
    ),
    "sweep": Command(
        "train a model on shards with every combination of some settings",
        "cloze.launch.pretrain.sweep:sweep",
        "cloze.launch.config:SweepConfig",
        configs="pretrain",
        prepares=True,
        main=("grid", "run", "model", "processes", *_RUN_FIELDS),
        examples=(
            "cloze sweep --config small --data runs/shards --output runs/rates --grid learning_rate=1e-3,2e-3 seed=1,2",
            "cloze sweep --config small --data runs/shards --output runs/rates --grid learning_rate=1e-3,2e-3 --run 0",
        ),
    ),
    "deepspeed-config": Command(
        "print the DeepSpeed configuration of a run",
        "cloze.launch.pretrain.command:print_deepspeed_config",
        "cloze.launch.config:DeepSpeedConfig",
        configs="pretrain",
        prepares=True,
        main=("processes", *_RUN_FIELDS, "zero.stage"),
        examples=("cloze deepspeed-config --config bert-base-phase1 --processes 8",),
    ),
    "plan": Command(
        "estimate whether a run fits, how long it takes, what it costs",
        "cloze.launch.tools.plan:plan",
        "cloze.launch.tools.planning.config:PlanConfig",
        configs="pretrain",
        prepares=True,
        checks="cloze.launch.pretrain.precheck:check_inputs",
        listed=(("device", "cloze.launch.system.data_sheets:NAMES"),),
        main=("device", "gpus", "data", "model", *_RUN_FIELDS, "zero.stage", "price_per_hour"),
        examples=("cloze plan --config bert-base-phase1 --device a100-80gb --gpus 8 --price_per_hour 2",),
    ),
    "runs": Command(
        "list the runs in a folder and their state",
        "cloze.launch.tools.status:list_runs",
        "cloze.launch.config:RunsConfig",
        main=("folder", "json"),
        examples=("cloze runs runs",),
    ),
    "status": Command(
        "show the state of a run, or follow it",
        "cloze.launch.tools.status:show_status",
        "cloze.launch.config:StatusConfig",
        main=("follow",),
        examples=("cloze status runs/small --follow",),
    ),
    "export": Command(
        "write a Hugging Face folder",
        "cloze.launch.tools.export:export",
        "cloze.launch.config:ExportConfig",
        main=("output", "step", "dtype", "onnx"),
        examples=(
            "cloze export runs/small --output runs/small-hf",
            "cloze export runs/small --step best --dtype bf16 --output small-bf16",
        ),
    ),
    "finetune": Command(
        "train a model for a task",
        "cloze.launch.finetune.command:finetune",
        "cloze.launch.config:FinetuneConfig",
        words="task",
        short=(("--train", "--train_file"),),
        configs="finetune",
        prepares=True,
        trains=True,
        checks="cloze.launch.finetune.precheck:check_inputs",
        listed=(("task", "cloze.launch.config.tasks:TASKS"),),
        main=(
            "text_columns",
            "label_columns",
            "test",
            "max_length",
            "epochs",
            "train.learning_rate",
            "train.global_batch_size",
            "seeds",
            "grid",
            "processes",
        ),
        examples=(
            "cloze finetune classification --model runs/small --train train.csv --validation dev.csv --output runs/own",
            "cloze finetune ner --model bert-base-cased --train train.conll --validation dev.conll --output runs/ner",
        ),
    ),
    "predict fill-mask": _prediction(
        "fill the blanks of texts",
        "FillMaskConfig",
        "top_k",
        "cloze predict fill-mask runs/small 'The capital of [MASK] is Paris.'",
    ),
    "predict classify": _prediction(
        "label texts or pairs of texts",
        "ClassifyConfig",
        "pair top_k",
        "cloze predict classify runs/own 'a fine film'",
        "cloze predict classify runs/own --file new.csv --output results.csv",
    ),
    "predict tag": _prediction(
        "tag the words of texts: entities, parts of speech",
        "TagConfig",
        "aggregation",
        "cloze predict tag runs/ner 'Ada Lovelace lived in London.'",
    ),
    "predict answer": _prediction(
        "answer questions from a text",
        "AnswerConfig",
        "context top_k",
        "cloze predict answer runs/squad 'Who came?' --context 'Ada came at noon.'",
    ),
    "predict choose": _prediction(
        "choose the best continuation of a text",
        "ChooseConfig",
        "",
        "cloze predict choose runs/swag 'She opened the door.' 'It was raining.' 'Doors are eaten.'",
    ),
    "predict similarity": _prediction(
        "compare texts by similarity",
        "SimilarityConfig",
        "pooling",
        "cloze predict similarity runs/small 'a cat' 'a dog' 'a car'",
    ),
    "predict embed": _prediction(
        "one vector for each text",
        "EmbedConfig",
        "pair pooling dimensions",
        "cloze predict embed runs/small --file texts.txt --output vectors.npy",
    ),
    "predict features": _prediction(
        "vectors of tokens or of a word, a picture of attention",
        "FeaturesConfig",
        "word attention",
        "cloze predict features runs/small 'the bank of a river' --word bank",
    ),
    "predict score": _prediction(
        "rank texts by their probability",
        "ScoreConfig",
        "",
        "cloze predict score runs/small 'the cat sat' 'the cat sitted'",
    ),
    "evaluate": Command(
        "evaluate a model on a suite",
        "cloze.launch.evaluate.command:evaluate",
        "cloze.launch.evaluate.config:EvaluateConfig",
        checks="cloze.launch.evaluate.precheck:check_inputs",
        main=("suite", "data", "step", "every_checkpoint", "json", "every_nth"),
        examples=(
            "cloze evaluate runs/small --suite blimp --data blimp --every_nth 10",
            "cloze evaluate runs/small --suite lines --data held-out.txt",
        ),
    ),
    "serve": Command(
        "serve predictions over HTTP, with a page to try them",
        "cloze.launch.serve.command:serve",
        "cloze.launch.serve.config:ServeConfig",
        checks="cloze.launch.pretrained.precheck:check_used",
        main=("host", "port", "api_key_file", "no_auth"),
        examples=("cloze serve runs/own --port 8000", "cloze serve runs/own --host 0.0.0.0 --api_key_file keys.txt"),
    ),
    "tokenize": Command(
        "show a model's inputs for texts",
        "cloze.launch.predict.tokenize:tokenize",
        "cloze.launch.predict.config:TokenizeConfig",
        words="text",
        main=("text", "pair", "file"),
        checks="cloze.launch.predict.precheck:check_inputs",
        examples=("cloze tokenize runs/small 'The capital of [MASK] is Paris.'",),
    ),
    "doctor": Command(
        "check the environment, on all machines",
        "cloze.launch.tools.doctor:doctor",
        "cloze.launch.config:DoctorConfig",
        main=("data", "output"),
        examples=("cloze doctor", "torchrun --nproc-per-node 2 -m cloze doctor --output runs"),
    ),
    "quickstart": Command(
        "run the whole pipeline in minutes, on text included in Python",
        "cloze.launch.tools.quickstart:quickstart",
        "cloze.launch.config:QuickstartConfig",
        main=("output", "processes"),
        examples=("cloze quickstart",),
    ),
    "completion": Command(
        "print the shell completion of commands, fields and values",
        "cloze.launch.cli:print_completion",
        "cloze.launch.config:CompletionConfig",
        examples=(
            "cloze completion bash > ~/.local/share/bash-completion/completions/cloze",
            "cloze completion fish > ~/.config/fish/completions/cloze.fish",
        ),
    ),
}


def _load(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def build_parser(name: str) -> jsonargparse.ArgumentParser:
    """The parser of a command."""
    from cloze.launch import parsing  # not at the top: worker processes import this module too, and parse nothing

    command = COMMANDS[name]
    return parsing.build_parser(name, _load(command.config), command.words)


def parse(name: str, arguments: list[str]) -> Any:
    """A command's configuration from its arguments. Raises UserError as `parsing.parse`."""
    from cloze.launch import parsing

    command = COMMANDS[name]
    return parsing.parse(
        name, _load(command.config), arguments, words=command.words, short=command.short, configs=command.configs
    )


def _page(name: str) -> parsing.Page:
    from cloze.launch import parsing

    row = COMMANDS[name]
    return parsing.Page(
        name,
        row.help,
        _load(row.config),
        row.main,
        row.examples,
        row.words,
        row.short,
        row.configs,
        {field: list(_load(table)) for field, table in row.listed},
    )


def explain(name: str, topic: str = "") -> str:
    """The help of a command: what matters; or of a topic: all, a section, a field. Raises UserError: there is none."""
    from cloze.launch import parsing

    return parsing.explain_command(_page(name), topic)


def print_completion(config: CompletionConfig) -> None:
    """Print the script with which a shell completes all commands."""
    from cloze.launch import parsing

    print(parsing.completion_script(config.shell, [_page(name) for name in COMMANDS]))


def _help_topic(arguments: list[str]) -> str | None:
    """The topic after `--help` or `-h`, empty if there is none; None without `--help`."""
    for number, word in enumerate(arguments):
        name, _, behind = word.partition("=")
        if name.startswith("--") and name.endswith(".help"):  # of a section
            return name[2 : -len(".help")]
        if name in ("-h", "--help"):
            return (behind or next(iter(arguments[number + 1 :]), "")).lstrip("-")
        if word == "--":  # behind it stand texts
            return None
    return None


def _with_operation(arguments: list[str]) -> list[str]:
    """Insert the operation of the model's head into `predict MODEL ...`; other commands are returned unchanged."""
    words = arguments[1:]
    if arguments[0] != "predict" or " ".join(arguments[:2]) in COMMANDS or not words:
        return arguments
    operations = [name.split()[1] for name in COMMANDS if name.startswith("predict ")]
    if difflib.get_close_matches(words[0], operations, 1) and not os.path.exists(words[0]):
        return arguments  # a slip: it is answered with the nearest operation
    _load("cloze.launch.predict.precheck:check_words")(words)  # before what imports torch
    return ["predict", _load("cloze.launch.predict.default_operation:operation_for")(words), *words]


def usage(first_word: str = "") -> str:
    """The text of `cloze --help`; with a first word such as predict only the commands that begin with it."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(first_word)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in shown.items()]
    return "\n".join(
        [
            "usage: cloze COMMAND [--config FILE.yaml] [--field value ...]",
            "       cloze predict MODEL TEXT ...   (the operation that the model's head is for)",
            "       cloze --version",
            "",
            "commands:",
            *lines,
            "",
            "`cloze COMMAND --help` explains what a command needs, `--help all` every field, each with its unit and",
            "legal values; `--print_config` prints the resolved configuration.",
        ]
    )


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or two, and the remaining arguments.

    Raises:
        UserError: there is no such command.
    """
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in COMMANDS:
            return name, arguments[length:]
    word = arguments[0]
    two = " ".join(arguments[:2])
    if operations := [name.removeprefix(f"{word} ") for name in COMMANDS if name.startswith(f"{word} ")]:
        close = difflib.get_close_matches(" ".join(arguments[1:2]), operations, 1)
        raise UserError(
            f"cloze {word}: found operation {' '.join(arguments[1:2])!r}, expected one of "
            f"{', '.join(operations)}" + (f"; did you mean {word} {close[0]}?" if close else "")
        )
    near = [*difflib.get_close_matches(two, COMMANDS, 1), *difflib.get_close_matches(word, COMMANDS, 1)]
    raise UserError(
        f"cloze: found command {word!r}, expected one of {', '.join(COMMANDS)}"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _said_of_loss(error: RuntimeError) -> str | None:
    """The message for an error caused by the end of other processes, which print the reason; else None."""
    distributed = sys.modules.get("cloze.launch.system.distributed")  # not imported for this, and torch with it
    if distributed is None or not distributed.lost_others(error):
        return None
    reason = str(error).strip().splitlines()[0]
    return (
        f"rank {read_environment().rank}: found other processes gone, expected them in a collective ({reason}); "
        "see the message of the process that ended first"
    )


def _waits(said: bool) -> bool:
    """Whether this rank waits before it exits, since launchers end all ranks when one exits.

    Before the process group exists all ranks usually have the same error: rank 0 prints it, and the launcher ends the
    others before they do. Later each rank prints its own error, and none exits before the others have printed theirs.
    """
    # Not imported for this, and torch with it.
    distributed = sys.modules.get("cloze.launch.system.distributed")
    met = distributed is not None and distributed.have_met()
    try:
        environment = read_environment()
    except UserError:  # the environment may be what is wrong
        return False
    if said:
        return met and environment.world_size > 1
    return not met and not environment.is_main


def _reader_is_gone(output: Any) -> bool:
    """Whether the reader of a pipe is gone, as with `| head`."""
    ends = select.poll()
    try:
        ends.register(output, 0)  # errors are printed without being polled
    except (TypeError, ValueError):  # no file of the system's: a notebook's, or none at all
        return False
    return bool(ends.poll(0))


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


def _is_utf8(word: str) -> bool:
    """Words of a command line may be any bytes: those that aren't UTF-8 stand in them as surrogates."""
    try:
        word.encode()
        return True
    except UnicodeEncodeError:
        return False


def _say(is_main: bool, line: str) -> None:
    if is_main:
        print(f"{line}\n", end="", flush=True)


def _run(arguments: list[str]) -> int:
    group = arguments[0] if arguments and any(name.startswith(f"{arguments[0]} ") for name in COMMANDS) else ""
    if arguments[bool(group) :][:1] in ([], ["-h"], ["--help"]):
        print(usage(group))
        return 0
    if arguments[0] == "help":  # as others have it
        return _run([*arguments[1:], "--help"])
    if arguments[0] in ("--version", "-V"):
        print(f"cloze {__version__}")
        return 0
    for word in arguments:
        if not _is_utf8(word):
            raise UserError(
                f"cloze: found the word '{os.fsencode(word).decode(errors='backslashreplace')}', expected "
                "UTF-8, as configurations and manifests are written; rename the file or the folder"
            )
    name, rest = split_command(_with_operation(arguments))
    topic = _help_topic(rest)
    if topic is not None:
        print(explain(name, topic))
        return 0
    config = parse(name, rest)  # before the command's module, which may import for seconds
    command = COMMANDS[name]
    if command.checks:
        _load(command.checks)(config)
    if command.trains and config.processes != 1 and _starts_ranks(config.processes):
        return run_ranks(name, rest, config.processes)
    if not command.prepares:
        return _load(command.function)(config) or 0
    is_main = read_environment().is_main
    if command.trains:
        _say(is_main, f"cloze {name}: loading PyTorch and DeepSpeed")
    elif is_main and sys.stderr.isatty():
        print(f"cloze {name}: loading PyTorch", file=sys.stderr, flush=True)
    with Starting(partial(_say, is_main)) if command.trains else nullcontext():
        environment = prepare_process()
        with fewer_imports():
            function = _load(command.function)
        return function(config, environment) or 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 complete, 1 other processes of the run are gone, 2 an error that the user can fix,
    75 stopped early with a checkpoint, 130 stopped by Ctrl-C, 141 the reader of the output has closed it.
    """
    end_with_parent()
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
        if not _reader_is_gone(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        return 128 + signal.SIGPIPE  # the shell's convention for what dies of it
    except KeyboardInterrupt:  # of a command that has nothing to save; those that train have a StopRequest
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except (UserError, ModelError, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in _USERS_TO_FIX or error.filename is None:
                raise
            line = describe(error, Path(str(error.filename)))
        else:
            line = str(error)
        if _waits(said=False):
            time.sleep(SAID_SECONDS)
        # In one piece: other processes write to the same terminal, and print() may write the line's end by itself.
        print(f"error: {line}\n", end="", file=sys.stderr, flush=True)
        if _waits(said=True):
            time.sleep(SAID_SECONDS)
        return EXIT_USER_ERROR
    except RuntimeError as error:
        said = _said_of_loss(error)
        if said is None:
            raise
        time.sleep(SAID_SECONDS)  # launchers usually end this process first: one line is enough
        print(f"error: {said}\n", end="", file=sys.stderr, flush=True)
        return EXIT_FAILURE
