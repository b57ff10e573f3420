"""Configuration of a pretraining run, and the checks between its sections."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from cloze.launch.config.checks import at_least
from cloze.launch.config.data import DataSource, MixtureConfig
from cloze.launch.config.marks import FIXED, FREE
from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.run import RunConfig, check_processes, check_sections, check_seed, check_warmup
from cloze.launch.config.running import CheckpointConfig, DataCacheConfig, EvaluationConfig, MonitorConfig, ZeroConfig
from cloze.launch.config.training import EmaConfig, MaskingConfig, TrainConfig
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class PretrainEvaluationConfig(EvaluationConfig):
    """When the run is measured on the validation split, and what follows from it."""

    sets: dict[str, str] = field(default_factory=dict)
    """Further prepared folders whose validation splits are measured, by name: curves `validation/.../NAME`. What has no
    name in its curve is measured on the data that is trained on."""
    masking_rate: float | None = None
    """Share of a sample's tokens that is predicted in validation, where its masks are drawn at load time; above 0, up
    to 1; null: the rate in the shards' manifest, whatever the run trains with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking_rate is not None and not 0 < self.masking_rate <= 1:
            raise UserError(f"evaluation.masking_rate: found {self.masking_rate}, expected a share above 0, up to 1")
        for name in self.sets:
            if not re.fullmatch(r"[\w.-]+", name):
                raise UserError(f"evaluation.sets: found the name {name!r}, expected letters, digits, dots, dashes and "
                                "underscores")


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """A pretraining run."""

    data: str | MixtureConfig = field(metadata=FREE)
    """Folder that `cloze prepare` wrote, or its URL in an object store; or several to mix: a section with sources, or a
    YAML file of it (--data.help and docs/training.md#mixtures)."""
    output: str = field(metadata=FREE)
    """Folder of the run: checkpoints, metrics, TensorBoard events, the resolved configuration; or its URL in an object
    store, as s3://bucket/runs/name."""
    seed: int = 42
    """Seed of initial weights, order of samples and dropout, 0 or more."""
    processes: int | Literal["auto"] = field(default=1, metadata=FREE)
    """Processes on this machine that the command starts, at least 1; auto: one a GPU. On several machines, or under
    torchrun, srun, deepspeed or mpirun, these start them."""
    data_streams: int | None = None
    """Streams that the order of samples is divided into, of which each process reads its own: at least 1, a divisor of
    every global batch size; null: chosen at the first start and kept, the most up to 1,024 or the processes."""
    data_cache: DataCacheConfig = field(default_factory=DataCacheConfig, metadata=FREE)
    """Local disk for data in an object store."""
    init_from: str | None = None
    """Folder of a run, or its URL in an object store, or folder of a Hugging Face BERT, whose weights this run starts
    from; null: drawn ones."""
    init_optimizer: bool = False
    """Whether the optimizer's moments are taken from that run too."""
    init_positions: Literal["same", "extend"] = "same"
    """What to do if the model has more learned positions than init_from. same: refuse; extend: draw the others."""
    init_layers: list[int] | None = None
    """Layers of init_from, from 0, that become this model's, one for each (a student's of 6: 0, 2, 4, 7, 9, 11); null:
    as they are."""
    init_word_vectors: str | None = None
    """word2vec text file, of whose vectors word embeddings start, by token; null: drawn ones. Not with init_from."""
    model: BertConfig = field(default_factory=BertConfig, metadata=FIXED)
    """Shape of the model; a file of configs/model/ or single fields."""
    objective: str = "masked"
    """What is minimised. masked: masked tokens, and next sentences if the data has pairs; span_boundary: these, and
    each masked token from those around its span; distillation: masked tokens, and a teacher's outputs for them
    (objective_options.teacher); replaced_tokens: ELECTRA's generator and discriminator (docs/recipes.md has all
    three); or a class of your own by its dotted name, as my_module.MyObjective, in a file of the current folder or
    installed (docs/python.md)."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """What the objective's class is made with beside the configuration, by name."""
    callbacks: list[str] = field(default_factory=list, metadata=FREE)
    """Classes of your own that are called during the run, by their dotted names (docs/python.md)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, batch sizes, learning rate and precision."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """How much is masked, where the shards leave that to the run."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its constants."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """The moving average of the weights."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    """When the run is saved, what is kept and how it goes on."""
    evaluation: PretrainEvaluationConfig = field(default_factory=PretrainEvaluationConfig, metadata=FREE)
    """When the run is measured on the validation split, and what follows from it."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig, metadata=FREE)
    """What is watched beside the curves, and how often."""
    zero: ZeroConfig = field(default_factory=ZeroConfig, metadata=FREE)
    """What is partitioned over the processes."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Scale of the loss in fp16."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further settings of DeepSpeed, by its own names; one that contradicts what the fields above make is refused."""

    def __post_init__(self) -> None:
        if self.init_optimizer and self.init_from is None:
            raise UserError("init_optimizer: found true without init_from, expected the run whose moments to take")
        if self.init_layers is not None and (self.init_from is None or self.init_optimizer):
            raise UserError("init_layers: found them " + ("with init_optimizer, expected weights alone"
                            if self.init_from else "without init_from, expected the model whose layers to take"))
        if self.init_layers is not None and len(self.init_layers) != self.model.num_hidden_layers:
            raise UserError(f"init_layers: found {len(self.init_layers)}, expected one for each of "
                            f"model.num_hidden_layers = {self.model.num_hidden_layers}")
        if self.init_word_vectors and self.init_from:
            raise UserError(f"init_word_vectors: found {self.init_word_vectors} with init_from = {self.init_from}, "
                            "which has word embeddings of its own, expected one of the two; leave the other out")
        check_seed(self)
        shares = [phase.until_share for phase in self.masking.phases if phase.until_share is not None]
        changes = self.masking.final_rate not in (None, self.masking.rate)
        if (changes or shares) and (self.train.time_budget_hours is not None or self.train.batch_changes):
            name, value, instead = (("phases", f"until_share {shares[0]}", "until_tokens") if shares else
                                    ("final_rate", self.masking.final_rate, "null"))
            raise UserError(f"masking.{name}: found {value} in a run with a time budget or batches of several sizes, "
                            f"expected {instead}: how many samples it has is not known beforehand")
        check_processes(self)
        if self.data_streams is not None:
            for name, size in self.train.batch_sizes.items():
                if self.data_streams < 1 or size % self.data_streams:
                    raise UserError(f"data_streams: found {self.data_streams}, expected a divisor of train.{name} = "
                                    f"{size}; leave it at null to have one chosen")
        check_sections(self)
        check_warmup(self)
        own = set()
        if isinstance(self.data, MixtureConfig):
            self.data.check()
            own = {source.label for source in self.sources}
        # The parser returns unparsable values as text, and for a file its content.
        elif self.data.startswith(("{", "[")) or "\n" in self.data or os.path.isfile(self.data):
            found = self.data if len(self.data) < 200 and "\n" not in self.data else f"a text, {self.data[:40]!r}..."
            raise UserError(f"data: found {found}, expected a folder, or a section (or a YAML file of one) with "
                            "sources, a list of {path, name, weight}, and proportions, temperature or phases, a list "
                            "of {weights, until_tokens}; --data.help explains them")
        if both := sorted(own & self.evaluation.sets.keys()):
            raise UserError(f"evaluation.sets: found {both[0]}, expected a name that no source of data has")

    @property
    def streams(self) -> int:
        """The number of data streams; call `choose_data_streams` first."""
        assert self.data_streams is not None, "it has been chosen"
        return self.data_streams

    @property
    def sources(self) -> list[DataSource]:
        """The prepared folders, given as one folder or as a mixture."""
        return self.data.sources if isinstance(self.data, MixtureConfig) else [DataSource(self.data)]


@dataclass(frozen=True)
class SweepConfig(PretrainConfig):
    """Pretraining with every combination of some settings."""

    output: str = field(metadata=FREE)
    """Folder of all runs, each in a folder named by its settings; the table as results.json, curves as
    curves.png."""
    grid: list[str] = field(default_factory=list, metadata=FREE)
    """Settings to try, FIELD=VALUE,VALUE once or several times, as learning_rate=1e-3,2e-3 seed=1,2: every combination
    is a run; the table shows the median over the seeds."""
    run: int | None = None
    """The one run, from 0, that this process becomes: the number in a job array, as $SLURM_ARRAY_TASK_ID; null: all of
    them, one at a time on each GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grid:
            raise UserError("grid: found none, expected settings to try, as --grid learning_rate=1e-3,2e-3 seed=1,2")


@dataclass(frozen=True)
class DeepSpeedConfig(PretrainConfig):
    """What DeepSpeed would be given for a pretraining run."""

    data: str | MixtureConfig = field(default="", metadata=FREE)
    """Not read."""
    output: str = field(default="", metadata=FREE)
    """Not read."""
    processes: int = field(default=1, metadata=FREE)
    """Processes of the run, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("deepspeed-config", self, processes=1)
