"""Output for people: messages, tables, progress; on rank 0 only."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cloze.launch.system.streams import Aside, drop, print_aside, print_line
from cloze.pipeline.stores.temporary_folders import in_users_terms

_CENTURY = 100 * 365 * 86400.0  # seconds


def figure(value: float) -> str:
    """Format a result for people; files hold all digits."""
    return f"{value:.4f}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    if not abs(seconds) < _CENTURY:  # as of a rate that is hardly above 0
        return "over 100 years"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, a line for each row."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


# Seconds between two lines on what a long command does, where the output is no terminal; `prepare`'s bars have as many.
_LINE_SECONDS = 30.0
# Called with what makes a line that says what is done now.
Tell = Callable[[Callable[[], str]], None]


@contextmanager
def counting(unit: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each piece of work; a terminal on standard error shows the count."""
    with _shown(TextColumn("{task.completed:,.0f} " + unit)) as (shown, task):
        yield lambda: shown.advance(task)


@contextmanager
def doing() -> Iterator[Tell]:
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
                print_aside(line())
                last = time.monotonic()

        yield tell


@contextmanager
def _shown(column: TextColumn) -> Iterator[tuple[Progress, TaskID]]:
    """A line of progress on standard error, with the time elapsed, if that is a terminal; it does not stay."""
    terminal = sys.stderr.isatty()
    with Progress(
        column,
        TimeElapsedColumn(),
        console=aside_console(),
        disable=not terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # a file gets its lines
    ) as shown:
        yield shown, shown.add_task("", total=None)


def aside_console() -> RichConsole:
    """Standard error for bars and lines, which goes on without a reader."""
    return RichConsole(file=cast(TextIO, Aside()), highlight=False)  # it uses no more than an Aside has


class Output(RichConsole):
    """Standard output, with tables and colours."""

    def __init__(self) -> None:
        # when the output is a file, rich would guess a width
        super().__init__(width=None if sys.stdout.isatty() else 140, highlight=False)

    def on_broken_pipe(self) -> None:
        raise  # handled in launch/system/exit_status.py; rich would end the process


class Console:
    """Lines, tables and warnings of one process; silent on every rank but 0."""

    def __init__(self, is_main: bool = True) -> None:
        self.is_main = is_main
        self._rich = Output()
        self._reader_lost: Callable[[], None] | None = None

    def on_lost_reader(self, call: Callable[[], None]) -> None:
        """Call `call` when the reader of the output is gone (`| tee log`, which the same Ctrl-C ends), and drop what is
        printed from then on. Without this it ends the command.
        """
        self._reader_lost = call

    def say(self, line: str) -> None:
        if self.is_main:
            with self._printing():
                print_line(in_users_terms(line))

    def warn(self, line: str) -> None:
        if self.is_main:
            if not print_aside(f"warning: {in_users_terms(line)}") and self._reader_lost is not None:
                self._reader_lost()

    def facts(self, title: str, rows: Sequence[tuple[str, ...]]) -> None:
        """A table of names and values."""
        self._show(Table(title=escape(title), show_header=False, title_justify="left"), rows)

    def table(self, title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        """A table with a line of column names."""
        self._show(Table(*header, title=escape(title), title_justify="left", show_lines=True), rows)

    def _show(self, table: Table, rows: Iterable[tuple[str, ...]]) -> None:
        if self.is_main:
            for row in rows:
                table.add_row(*map(escape, row))  # a path may have brackets, which rich would read as a style
            with self._printing():
                self._rich.print(table)

    @contextmanager
    def _printing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if self._reader_lost is None:
                raise
            drop(sys.stdout)
            self._reader_lost()
