"""`cloze quickstart`: all commands from text to predictions, on text that every CPython ships."""

import json
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from cloze.launch.config import QuickstartConfig
from cloze.launch.run.metrics import tensorboard_command
from cloze.launch.run.metrics_file import newest_metrics
from cloze.launch.run.status_file import read_status
from cloze.launch.system.console import Console, clock
from cloze.launch.system.environment.gpus import device_type
from cloze.launch.system.local_launcher import Children, shell_status
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import publish_text, readable_errors
from cloze.pipeline.stores.places import to_local

# For 2 MB of text: rare words are split into pieces, and samples are short. Each text is in five pairs with other
# partners, since a model that sees the same pairs again and again learns them by heart.
VOCAB_SIZE, MAX_LENGTH, MASK_SETS, PAIR_SETS = 2048, 64, 10, 5
MAX_STEPS = 1200
BLANKS = (
    "This method is called when the [MASK] is about to be destroyed.",
    "Return the [MASK] of the object.",
    'The "for" [MASK] is used to iterate over the elements of a sequence.',
)


# Takes a tenth of the time of parsing. A docstring begins with a capital letter; a match that does not may begin at the
# quotes that end one.
_DOCSTRING = re.compile(r'^\s*[rR]?"""([A-Z].*?)"""', re.MULTILINE | re.DOTALL)
# Folders of the library without documentation of it.
_UNDOCUMENTED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages"}


def documentation() -> Iterator[tuple[str, str]]:
    """This Python's own documentation: the topics of its language reference and the docstrings of its library.

    Yields:
        (name, text) of each topic and of each module with docstrings, without their examples of code.
    """
    from pydoc_data.topics import topics

    yield from sorted(topics.items())
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not _UNDOCUMENTED & set(name.parts) and (text := _docstrings(path)):
            yield name.as_posix(), text


def _docstrings(path: Path) -> str:
    source = path.read_text(encoding="utf-8", errors="replace")
    paragraphs = (part for found in _DOCSTRING.findall(source) for part in found.split("\n\n"))
    return "\n\n".join(part.strip() for part in paragraphs if ">>>" not in part)


class _Stopped(Exception):
    """A signal has stopped the quickstart.

    Args:
        status: exit status, that of the active step.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Quickstart:
    """Runs one step after another; a step whose result exists is skipped, with a message.

    Args:
        children: starts the commands; they end with this process.
    """

    def __init__(self, config: QuickstartConfig, children: Children) -> None:
        self.config = config
        self.children = children
        self.output = to_local(config.output, "output")
        self.console = Console()
        self.began = time.monotonic()

    def step(self, title: str, done: Path | None, *command: str) -> None:
        """Print and run a command; UserError if it fails, _Stopped if it was stopped."""
        self.console.say(f"\n== {title}" + (" (done before)" if done and done.exists() else ""))
        if done and done.exists():
            return
        status = shell_status(self._start(command).wait())
        self._check_signal(status)
        if status:
            raise UserError(f"quickstart: {title} ended with status {status}, expected 0; its message stands above")

    def _check_signal(self, status: int) -> None:
        """Raise _Stopped if a signal came: with the status of the command that it ended, else with its own."""
        if self.children.heard is not None:
            raise _Stopped(status or shell_status(-self.children.heard))

    def _start(self, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Print a command and start it by the `cloze` of this environment, whether it is activated or not."""
        self.console.say("$ " + shlex.join(command))
        self._check_signal(0)
        return self.children.start([sys.executable, "-m", *command])

    def corpus(self) -> str:
        """Write the documentation as JSON lines, a document per topic or module."""
        path = self.output / "corpus.jsonl"
        if not path.exists():
            publish_text(path, "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in documentation()))
        self.console.say(f"== text: {path} ({path.stat().st_size:,} bytes, the documentation of this Python)")
        return str(path)

    def pretrain(self, data: str, run: Path) -> None:
        """Train half of the steps, stop by a signal as a scheduler would, and continue with the same command."""
        command = (
            "cloze",
            "pretrain",
            "--config",
            "tiny",
            "--processes",
            str(self.processes()),
            "--data",
            data,
            "--output",
            str(run),
            # A few minutes are too short to learn much: an optimizer that needs fewer steps, no dropout, and a learning
            # rate for a tiny model.
            "--optimizer.name",
            "muon",
            "--model.hidden_dropout_prob",
            "0",
            "--model.attention_probs_dropout_prob",
            "0",
            "--train.learning_rate",
            "5e-3",
            "--train.max_steps",
            str(MAX_STEPS),
            "--schedule.warmup_steps",
            "100",
            "--train.log_every_steps",
            "100",
            "--evaluation.every_steps",
            "300",
            "--checkpoint.every_steps",
            "300",
        )
        state = read_status(run).get("state")
        if state == "complete":
            self.console.say("\n== pretraining (done before)")
            return
        if state is None:
            self.console.say("\n== pretraining, to be stopped half-way")
            self._run_until(command, run, MAX_STEPS // 2)
        self.step("the same command again: pretraining resumes", None, *command)

    def _run_until(self, command: tuple[str, ...], run: Path, step: int) -> None:
        """Start a command and send it SIGTERM once the run has logged `step`."""
        process = self._start(command)
        while process.poll() is None:
            time.sleep(0.2)
            line = newest_metrics(run)
            if self.children.heard is None and line and line["step"] >= step:
                self.console.say(f"-- SIGTERM at step {line['step']}")
                process.send_signal(signal.SIGTERM)
                process.wait()
        self._check_signal(shell_status(process.returncode))
        if (state := read_status(run).get("state")) != "requeue":
            raise UserError(
                f"quickstart: pretraining ended as {state!r}, expected `requeue` after the "
                "signal; see its messages above"
            )

    def processes(self) -> int:
        """The number of processes in the configuration, at most the number of GPUs if there are any."""
        if device_type() == "cpu":
            return self.config.processes
        import torch

        if (num_gpus := torch.cuda.device_count()) < self.config.processes:
            self.console.say(f"-- {num_gpus} of {self.config.processes} processes: one for each GPU")
        return min(num_gpus, self.config.processes)

    def run(self) -> int:
        with readable_errors(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        corpus = self.corpus()
        vocabulary, shards, run, exported = (str(self.output / name) for name in ("vocab", "shards", "tiny", "tiny-hf"))
        data = ("--config", "books", "--input", corpus)
        sizes = (
            "--max_length",
            str(MAX_LENGTH),
            "--mask_sets",
            str(MASK_SETS),
            "--samples.pair_sets",
            str(PAIR_SETS),
            "--workers",
            "2",
            "--split.validation",
            "0.05",
        )
        self.step(
            "vocabulary",
            Path(vocabulary, "tokenizer.json"),
            "cloze",
            "vocab",
            *data,
            "--output",
            vocabulary,
            "--vocab_size",
            str(VOCAB_SIZE),
        )
        self.step(
            "shards",
            Path(shards, "manifest.json"),
            "cloze",
            "prepare",
            *data,
            "--tokenizer",
            vocabulary,
            "--output",
            shards,
            *sizes,
        )
        self.pretrain(shards, Path(run))
        self.step("export", Path(exported, "config.json"), "cloze", "export", run, "--output", exported)
        self.step("blanks", None, "cloze", "predict", "fill-mask", exported, *BLANKS, "--format", "table")
        self.console.say(
            f"\nAll done in {clock(time.monotonic() - self.began)}.\n"
            f"  the run:     {run}  (configuration, checkpoints, metrics.jsonl, TensorBoard events)\n"
            f"  the model:   {exported}  (AutoModelForPreTraining.from_pretrained loads it)\n"
            f"  its curves:  {tensorboard_command(Path(run))}\n"
            f"  more of it:  the command of the pretraining, with --train.max_steps {5 * MAX_STEPS} "
            "--checkpoint.accept_changes true"
        )
        return 0


def quickstart(config: QuickstartConfig) -> int:
    """Run the whole chain.

    Returns:
        The exit status, after a signal that of the stopped step.
    """
    with Children() as children:
        try:
            return Quickstart(config, children).run()
        except _Stopped as stopped:
            return stopped.status
