"""Output for people: messages, tables, progress; on rank 0 only."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

# What says the same as another value, or is one of many: perplexities, averages, columns, parts of SQuAD's questions.
_LEFT_OUT = r"loss$|\w*perplexity$|ema_|accuracy_(?!mean)|recall_at_5$|exact$|total$|HasAns_|NoAns_"
# Scalars of a progress line in their order: pattern of the name in the metrics, label of what the pattern's group
# matches, format. Terms of objectives and metrics of tasks follow from their names.
_COLUMNS = tuple(
    (re.compile(pattern), label, form)
    for pattern, label, form in (
        (r"train/loss", "loss", "{:.4f}"),
        (r"train/(\w+)_loss", "{}", "{:.4f}"),
        (r"train/learning_rate", "rate", "{:.2e}"),
        (r"train/gradient_norm", "norm", "{:.2f}"),
        (r"train/loss_spike", "SPIKE", "{:.2f} x the median"),
        (r"speed/tokens_per_second", "tokens/s", "{:,.0f}"),
        (r"speed/mfu", "MFU", "{:.1%}"),
        (r"validation/loss", "validation loss", "{:.4f}"),
        (rf"validation/(?!{_LEFT_OUT})(\w+?)(?:_loss)?", "{}", "{:.4f}"),
    )
)
_SHORT = {"next_sentence": "nsp", "next_sentence_accuracy": "nsp accuracy"}


def _columns(scalars: Mapping[str, float | None]) -> list[str]:
    """The values that a progress line shows, each with its label."""
    parts = []
    for pattern, label, form in _COLUMNS:
        for name, value in scalars.items():
            if value is not None and (match := pattern.fullmatch(name)):
                words = [_SHORT.get(part, part.replace("_", " ")) for part in match.groups()]
                parts.append(f"{label.format(*words)} {form.format(value)}")
    return parts


# Scalars of which there is one for each source of a mixture, or validation set; so many of them have a place in a line.
_BY_SOURCE = ("train/mlm_loss/", "validation/loss/")
_MOST_SOURCES = 6


def has_progress(scalars: Mapping[str, float | None]) -> bool:
    """Whether a progress line would show any of these values."""
    return bool(_columns(scalars))


def figure(value: float) -> str:
    """Format a result for people; files hold all digits."""
    return f"{value:.4f}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


# Seconds between two lines on what a long command does, where the output is no terminal; `prepare`'s bars have as many.
_LINE_SECONDS = 30.0


@contextmanager
def counting(unit: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each piece of work; a terminal on standard error shows the count."""
    with _shown(TextColumn("{task.completed:,.0f} " + unit)) as (shown, task):
        yield lambda: shown.advance(task)


@contextmanager
def doing() -> Iterator[Callable[[Callable[[], str]], None]]:
    """Yield a function to call often, with what makes a line that says what is done now. A terminal on standard error
    shows the newest; otherwise it gets the first one, and one every half minute.
    """
    terminal, last = sys.stderr.isatty(), -math.inf
    with _shown(TextColumn("{task.description}", markup=False)) as (shown, task):

        def tell(line: Callable[[], str]) -> None:
            nonlocal last
            if terminal:
                shown.update(task, description=line())
            elif time.monotonic() - last >= _LINE_SECONDS:
                print(f"{line()}\n", end="", file=sys.stderr, flush=True)
                last = time.monotonic()

        yield tell


@contextmanager
def _shown(column: TextColumn) -> Iterator[tuple[Progress, TaskID]]:
    """A line of progress on standard error, with the time elapsed, if that is a terminal; it does not stay."""
    terminal = sys.stderr.isatty()
    console = RichConsole(file=sys.stderr)
    with Progress(
        column,
        TimeElapsedColumn(),
        console=console,
        disable=not terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a file gets its lines
    ) as shown:
        yield shown, shown.add_task("", total=None)


class Output(RichConsole):
    """Standard output, with tables and colours."""

    def __init__(self) -> None:
        # when the output is a file, rich would guess a width
        super().__init__(width=None if sys.stdout.isatty() else 140, highlight=False)

    def on_broken_pipe(self) -> None:
        raise  # handled in launch/cli.py; rich would end the process


class Console:
    """Tables, lines of progress and warnings of one process; silent on every rank but 0."""

    def __init__(self, is_main: bool = True) -> None:
        self.is_main = is_main
        self._began: tuple[float, int] | None = None  # when, and at which step, the first line was printed
        self._rich = Output()

    def say(self, line: str) -> None:
        if self.is_main:
            print(f"{line}\n", end="", flush=True)  # one write call: other processes write to the same terminal

    def warn(self, line: str) -> None:
        if self.is_main:
            print(f"warning: {line}\n", end="", file=sys.stderr, flush=True)

    def facts(self, title: str, rows: list[tuple[str, str]]) -> None:
        """A table of names and values."""
        if self.is_main:
            table = Table(title=title, show_header=False, title_justify="left")
            for row in rows:
                table.add_row(*row)
            self._rich.print(table)

    def table(self, title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """A table with a line of column names."""
        if self.is_main:
            table = Table(*header, title=title, title_justify="left", show_lines=True)
            for row in rows:
                table.add_row(*map(escape, row))
            self._rich.print(table)

    def progress(
        self,
        step: int,
        max_steps: int | None,
        scalars: Mapping[str, float | None],
        seconds_left: float | None = None,
        *,
        estimate: bool = True,
    ) -> None:
        """Print one progress line: step, scalars, time left.

        Args:
            max_steps: steps of the run; None: its end is not a number of steps.
            scalars: values by name; None stands for a value that was not finite.
            seconds_left: None: estimated from earlier lines if `estimate` is true.
        """
        parts = _columns(scalars)
        scalars = {name: value for name, value in scalars.items() if value is not None}
        sources = [(name.rsplit("/", 1)[1], value) for name, value in scalars.items() if name.startswith(_BY_SOURCE)]
        parts += [f"{name} {value:.4f}" for name, value in sources[:_MOST_SOURCES]]
        now = time.monotonic()
        if seconds_left is not None:
            parts.append(f"{clock(max(0.0, seconds_left))} left")
        elif not estimate or max_steps is None:
            pass
        elif self._began is None:
            self._began = (now, step)
        elif step > self._began[1]:
            left = (now - self._began[0]) / (step - self._began[1]) * (max_steps - step)
            parts.append(f"{clock(left)} left")
        self.say(f"step {step}{'' if max_steps is None else f'/{max_steps}'}  " + "  ".join(parts))
