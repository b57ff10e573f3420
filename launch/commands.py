"""The table of commands, each a function of one configuration dataclass; their parsers, help and names."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cloze.launch import parsing
from cloze.launch.config import CompletionConfig
from cloze.launch.parsing import Page
from cloze.launch.predict.table import OPERATIONS, OperationEntry
from cloze.pipeline.errors import UserError, did_you_mean
from cloze.pipeline.references import load


@dataclass(frozen=True, kw_only=True)
class Command(Page):
    """A row of the table of commands; what it names is imported when the command is run."""

    function: str
    """`module:name`, called with the configuration; with the environment too, if it prepares."""
    prepares: bool = False
    """Whether the process is prepared, as DeepSpeed wants it, before the function's module is imported."""
    trains: bool = False
    """Whether the configuration's `processes` are started, each with the same command."""
    resumes: Callable[[Any], bool] | None = None
    """Whether a command of this configuration, which does not train itself, is continued by the same command: a stop
    signal before its work then ends it as it ends a training."""
    completes: str = ""
    """`module:name` of what completes the configuration by where its values come from."""
    checks: str = ""
    """`module:name`, called with the configuration before torch is imported, which takes seconds: raises UserError for
    files and folders that are missing."""


def _prediction(name: str, entry: OperationEntry) -> Command:
    return Command(
        f"predict {name}",
        entry.about,
        entry.command,
        function="cloze.launch.predict.command:predict",
        words="text",
        checks="cloze.launch.predict.precheck:check_inputs",
        main=("text", *entry.main, "file", "text_columns", "output"),
        examples=entry.examples,
    )


_FORMATS = ("source.format", "cloze.pipeline.formats:CHOICES")
_OBJECTIVES = ("objective", "cloze.launch.pretrain.objectives.table:OBJECTIVES")
_RUN_FIELDS = (
    "train.max_steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.learning_rate",
    "train.precision",
)


_TABLE = (
    Command(
        "vocab",
        "train a vocabulary on raw text, or extend one",
        "cloze.pipeline.config:PrepareConfig",
        function="cloze.launch.tools.data:vocab",
        configs="prepare",
        listed=(_FORMATS,),
        main=(
            "input",
            "output",
            "vocab_size",
            "vocabulary.model",
            "vocabulary.lowercase",
            "source.format",
            "source.text_field",
        ),
        examples=(
            "cloze vocab --config books --input 'books-*.jsonl.gz' --output runs/vocab --vocab_size 8192",
            "cloze vocab --extend runs/small-hf --input texts/ --vocabulary.add 2000 --output runs/vocab-2",
        ),
    ),
    Command(
        "prepare",
        "convert raw text to shards",
        "cloze.pipeline.config:PrepareConfig",
        function="cloze.launch.tools.data:prepare",
        configs="prepare",
        listed=(_FORMATS,),
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
    Command(
        "inspect",
        "show the contents of shards",
        "cloze.pipeline.config:InspectConfig",
        function="cloze.launch.tools.data:inspect",
        main=("split", "samples"),
        examples=("cloze inspect runs/shards --samples 2",),
    ),
    Command(
        "verify",
        "check every shard against its hash",
        "cloze.pipeline.config:VerifyConfig",
        function="cloze.launch.tools.data:verify",
        examples=("cloze verify runs/shards",),
    ),
    Command(
        "pretrain",
        "train a model on shards",
        "cloze.launch.config:PretrainConfig",
        function="cloze.launch.pretrain.command:pretrain",
        configs="pretrain",
        completes="cloze.launch.pretrain.shapes:complete",
        prepares=True,
        listed=(_OBJECTIVES,),
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
    Command(
        "sweep",
        "train a model on shards with every combination of some settings",
        "cloze.launch.config:SweepConfig",
        function="cloze.launch.pretrain.sweep:sweep",
        configs="pretrain",
        completes="cloze.launch.pretrain.shapes:complete",
        prepares=True,
        resumes=lambda config: True,
        listed=(_OBJECTIVES,),
        main=("grid", "run", "model", "processes", *_RUN_FIELDS),
        examples=(
            "cloze sweep --config small --data runs/shards --output runs/rates --grid learning_rate=1e-3,2e-3 seed=1,2",
            "cloze sweep --config small --data runs/shards --output runs/rates --grid learning_rate=1e-3,2e-3 --run 0",
        ),
    ),
    Command(
        "deepspeed-config",
        "print the DeepSpeed configuration of a run",
        "cloze.launch.config:DeepSpeedConfig",
        function="cloze.launch.pretrain.command:print_deepspeed_config",
        configs="pretrain",
        completes="cloze.launch.pretrain.shapes:complete",
        prepares=True,
        listed=(_OBJECTIVES,),
        main=("processes", *_RUN_FIELDS, "zero.stage"),
        examples=("cloze deepspeed-config --config bert-base-phase1 --processes 8",),
    ),
    Command(
        "plan",
        "estimate whether a run fits, how long it takes, what it costs",
        "cloze.launch.tools.planning.config:PlanConfig",
        function="cloze.launch.tools.plan:plan",
        configs="pretrain",
        completes="cloze.launch.pretrain.shapes:complete",
        prepares=True,
        checks="cloze.launch.pretrain.precheck:check_folders",
        listed=(_OBJECTIVES, ("device", "cloze.launch.system.data_sheets:NAMES")),
        main=("device", "gpus", "data", "model", *_RUN_FIELDS, "zero.stage", "price_per_hour"),
        examples=("cloze plan --config bert-base-phase1 --device a100-80gb --gpus 8 --price_per_hour 2",),
    ),
    Command(
        "runs",
        "list the runs in a folder and their state",
        "cloze.launch.config:RunsConfig",
        function="cloze.launch.tools.status:list_runs",
        main=("folder", "json"),
        examples=("cloze runs runs",),
    ),
    Command(
        "status",
        "show the state of a run, or follow it",
        "cloze.launch.config:StatusConfig",
        function="cloze.launch.tools.status:show_status",
        main=("follow",),
        examples=("cloze status runs/small --follow",),
    ),
    Command(
        "export",
        "write a Hugging Face folder",
        "cloze.launch.config:ExportConfig",
        function="cloze.launch.tools.export:export",
        main=("output", "step", "dtype", "onnx"),
        examples=(
            "cloze export runs/small --output runs/small-hf",
            "cloze export runs/small --step best --dtype bf16 --output small-bf16",
        ),
    ),
    Command(
        "finetune",
        "train a model for a task",
        "cloze.launch.config:FinetuneConfig",
        function="cloze.launch.finetune.command:finetune",
        words="task",
        short=(("--train", "--train_file"),),
        configs="finetune",
        completes="cloze.launch.training.shortening:shorten",
        prepares=True,
        trains=True,
        checks="cloze.launch.finetune.precheck:check_inputs",
        listed=(("task", "cloze.launch.finetune.tasks:TASKS"),),
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
    *(_prediction(name, entry) for name, entry in OPERATIONS.items() if entry.command),
    Command(
        "evaluate",
        "evaluate a model on a suite",
        "cloze.launch.evaluate.config:EvaluateConfig",
        function="cloze.launch.evaluate.command:evaluate",
        checks="cloze.launch.evaluate.precheck:check_inputs",
        resumes=lambda config: config.suite == "glue",
        main=("suite", "data", "step", "every_checkpoint", "json", "every_nth"),
        examples=(
            "cloze evaluate runs/small --suite blimp --data blimp --every_nth 10",
            "cloze evaluate runs/small --suite lines --data held-out.txt",
        ),
    ),
    Command(
        "serve",
        "serve predictions over HTTP, with a page to try them",
        "cloze.launch.serve.config:ServeConfig",
        function="cloze.launch.serve.command:serve",
        checks="cloze.launch.pretrained.precheck:check_used",
        main=("host", "port", "api_key_file", "no_auth"),
        examples=("cloze serve runs/own --port 8000", "cloze serve runs/own --host 0.0.0.0 --api_key_file keys.txt"),
    ),
    Command(
        "tokenize",
        "show a model's inputs for texts",
        "cloze.launch.predict.tokenize:TokenizeConfig",
        function="cloze.launch.predict.tokenize:tokenize",
        words="text",
        main=("text", "pair", "file"),
        checks="cloze.launch.predict.precheck:check_tokenizing",
        examples=(
            "cloze tokenize runs/small 'The capital of [MASK] is Paris.'",
            "cloze tokenize runs/vocab 'a text' 'another text'",
        ),
    ),
    Command(
        "doctor",
        "check the environment, on all machines",
        "cloze.launch.config:DoctorConfig",
        function="cloze.launch.tools.doctor:doctor",
        main=("data", "output"),
        examples=("cloze doctor", "torchrun --nproc-per-node 2 -m cloze doctor --output runs"),
    ),
    Command(
        "quickstart",
        "run the whole pipeline in minutes, on text included in Python",
        "cloze.launch.config:QuickstartConfig",
        function="cloze.launch.tools.quickstart:quickstart",
        main=("output", "processes"),
        examples=("cloze quickstart",),
    ),
    Command(
        "completion",
        "print the shell completion of commands, fields and values",
        "cloze.launch.config:CompletionConfig",
        function="cloze.launch.commands:print_completion",
        examples=(
            "cloze completion bash > ~/.local/share/bash-completion/completions/cloze",
            "cloze completion fish > ~/.config/fish/completions/cloze.fish",
        ),
    ),
)
COMMANDS = {command.name: command for command in _TABLE}


def parse(name: str, arguments: list[str]) -> Any:
    """A command's configuration from its arguments. Raises UserError as `parsing.parse`."""
    command = COMMANDS[name]
    return parsing.parse(
        name,
        load(command.config),
        arguments,
        words=command.words,
        short=command.short,
        configs=command.configs,
        complete=load(command.completes) if command.completes else None,
    )


def explain(name: str, topic: str = "") -> str:
    """The help of a command: what matters; or of a topic: all, a section, a field. Raises UserError: there is none."""
    return parsing.explain_command(COMMANDS[name], topic)


def print_completion(config: CompletionConfig) -> None:
    """Print the script with which a shell completes all commands."""
    print(parsing.completion_script(config.shell, list(COMMANDS.values())))


def help_topic(arguments: list[str]) -> str | None:
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


def with_operation(arguments: list[str]) -> list[str]:
    """Insert the operation of the model's head into `predict MODEL ...`; other commands are returned unchanged."""
    words = arguments[1:]
    if arguments[0] != "predict" or " ".join(arguments[:2]) in COMMANDS or not words:
        return arguments
    operations = [name.split()[1] for name in COMMANDS if name.startswith("predict ")]
    if difflib.get_close_matches(words[0], operations, 1) and not os.path.exists(words[0]):
        return arguments  # a slip: it is answered with the nearest operation
    load("cloze.launch.predict.precheck:check_words")(words)  # before what imports torch
    return ["predict", load("cloze.launch.predict.default_operation:operation_for")(words), *words]


def usage(first_word: str = "") -> str:
    """The text of `cloze --help`; with a first word such as predict only the commands that begin with it."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(first_word)}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in shown.items()]
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
    near = did_you_mean(two, COMMANDS) or did_you_mean(word, COMMANDS)
    raise UserError(f"cloze: found command {word!r}, expected one of {', '.join(COMMANDS)}{near}")
