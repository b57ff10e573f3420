"""Configuration of the smaller commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cloze.launch.config.checks import at_least
from cloze.pipeline.errors import UserError
from cloze.pipeline.stores.places import is_url


@dataclass(frozen=True)
class ExportConfig:
    """Turn a run's newest good checkpoint into a Hugging Face folder."""

    run: str
    """Folder of a pretraining or fine-tuning run, its URL in an object store, or a model folder; fine-tuned models and
    model folders are copied."""
    output: str | None = None
    """Folder to write, which must not exist yet or be empty; null: RUN-hf."""
    step: int | Literal["best"] | None = None
    """Step of the checkpoint; best: that of the best evaluation (evaluation.keep_best); null: the newest good one."""
    average: int = 1
    """Checkpoints of a run of pretraining whose weights are averaged: that one and those before it; at least 1."""
    ema: bool = False
    """Whether to export the moving average of the weights that a run with ema.decay has kept, in place of them."""
    generator: bool = False
    """Whether to export the generator of a run with objective replaced_tokens, in place of the discriminator."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the weights; null: as they are, which is fp32 for runs. An ONNX graph keeps fp32."""
    onnx: bool = False
    """Whether the folder also gets model.onnx, for any batch and length, and onnx.json, which names its inputs."""

    push: str | None = None
    """Name on the Hugging Face hub, as USER/NAME, where the folder is uploaded to, with the token of `hf auth login` or
    of HF_TOKEN (needs the extra finetune); null: none."""
    private: bool = True
    """Whether a repository that push makes is private; one that is there must be so too, if true."""

    def __post_init__(self) -> None:
        at_least("export", self, average=1)


@dataclass(frozen=True)
class QuickstartConfig:
    """The whole chain on a small text: vocabulary, shards, pretraining, stop and resume, export, blanks."""

    output: str = "runs/quickstart"
    """Folder for everything that is made; steps whose result is there already are not repeated."""
    processes: int = 2
    """Training processes, at least 1."""

    def __post_init__(self) -> None:
        at_least("quickstart", self, processes=1)


@dataclass(frozen=True)
class CompletionConfig:
    """Print what a shell completes the words behind `cloze` with."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell for which it is printed: bash and zsh evaluate it, fish reads it from its folder of completions."""


@dataclass(frozen=True)
class DoctorConfig:
    """Examine the environment; under torchrun, all its processes together."""

    data: str | None = None
    """Folder that `cloze prepare` wrote, to be verified; null: none."""
    output: str | None = None
    """Folder where runs will be written, to be tried; null: none."""
    timeout_seconds: float = 60.0
    """Seconds after which a check without an answer counts as hanging, at least 1."""

    def __post_init__(self) -> None:
        at_least("doctor", self, timeout_seconds=1)


@dataclass(frozen=True)
class RunsConfig:
    """List the runs in a folder: state, step, loss, speed, time left, last heartbeat, restarts."""

    folder: str
    """Folder with runs of pretraining or fine-tuning, at any depth; or its URL in an object store."""
    json: str | None = None
    """File for the same as JSON; null: none."""


@dataclass(frozen=True)
class StatusConfig:
    """Show how a run stands; from any machine that sees its folder."""

    run: str
    """Folder of a run of pretraining or fine-tuning, or its URL in an object store."""
    follow: bool = False
    """Whether the last lines of its metrics and every new one are shown until it ends; its end is the exit status."""
    interval_seconds: float = 2.0
    """How often its files are looked at with follow, at least 0.1."""
    curves: str | None = None
    """Folder where metrics.jsonl and TensorBoard's events of a run in an object store are written, each curve once;
    with follow they grow there. null: none."""

    def __post_init__(self) -> None:
        at_least("status", self, interval_seconds=0.1)
        if self.curves is not None and not is_url(self.run):
            raise UserError(f"curves: found {self.curves} with the folder {self.run} as run, expected null: its curves "
                            f"are there; tensorboard --logdir {self.run}")
