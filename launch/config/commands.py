"""Configuration of the smaller commands."""

from dataclasses import dataclass, field
from typing import Literal

from cloze.pipeline.bounds import MOST_PROCESSES, MOST_SECONDS, bounds, check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url


@dataclass(frozen=True)
class ExportConfig:
    """Turn a run's newest good checkpoint into a Hugging Face folder."""

    run: str
    """Folder of a pretraining or fine-tuning run, its URL in an object store, or a model folder; fine-tuned models and
    model folders are copied."""
    output: str | None = None
    """Folder to write, which must be new or empty; null: RUN-hf."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint; best: the checkpoint of the best evaluation (evaluation.keep_best); null: the newest good
    one."""
    average: int = field(default=1, metadata=bounds(at_least=1))
    """Number of checkpoints of a pretraining run whose weights are averaged: the chosen one and those before it."""
    ema: bool = False
    """Whether to export the average of the weights instead of them, from a run with ema.decay or ema.tail_share."""
    generator: bool = False
    """Whether to export the generator of a run with objective replaced_tokens instead of the discriminator."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the weights; null: unchanged, which is fp32 for runs. An ONNX graph keeps fp32."""
    onnx: bool = False
    """Whether to write model.onnx too, for any batch size and length, and onnx.json, which names its inputs."""

    push: str | None = None
    """Repository on the Hugging Face hub, as USER/NAME, to which the folder is uploaded, with the token of `hf auth
    login` or of HF_TOKEN (needs the extra finetune); null: none."""
    private: bool = True
    """Whether a repository that push creates is private; if true, an existing one must be private too."""

    def __post_init__(self) -> None:
        check_bounds("", self)


@dataclass(frozen=True)
class QuickstartConfig:
    """The whole chain on a small text: vocabulary, shards, pretraining, stop and resume, export, blanks."""

    output: str = "runs/quickstart"
    """Folder for all results; steps whose result exists already are not repeated."""
    processes: int = field(default=2, metadata=bounds(at_least=1, at_most=MOST_PROCESSES))
    """Number of training processes."""

    def __post_init__(self) -> None:
        check_bounds("", self)


@dataclass(frozen=True)
class CompletionConfig:
    """Print the script with which a shell completes the words after `cloze`."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell to print the script for: bash and zsh evaluate it, fish reads it from its completions folder."""


@dataclass(frozen=True)
class DoctorConfig:
    """Examine the environment; under torchrun, all its processes together."""

    data: str | None = None
    """Folder written by `cloze prepare` that is verified; null: none."""
    output: str | None = None
    """Folder for runs, in which writing is tested; null: none."""
    recipe: str | None = None
    """Configuration of `cloze pretrain`, by name or file, for which the check computes what share of a step the sum of
    gradients takes on this network; null: none."""
    timeout_seconds: float = field(default=60.0, metadata=bounds(at_least=1, at_most=MOST_SECONDS))
    """Seconds after which a check without a result counts as hanging."""

    def __post_init__(self) -> None:
        check_bounds("", self)


@dataclass(frozen=True)
class RunsConfig:
    """List the runs in a folder: state, step, loss, speed, time left, last heartbeat, restarts."""

    folder: str
    """Folder with pretraining or fine-tuning runs, at any depth, or its URL in an object store."""
    json: str | None = None
    """File for the same list as JSON; null: none."""


@dataclass(frozen=True)
class StatusConfig:
    """Show the state of a run, from any machine that can read its folder."""

    run: str
    """Folder of a pretraining or fine-tuning run, or its URL in an object store."""
    follow: bool = False
    """Whether to show the last lines of the run's metrics, and every new one until the run ends; the exit status is
    that of the run."""
    interval_seconds: float = field(default=2.0, metadata=bounds(at_least=0.1, at_most=MOST_SECONDS))
    """Seconds between two reads of the run's files with follow."""
    curves: str | None = None
    """Folder to which metrics.jsonl and the TensorBoard events of a run in an object store are written, each curve
    once; with follow they are extended. null: none."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.curves is not None and not is_url(self.run):
            raise UserError(
                f"curves: found {self.curves} with the folder {self.run} as run, expected null: its curves "
                f"are there; tensorboard --logdir {self.run}"
            )
