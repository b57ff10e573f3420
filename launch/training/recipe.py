"""What one kind of training (pretraining, fine-tuning) brings to `train` of start.py."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import EmaConfig, RunConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.run import runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system.devices import SLOW_BF16, bf16_slowdown
from cloze.launch.training.callbacks import Callback
from cloze.launch.training.evaluation import Measure
from cloze.launch.training.loop import Loop
from cloze.launch.training.objective import SourceSums, TrainingObjective
from cloze.launch.training.process import Process
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.loading.batches import RankBatch


class Recipe(ABC):
    """Inputs of a run, read and checked before anything is written; then its parts, each method called once, in this
    order, in every process.
    """

    config: RunConfig
    """Completed from the inputs; `choose_by_device` completes it further."""
    facts: runs.Facts
    """Hashes of the inputs, which must be the same at a resume."""
    objective: TrainingObjective
    sources: SourceSums | None = None
    """What measures each source of a mixture by itself."""
    callbacks: Sequence[Callback] = ()
    """The user's own."""
    ema: EmaConfig = EmaConfig()
    """Configuration of the average of the weights."""
    first_weights: str = ""
    """A hash of the weights that a new run begins with, where its configuration does not say them; known after
    `build_model`."""
    needs_conversion: bool = False
    """Whether optimizer states are taken from a run of another world size; known after `build_model`."""

    @abstractmethod
    def open(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> None:
        """Open and compare what else the run reads, which needs the other processes. Collective.

        Args:
            checkpoints: of this run.
            step: of the checkpoint that the run goes on from; None: a new run.
        """

    def choose_by_device(self, process: Process) -> None:
        """Make the choices that depend on the device, by default none. Collective."""
        if self.config.train.precision == "fp32" or (times := bf16_slowdown(process.device)) < SLOW_BF16:
            return
        process.console.warn(
            f"train.precision: found {self.config.train.precision} on a CPU whose products in bf16 take {times:.3g} "
            "times as long as in fp32; --train.precision fp32 is faster"
        )

    @abstractmethod
    def build_model(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> nn.Module:
        """The model with its first weights, alike on all ranks. Collective.

        Args:
            checkpoints, step: as of `open`; the weights of a checkpoint replace these.
        """

    @abstractmethod
    def table(self, process: Process, engine: Engine) -> tuple[str, list[tuple[str, str]]]:
        """Title and rows of the table that the start prints."""

    def first_state(self, engine: Engine, process: Process) -> TrainState:
        """The state of a new run, whose optimizer states may come from another one. Collective."""
        return TrainState()

    @abstractmethod
    def make_evaluation(self, engine: Engine, process: Process, resumed: bool) -> Measure | None:
        """What measures the model on the validation data; None: there is none. Called when a resume is done.
        Collective.
        """

    @abstractmethod
    def save_tokenizer(self, folder: Path) -> object:
        """Write the tokenizer into a new folder. On rank 0 only."""

    def save_origin(self, folder: Path) -> object:
        """Write into a new folder what is kept of the model folder that a new run begins with, if it begins with one.
        On rank 0 only.
        """
        return None

    @abstractmethod
    def make_show(self, engine: Engine, metrics: MetricsWriter | None) -> Callable[[int], None]:
        """The function that shows pictures and texts of an evaluation at a step, beside its numbers, on every rank.

        Args:
            metrics: rank 0's writer; None elsewhere.
        """

    def kept_facts(self) -> Fields:
        """Plain values that are kept in every checkpoint beside `facts`."""
        return {}

    @abstractmethod
    def flops(self, micro_batch: MicroBatch) -> float:
        """Model FLOPs of a micro-batch, forward and backward."""

    @abstractmethod
    def open_stream(self, state: TrainState, process: Process) -> AbstractContextManager[Iterator[RankBatch]]:
        """This rank's batches from the state's position on."""

    def finish(self, loop: Loop, process: Process, stop: StopRequest) -> bool:
        """The work after the last step; returns False if a stop was requested before its end. Collective."""
        return True

    def last_lines(self, process: Process) -> list[str]:
        """What is printed at the end of a complete run."""
        return []
