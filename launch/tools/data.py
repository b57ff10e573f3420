"""The commands of data: `vocab`, `prepare`, `inspect`, `verify`."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from cloze.launch.run.tensorboard_files import board_in
from cloze.launch.system.console import Console, Output, aside_console, markdown
from cloze.pipeline.config import InspectConfig, PrepareConfig, VerifyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.extending import ADDED, Extension
from cloze.pipeline.jobs.inspecting import DecodedSample, Inspection, facts
from cloze.pipeline.jobs.inspecting import inspect as inspect_data
from cloze.pipeline.jobs.prepare import prepare as prepare_data
from cloze.pipeline.jobs.verifying import verify as verify_data
from cloze.pipeline.jobs.vocabulary import extend_vocabulary, train_vocabulary
from cloze.pipeline.progress import Progress as Listener
from cloze.pipeline.shards.manifest import REPAIR

_SECONDS_A_LINE = 30  # seconds between lines if no progress bar can be drawn
_ADDED_SHOWN = 20
_STYLES = {"plain": "", "special": "dim", "masked": "bold green", "random": "bold red", "kept": "bold yellow"}


class Bars(Listener):
    """Progress on stderr: a bar for each stage on a terminal, else a line every half minute; and remarks."""

    def __init__(self) -> None:
        self._console = aside_console()
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._total = self._done = self._documents = self._tokens = 0
        self._began = self._told = 0.0
        self.stages: list[tuple[str, float, int, int]] = []

    def __enter__(self) -> Bars:
        if sys.stderr.isatty():
            self._bars = Progress(
                TextColumn("{task.description:12}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f}%"),
                TextColumn("{task.fields[rates]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._close_stage()
        if self._bars:
            self._bars.stop()

    def stage(self, name: str, total: int, unit: str) -> None:
        self._close_stage()
        self._name, self._total, self._done, self._documents, self._tokens = name, total, 0, 0, 0
        self._began = self._told = time.monotonic()
        if self._bars:
            self._task = self._bars.add_task(name, total=total, rates="")

    def advance(self, amount: int, documents: int, tokens: int) -> None:
        self._done += amount
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        rates = _rates(now - self._began, self._documents, self._tokens)
        if self._bars and self._task is not None:
            self._bars.update(self._task, advance=amount, rates=rates)
        elif now - self._told >= _SECONDS_A_LINE and self._done:
            self._told = now
            left = timedelta(seconds=round((now - self._began) * (self._total - self._done) / self._done))
            parts = [f"{self._name}: {self._done / self._total:.0%}", *filter(None, [rates]), f"{left} left"]
            self._console.print(", ".join(parts), markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)

    def _close_stage(self) -> None:
        if self._began:
            self.stages.append((self._name, time.monotonic() - self._began, self._documents, self._tokens))
            self._began = 0.0


def _rates(seconds: float, documents: int, tokens: int) -> str:
    counts = {"documents": documents, "tokens": tokens}
    return ", ".join(f"{count / max(seconds, 1e-3):,.0f} {name}/s" for name, count in counts.items() if count)


def vocab(config: PrepareConfig) -> None:
    """Train or extend a vocabulary and print its size and fingerprint, and what was added."""
    began = time.monotonic()
    with Bars() as bars:
        if config.extend:
            extension = extend_vocabulary(config, bars)
            tokenizer = extension.tokenizer
            _show_extension(extension, config)
        else:
            tokenizer = train_vocabulary(config, bars)
    specials = ", ".join(f"{name} {tokenizer.tokens.index(name)}" for name in tokenizer.names.values())
    print(
        f"{config.output}: {tokenizer.vocab_size:,} entries ({specials}) in {time.monotonic() - began:.1f} s, "
        f"fingerprint {tokenizer.fingerprint[:12]}"
    )


def _show_extension(extension: Extension, config: PrepareConfig) -> None:
    shown = extension.added[:_ADDED_SHOWN]
    Console().table(
        f"{len(extension.added):,} tokens added, the best {len(shown)}",
        ("token", "saved tokens", "count", "was cut into"),
        [(added.token, f"{added.saved:,}", f"{added.count:,}", " ".join(added.pieces)) for added in shown],
    )
    before, after = (tokens / extension.words for tokens in (extension.tokens_before, extension.tokens_after))
    print(
        f"tokens per word of the text, but for words that stay unknown: {before:.3f} before, {after:.3f} after; "
        f"all tokens: {config.output}/{ADDED}"
    )


def prepare(config: PrepareConfig) -> None:
    """Prepare a corpus and print its statistics."""
    began = time.monotonic()
    with Bars() as bars:
        manifest = prepare_data(config, bars)
    seconds = time.monotonic() - began
    tokens = manifest.counts["tokens"]
    stages = [
        (f"stage {name}", ", ".join(filter(None, [f"{took:.1f} s", _rates(took, *counts)])))
        for name, took, *counts in bars.stages
    ]
    in_all = "in all", f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    Console().facts(f"{config.output}: prepared", [*facts(manifest), *stages, in_all])


def inspect(config: InspectConfig) -> None:
    """Show a prepared folder: facts, lengths, samples with their masks in colour."""
    inspection = inspect_data(config)
    if inspection.manifest.remark:
        print(f"note: {inspection.manifest.remark}", file=sys.stderr)
    most = max((count for _, _, count in inspection.histogram), default=0) or 1
    bars = [
        (f"{low}-{high}", f"{count:,}", "█" * round(40 * count / most)) for low, high, count in inspection.histogram
    ]
    Console().facts(config.data, inspection.facts)
    Console().facts(f"lengths of {config.split} samples", bars)
    console = Output()
    for sample in inspection.samples:
        console.print(_sample_text(sample), soft_wrap=True)
    if inspection.samples:
        green, red, yellow = (
            [f" ({name})" for name in ("green", "red", "yellow")]
            if console.color_system and not console.no_color
            else [""] * 3
        )
        console.print(
            f"in braces the token to predict: behind the mask token{green}, behind a random token{red}, or behind "
            f"itself, where it is kept{yellow}"
        )
    if config.tensorboard:
        _write_tensorboard(inspection, config.split, Path(config.tensorboard))
        print(f"written for TensorBoard: tensorboard --logdir {config.tensorboard}")


def verify(config: VerifyConfig) -> None:
    """Hash all files again.

    Raises:
        UserError: naming the damaged ones.
    """
    with Bars() as bars:
        checked, damaged = verify_data(config, bars)
    for line in damaged:
        print(f"damaged: {line}")
    if damaged:
        raise UserError(f"{config.data}: found {len(damaged)} of {checked} parts damaged, expected none; {REPAIR}")
    print(f"{config.data}: {checked} parts checked, all as they were written")


def _write_tensorboard(inspection: Inspection, split: str, folder: Path) -> None:
    lengths = np.array(inspection.manifest.splits[split].length_histogram)
    sizes = np.arange(len(lengths))
    with board_in(folder) as writer:
        if lengths.any():
            writer.add_histogram_raw(
                f"data/{split}_lengths",
                min=float(np.flatnonzero(lengths).min()),
                max=float(np.flatnonzero(lengths).max()),
                num=int(lengths.sum()),
                sum=float((sizes * lengths).sum()),
                sum_squares=float((sizes**2 * lengths).sum()),
                bucket_limits=(sizes + 0.5).tolist(),
                bucket_counts=lengths.tolist(),
            )
        writer.add_text("data/facts", markdown(("", ""), inspection.facts))
        for number, sample in enumerate(inspection.samples):
            pieces = [p.text if p.original is None else f"**{p.text}**{{{p.original}}}" for p in sample.pieces]
            writer.add_text("data/samples", f"sample {sample.index}\n\n    {' '.join(pieces)}", number)


def _sample_text(sample: DecodedSample) -> Text:
    label = f", B {sample.label}" if sample.label else ""
    text = Text.assemble((f"sample {sample.index}", "bold"), f" (document {sample.document:016x}{label})\n")
    for number, piece in enumerate(sample.pieces):
        shown = piece.text if piece.original is None else f"{piece.text}{{{piece.original}}}"
        text.append(" " if number else "").append(shown, _STYLES[piece.kind])
    return text.append("\n")
