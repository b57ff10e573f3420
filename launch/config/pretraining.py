"""Configuration of a pretraining run, and the checks between its sections."""

import os.path
import re
from dataclasses import dataclass, field
from typing import Literal

from cloze.launch.config.changes_at_resume import FIXED, FREE
from cloze.launch.config.data import DataSource, MixtureConfig
from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.run import RunConfig, check_sections, check_warmup
from cloze.launch.config.sections import (
    CheckpointConfig,
    DataCacheConfig,
    EmaConfig,
    EvaluationConfig,
    MonitorConfig,
    PretrainMaskingConfig,
    ZeroConfig,
)
from cloze.launch.config.training import TrainConfig
from cloze.model.config import BertConfig
from cloze.pipeline.bounds import MOST_PROCESSES, POSITIVE_SHARE, SEED, bounds, check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields


@dataclass(frozen=True)
class PretrainEvaluationConfig(EvaluationConfig):
    """When the run is evaluated on the validation split, and how the results are used."""

    metric: str = "loss"
    """The `validation/...` curve that decides which evaluation is best: lower is better for losses and errors, higher
    for everything else; auto: the loss on the first source of a mixture, of one folder loss."""
    sets: dict[str, str] = field(default_factory=dict)
    """Further prepared folders whose validation splits are evaluated, by name: curves `validation/.../NAME`. Curves
    without a NAME are of the validation split of the training data."""
    masking_rate: float | None = field(default=None, metadata=POSITIVE_SHARE)
    """Share of a sample's tokens that is predicted in validation, if its masks are drawn at load time; null: the rate
    in the shards' manifest, regardless of the rate in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.sets:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):  # YAML takes 2024 for a number
                raise UserError(
                    f"evaluation.sets: found the name {name!r}, expected a text of letters, digits, dots, dashes and "
                    "underscores, a number in quotes"
                )


@dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """A pretraining run."""

    data: str | MixtureConfig = field(metadata=FREE)
    """Folder written by `cloze prepare`, or its URL; or a mixture of several: a section with sources, or a YAML file of
    it (docs/training.md#mixtures)."""
    output: str = field(metadata=FREE)
    """Folder of the run (checkpoints, metrics, TensorBoard events, the resolved configuration), or its URL in an object
    store, such as s3://bucket/runs/name."""
    seed: int = field(default=42, metadata=SEED)
    """Seed of initial weights, sample order and dropout."""
    processes: int | Literal["auto"] = field(default=1, metadata=FREE | bounds(at_least=1, at_most=MOST_PROCESSES))
    """Processes that the command starts on this machine; auto: one per GPU. On several machines, or under torchrun,
    srun, deepspeed or mpirun, the launcher starts them."""
    data_streams: int | None = None
    """Number of streams into which the order of samples is divided among the processes: at least 1, a divisor of every
    global batch size; null: chosen at the first start and kept."""
    data_cache: DataCacheConfig = field(default_factory=DataCacheConfig, metadata=FREE)
    """Cache on a local disk for data in an object store."""
    init_from: str | None = None
    """Folder of a run, its URL in an object store, or a Hugging Face folder of an encoder: the run starts from its
    weights, and has its shape if no model is given; null: random weights."""
    init_optimizer: bool = False
    """Whether the optimizer's moments are taken from init_from too."""
    init_positions: Literal["same", "extend"] = "same"
    """What to do if the model has more learned positions than init_from. same: refuse; extend: initialize the others
    randomly."""
    init_vocabulary: Literal["mean", "mean_all", "random", "transplant"] = "mean"
    """How tokens start that init_from lacks. Of an extended tokenizer (cloze vocab --extend): mean: the mean of the
    rows of the tokens that they replace; mean_all: the mean of all rows; random: drawn. transplant: any tokenizer; rows
    of tokens that both have are taken, the others are means of what the old one cuts them into."""
    init_layers: list[int] | None = None
    """Layers of init_from, counted from 0, that initialize this model's, one for each (for a student with 6 layers: 0,
    2, 4, 7, 9, 11); null: all, in order."""
    init_word_vectors: str | None = None
    """word2vec text file whose vectors initialize the word embeddings, by token; null: random ones. Not with
    init_from."""
    model: BertConfig = field(default_factory=BertConfig, metadata=FIXED)
    """Shape of the model; with init_from the source's, if no file is given."""
    objective: str = "masked"
    """Training objective, one of those of docs/recipes.md; or the dotted name of your own class, such as
    my_module.MyObjective, in a file of the current folder or installed (docs/python.md)."""
    objective_options: Fields = field(default_factory=dict)
    """Keyword arguments of the objective's class, besides the configuration."""
    callbacks: list[str] = field(default_factory=list, metadata=FREE)
    """Dotted names of your own classes that are called during the run (docs/python.md)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, batch sizes, learning rate and precision."""
    masking: PretrainMaskingConfig = field(default_factory=PretrainMaskingConfig)
    """What is predicted when: next tokens first, if wished; masking rate and strategy, for shards whose masks are drawn
    at load time."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its hyperparameters."""
    ema: EmaConfig = field(default_factory=EmaConfig)
    """The average of the weights."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    """When checkpoints are saved, which are kept and how a run resumes."""
    evaluation: PretrainEvaluationConfig = field(default_factory=PretrainEvaluationConfig, metadata=FREE)
    """When the run is evaluated on the validation split, and how the results are used."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig, metadata=FREE)
    """What is monitored besides the curves, and how often."""
    zero: ZeroConfig = field(default_factory=ZeroConfig, metadata=FREE)
    """What is partitioned across the processes."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scale in fp16."""
    deepspeed: Fields = field(default_factory=dict)
    """Further DeepSpeed settings, by DeepSpeed's names; a setting that contradicts the fields above is refused."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        self._check_initial_weights()
        if self.ema.tail_share is not None and self.train.time_budget_hours is not None:
            raise UserError(
                f"ema.tail_share: found {self.ema.tail_share} with train.time_budget_hours, expected null: the length "
                "of such a run is not known in steps; give ema.decay"
            )
        self._check_masking()
        for name, size in self.train.batch_sizes.items():
            if self.data_streams is not None and (self.data_streams < 1 or size % self.data_streams):
                raise UserError(
                    f"data_streams: found {self.data_streams}, expected a divisor of train.{name} = {size}; leave it "
                    "at null to have one chosen"
                )
        check_sections(self)
        check_warmup(self)
        self._check_data()

    def _check_initial_weights(self) -> None:
        if self.init_optimizer and self.init_from is None:
            raise UserError(
                "init_optimizer: found true without init_from, expected the run whose moments to take; give "
                "--init_from RUN, or for random weights --init_from null --init_optimizer false"
            )
        if self.init_layers is not None:
            if self.init_from is None:
                raise UserError("init_layers: found them without init_from, expected the model whose layers to take")
            if self.init_optimizer:
                raise UserError("init_layers: found them with init_optimizer, expected weights alone")
            if len(self.init_layers) != self.model.num_hidden_layers:
                raise UserError(
                    f"init_layers: found {len(self.init_layers)}, expected one for each of model.num_hidden_layers = "
                    f"{self.model.num_hidden_layers}"
                )
        if self.init_word_vectors and self.init_from:
            raise UserError(
                f"init_word_vectors: found {self.init_word_vectors} with init_from = {self.init_from}, which has word "
                "embeddings of its own, expected one of the two; leave the other out"
            )

    def _check_masking(self) -> None:
        """What is predicted when has to fit the rest of the run."""
        masking = self.masking
        if self.train.time_budget_hours is not None or self.train.batch_changes:
            why = "how many samples it has is not known beforehand"
            within = "in a run with a time budget or batches of several sizes"
            for phase in masking.phases:
                if phase.until_share is not None:
                    raise UserError(
                        f"masking.phases: found until_share {phase.until_share} {within}, expected until_tokens: {why}"
                    )
            if masking.final_rate not in (None, masking.rate):
                raise UserError(f"masking.final_rate: found {masking.final_rate} {within}, expected null: {why}")
        if masking.next_tokens_until and not self.train.causal_share and self.evaluation.patience is not None:
            raise UserError(
                f"evaluation.patience: found {self.evaluation.patience} with masking.next_tokens_until, expected null: "
                "masked tokens are measured, which get no better before they begin"
            )

    def _check_data(self) -> None:
        own = set()
        if isinstance(self.data, MixtureConfig):
            self.data.check()
            own = {source.label for source in self.sources}
        # The parser returns unparsable values as text, and for a file its content.
        elif self.data.startswith(("{", "[")) or "\n" in self.data or os.path.isfile(self.data):
            found = self.data if len(self.data) < 200 and "\n" not in self.data else f"a text, {self.data[:40]!r}..."
            raise UserError(
                f"data: found {found}, expected a folder, or a section (or a YAML file of one) with "
                "sources, a list of {path, name, weight}, and proportions, temperature or phases, a list "
                "of {weights, until_tokens}; --data.help explains them"
            )
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
    """Folder of all runs, each in a subfolder named after its settings; the table is results.json, the curves are in
    curves.png."""
    grid: list[str] = field(default_factory=list, metadata=FREE)
    """Settings to try, FIELD=VALUE,VALUE once or several times, such as learning_rate=1e-3,2e-3 seed=1,2: every
    combination is a run; the table shows the median over the seeds."""
    run: int | None = None
    """Number, from 0, of the only run that this process executes, such as $SLURM_ARRAY_TASK_ID in a job array; null:
    all runs, one at a time on each GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grid:
            raise UserError("grid: found none, expected settings to try, as --grid learning_rate=1e-3,2e-3 seed=1,2")


@dataclass(frozen=True)
class DeepSpeedConfig(PretrainConfig):
    """Print the DeepSpeed configuration of a pretraining run."""

    data: str | MixtureConfig = field(default="", metadata=FREE)
    """Ignored."""
    output: str = field(default="", metadata=FREE)
    """Ignored."""
    processes: int = field(default=1, metadata=FREE | bounds(at_least=1, at_most=1 << 20))
    """Processes of the run (world size)."""
