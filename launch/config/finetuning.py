"""Configuration of a fine-tuning run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from cloze.launch.config.changes_at_resume import FREE
from cloze.launch.config.model import HubConfig
from cloze.launch.config.optimization import LossScaleConfig, OptimizerConfig, ScheduleConfig
from cloze.launch.config.run import RunConfig, check_sections, check_warmup
from cloze.launch.config.sections import CheckpointConfig, EvaluationConfig, MonitorConfig, ZeroConfig
from cloze.launch.config.tasks import Task
from cloze.launch.config.training import AUTO, BATCH, FINETUNING, Rates, TrainConfig
from cloze.model.config import Pooling
from cloze.pipeline.bounds import MOST_PROCESSES, SEED, bounds, check_bounds
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields

_LONG_TEXT = 512  # 128 + 382 and two special tokens: Sun et al. 2019, arXiv 1905.05583, section 5.3


@dataclass(frozen=True)
class EmbeddingConfig:
    """The contrastive loss of the task embed, and the sizes of its vectors."""

    temperature: float = field(default=0.05, metadata=bounds(above=0))
    """Divisor of the cosines before the softmax; 0.05: SimCSE's (Gao et al. 2021, arXiv 2104.08821), equal to a scale
    of 20 in sentence-transformers."""
    symmetric: bool = False
    """Whether each positive must also find its anchor among all anchors of the batch; the loss is then the mean of both
    directions."""
    same_text_negatives: bool = False
    """Whether a text of another row counts as a negative of a row whose anchor or positive is the same text; false: it
    is left out of that row's softmax."""
    dimensions: list[int] = field(default_factory=list)
    """Smaller vector sizes, at least 1 each: the first numbers of each vector, taken as a vector, get the same loss,
    and the losses of all sizes are summed (Matryoshka; Kusupati et al. 2022, arXiv 2205.13147)."""
    scored_columns: list[str] = field(default_factory=list)
    """The two text columns of files with scores; empty: sentence1 and sentence2, or sentence_A and sentence_B, or the
    first two of text_columns."""

    def __post_init__(self) -> None:
        check_bounds("embedding", self)
        if any(size < 1 for size in self.dimensions) or len(set(self.dimensions)) < len(self.dimensions):
            raise UserError(
                f"embedding.dimensions: found {', '.join(map(str, self.dimensions))}, expected sizes of at least 1, "
                "each once"
            )
        if len(self.scored_columns) not in (0, 2):
            raise UserError(f"embedding.scored_columns: found {', '.join(self.scored_columns)}, expected two columns")


@dataclass(frozen=True)
class FinetuneTrainConfig(TrainConfig):
    """Steps, batch sizes, learning rate and precision."""

    rates: ClassVar[Rates] = FINETUNING

    # `for_units` counts them before anything reads them
    max_steps: int | None = field(default=None, metadata=bounds(at_least=1))  # type: ignore[assignment]
    """Optimizer steps of the whole run, overriding `epochs`; null: as many as `epochs` gives."""
    global_batch_size: int = field(default=32, metadata=BATCH)
    """Examples in one optimizer step over all processes; a multiple of the world size."""
    micro_batch_size: int = field(default=32, metadata=FREE)
    """Maximum examples in one forward and backward pass of one process: the largest such divisor of its share of a
    batch is used, which does not change the gradient."""
    learning_rate: float | Literal["auto"] = field(default=AUTO, metadata=bounds(above=0))
    """Peak learning rate; the schedule multiplies it. auto: by the number of parameters in the model's layers: 6e-4
    below 8 million (BERT-mini), 3e-4 below 20 million (BERT-small), 1e-4 below 60 million (BERT-medium), else 3e-5."""


@dataclass(frozen=True)
class FinetuneEvaluationConfig(EvaluationConfig):
    """When the run is evaluated on the validation file, and how the results are used."""

    # `for_units` counts them before anything reads them
    every_steps: int | None = field(default=None, metadata=bounds(at_least=0))  # type: ignore[assignment]
    """Steps between two evaluations; 0: only before the first and after the last step; null: as many as
    `evaluate_every_epochs` gives."""
    metric: str = AUTO
    """The `validation/...` curve that decides which evaluation is best: lower is better for losses and errors, higher
    for everything else; auto: the task's first metric."""
    keep_best: bool = True
    """Whether the checkpoint of the best evaluation is saved and kept besides the newest ones."""


# Fields of shared sections that are for pretraining, and their values without effect.
_OF_PRETRAINING: tuple[tuple[str, str, object], ...] = (
    ("train", "initial_global_batch_size", None),
    ("train", "batch_phases", []),
    ("train", "loss_reduction", "tokens"),
    ("train", "causal_share", 0.0),
    ("train", "compile", None),
    ("train", "qkv_gradients", "parts"),
    ("train", "memory_limit_gib", None),
    ("train", "sequence_length", None),
    ("monitor", "embeddings", False),
)


@dataclass(frozen=True)
class FinetuneConfig(RunConfig, HubConfig):
    """A fine-tuning run."""

    task: str
    """The task: a kind of prediction for your own data, or a known data set (docs/finetune.md)."""
    model: str
    """A Cloze run, a Hugging Face folder or hub name; for random weights: a file in configs/model/ or its name."""
    train_file: str = field(metadata=FREE)
    """Training examples: for ner and pos CoNLL (one word per line followed by its tag, an empty line between
    sentences), for squad and squad2 SQuAD's JSON, for all others .tsv, .csv, .jsonl, .parquet or a saved data set. The
    flag is `--train`, the name in a YAML file `train_file`."""
    validation: str = field(metadata=FREE)
    """Validation examples, by which the best checkpoint is chosen."""
    output: str = field(metadata=FREE)
    """Folder of the run: results.json, predictions/, model/ (a Hugging Face folder), checkpoints, curves."""
    test: list[str] = field(default_factory=list, metadata=FREE)
    """Further files, evaluated (if they have labels) and predicted with the best checkpoint."""
    tokenizer: str | None = None
    """Folder of a tokenizer; null: the model's own (a file in configs/model/ has none)."""
    model_step: int | None = None
    """Step of a pretraining run's checkpoint; null: the newest good one, in a sweep the same for all runs."""
    text_columns: list[str] = field(default_factory=list)
    """Column of the text, or the two columns of a pair; for embed those of the anchor, the positive and hard negatives,
    or one column of texts, each of which is its own positive; empty: the task's default columns."""
    label_columns: list[str] = field(default_factory=list)
    """Column of the label; several for label-columns (and for 0/1 columns of multi-label); for embed the column of the
    scores used in evaluation; empty: the task's default column."""
    labels: list[str] = field(default_factory=list)
    """All labels in the order of their ids; empty: the task's, or those of the training file sorted by name."""
    skip_malformed_rows: bool = False
    """Whether rows with another number of fields than the header are skipped and counted; false: they are refused."""
    choice_columns: list[str] = field(default_factory=list)
    """Columns of the choices of multiple-choice; empty: the task's default columns."""
    max_length: int | None = field(default=None, metadata=bounds(at_least=8))
    """Longest sequence in tokens, special tokens included; null: 128, for question answering 384, with keep: head_tail
    512, or as many as the model has positions."""
    keep: Literal["head", "tail", "head_tail", "pieces"] = "head"
    """Part that is kept of a longer text; head_tail: its first head_tokens and its last ones; pieces: all of it, in
    overlapping pieces of max_length, window_step apart."""
    piece_pooling: Literal["max", "mean", "attention"] = "mean"
    """How the vectors of a text's pieces are combined into one, with keep: pieces."""
    head_tokens: int = field(default=128, metadata=bounds(at_least=1))
    """Tokens kept from the beginning with keep: head_tail."""
    window_step: int | None = field(default=None, metadata=bounds(at_least=1))
    """Tokens between the starts of consecutive windows or pieces of a long text (squad, squad2, keep: pieces); null:
    for question answering a third of max_length, at most 128, otherwise half of a piece."""
    max_query_tokens: int = field(default=64, metadata=bounds(at_least=1))
    """Longest question in tokens; longer ones are truncated (squad, squad2)."""
    max_answer_tokens: int = field(default=30, metadata=bounds(at_least=1))
    """Longest predicted answer in tokens (squad, squad2)."""
    answer_softmax: Literal["window", "document"] = "window"
    """Scope of the softmax over start and end scores in training: each window, or all tokens of the document, each
    once; a batch then counts questions with all their windows (squad, squad2)."""
    answer_units: Literal["words", "characters"] = "words"
    """Units that exact match and F1 compare; characters for languages without spaces, such as Chinese (squad,
    squad2)."""
    pooling: Pooling | None = None
    """Sequence vector that the head reads; what transformers lacks is written in Cloze's own format: for BERT's shapes
    all but pooler, for ModernBERT's max. For embed: the vector of a text, which any folder can record: cls, mean or
    max. null: pooler, mean for a model without one; for embed the pooling of the model's vectors, mean if it has
    learned none."""
    dropout: float | None = field(default=None, metadata=bounds(at_least=0, below=1))
    """Dropout probability everywhere in the model; null: the model's own."""
    freeze: str = "none"
    """Frozen parameters. none; encoder: only the head (and the pooler) is trained, on encoder outputs computed once for
    each example, without dropout; below_N: only the top N layers and the head are trained."""
    unfreeze_every_epochs: float | None = field(default=None, metadata=bounds(above=0))
    """Epochs after which one more layer is unfrozen, from the top, starting with only the head; null: all layers are
    trained from the start."""
    read_layers: Literal["last", "last_four", "weighted"] = "last"
    """Layers that the head reads: the last; the last four, concatenated; a learned weighted sum of all. All but last
    are written in Cloze's own format and need a pooling other than pooler."""
    reinitialize_layers: int = field(default=0, metadata=bounds(at_least=0))
    """Number of top layers (with the pooler) that start from random weights (Zhang et al. 2021, arXiv 2006.05987)."""
    epochs: float | None = field(default=3.0, metadata=bounds(above=0))
    """Passes over the training file; train.max_steps, if given, overrides it."""
    evaluate_every_epochs: float | None = field(default=None, metadata=FREE | bounds(above=0))
    """Epochs between two evaluations, instead of evaluation.every_steps; null: one, unless that is given."""
    glue_submission: bool = False
    """Whether each test file's predictions are also written in the format of gluebenchmark.com."""
    seeds: int = field(default=1, metadata=FREE | bounds(at_least=1, at_most=1000))
    """Runs of each setting, with `seed` and the numbers after it, each in its own subfolder of `output`."""
    grid: list[str] = field(default_factory=list, metadata=FREE)
    """Settings to try, each `FIELD=VALUE,VALUE`, such as learning_rate=2e-5,3e-5 (`train.` may be omitted); every
    combination is run."""
    processes: int | Literal["auto"] = field(default=1, metadata=FREE | bounds(at_least=1, at_most=MOST_PROCESSES))
    """Processes that the command starts on this machine; auto: one per GPU. On several machines, or under torchrun,
    srun, deepspeed or mpirun, the launcher starts them."""
    seed: int = field(default=42, metadata=SEED)
    """Seed of the new head, the order of examples and dropout."""
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """The contrastive loss and the vector sizes (embed)."""
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    """Batch sizes, learning rate and precision."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer and its hyperparameters; Adam's bias correction is on (Mosbach et al. 2021, arXiv 2006.04884)."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(warmup_share=0.1))
    """Learning rate schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    """When checkpoints are saved, which are kept and how a run resumes."""
    evaluation: FinetuneEvaluationConfig = field(default_factory=FinetuneEvaluationConfig, metadata=FREE)
    """When the run is evaluated on the validation file, and how the results are used."""
    monitor: MonitorConfig = field(default_factory=lambda: MonitorConfig(inspect_every_steps=0), metadata=FREE)
    """What is monitored besides the curves, and how often."""
    zero: ZeroConfig = field(default_factory=ZeroConfig, metadata=FREE)
    """What is partitioned across the processes."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scale in fp16."""
    deepspeed: Fields = field(default_factory=dict)
    """Further DeepSpeed settings, by DeepSpeed's names."""

    def __post_init__(self) -> None:
        check_bounds("", self)
        self._check_freezing()
        self._check_unused()
        if self.processes != 1 and (self.seeds > 1 or self.grid):
            raise UserError(
                f"processes: found {self.processes} with seeds or grid, expected 1: a sweep starts a run of one "
                "process on each GPU"
            )
        check_sections(self)
        self._check_steps()

    def _check_freezing(self) -> None:
        """What is trained has to fit the optimizer and what zero partitions."""
        stage, optimizer = self.zero.stage, self.optimizer
        if not re.fullmatch("none|encoder|below_[0-9]{1,9}", self.freeze):
            raise UserError(f"freeze: found {self.freeze!r}, expected none, encoder or below_N, such as below_2")
        if self.unfreeze_every_epochs is not None:
            if self.freeze != "none" or stage:
                found = f"freeze {self.freeze}" if self.freeze != "none" else f"zero.stage {stage}"
                raise UserError(
                    f"unfreeze_every_epochs: found {found}, expected freeze none and zero.stage 0, where what learns "
                    "may change from step to step"
                )
            for name, refused, others in (
                ("name", "stable_adamw", "another, such as adamw"),
                ("implementation", "deepspeed", "torch"),
            ):
                if getattr(optimizer, name) == refused:
                    raise UserError(
                        f"unfreeze_every_epochs: found optimizer.{name} {refused}, expected {others}: it counts steps "
                        "of all layers together"
                    )
        if self.freeze == "encoder" and stage == 3:
            raise UserError(
                "freeze: found encoder at zero.stage 3, expected stage 0 to 2: what learns is too small to be "
                "partitioned"
            )

    def _check_unused(self) -> None:
        """Fields of shared sections that fine-tuning does not read have the values that have no effect."""
        if self.evaluation.samples is not None:
            raise UserError("evaluation.samples: found a number, expected null: all of the validation file is measured")
        for section, name, usual in _OF_PRETRAINING:
            found = getattr(getattr(self, section), name)
            if found != usual:
                raise UserError(
                    f"{section}.{name}: found {found}, expected {'null' if usual is None else usual}: it is for "
                    "pretraining"
                )

    def _check_steps(self) -> None:
        """The steps of the run and between evaluations are each given by one field."""
        if self.train.max_steps is not None:  # else the steps are not counted yet
            check_warmup(self)
        elif self.epochs is None:
            raise UserError("epochs: found null without train.max_steps, expected one of them")
        if self.evaluation.every_steps is not None and self.evaluate_every_epochs is not None:
            raise UserError(
                f"evaluation.every_steps: found {self.evaluation.every_steps} beside evaluate_every_epochs "
                f"{self.evaluate_every_epochs:g}, expected one of them; add --evaluation.every_steps null or "
                "--evaluate_every_epochs null"
            )

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read: for training, for validation, for tests."""
        return self.train_file, self.validation, *self.test

    def texts_of(self, task: Task) -> tuple[str, ...]:
        """Columns of the texts: the run's, otherwise the task's."""
        return tuple(self.text_columns) or task.texts

    def targets_of(self, task: Task) -> tuple[str, ...]:
        """Columns of what is predicted: the run's, otherwise the task's."""
        return tuple(self.label_columns) or task.targets

    def choices_of(self, task: Task) -> tuple[str, ...]:
        """Columns of the choices: the run's, otherwise the task's."""
        return tuple(self.choice_columns) or task.choices

    def for_task(self, task: Task, positions: int, pooling: Pooling = "pooler") -> FinetuneConfig:
        """The configuration with, unless given, the maximum length and pooling by task and model.

        Args:
            positions: number of positions of the model.
            pooling: what pools a text's vectors if the configuration does not say.

        Raises:
            UserError: the given length is larger, or leaves no room for a tail.
        """
        if self.max_length is not None and self.max_length > positions:
            raise UserError(
                f"max_length: found {self.max_length}, expected at most {positions}, the positions of {self.model}"
            )
        usual = _LONG_TEXT if self.keep == "head_tail" else task.max_length
        length = self.max_length or min(usual, positions)
        if self.keep == "head_tail" and self.head_tokens >= length - 2:
            raise UserError(
                f"head_tokens: found {self.head_tokens} with max_length {length}, expected less than "
                f"{length - 2}, so that there is room for the tail; lower it, or raise --max_length"
            )
        step = self.window_step or (min(task.window_step, length // 3) if task.window_step else length // 2 - 1)
        return replace(self, max_length=length, window_step=step, pooling=self.pooling or pooling)

    @property
    def lengths(self) -> tuple[int, int]:
        """`max_length` and `window_step`; call `for_task` first."""
        assert self.max_length is not None and self.window_step is not None, "for_task comes first"
        return self.max_length, self.window_step

    def for_size(self, parameters: int) -> FinetuneConfig:
        """With the peak learning rate by the number of parameters of the encoder's layers, unless it is given."""
        return replace(self, train=self.train.for_size(parameters))

    def for_units(self, num_units: int) -> FinetuneConfig:
        """With the number of steps of the epochs for `num_units` training units.

        Raises:
            UserError: the steps of the epochs do not fit the other settings.
        """
        per_epoch = num_units / self.train.global_batch_size
        train, evaluation = self.train, self.evaluation
        if train.max_steps is None and self.epochs is not None:  # __post_init__ asks for one of them
            train = replace(train, max_steps=max(1, round(self.epochs * per_epoch)))
        if evaluation.every_steps is None:
            evaluation = replace(evaluation, every_steps=max(1, round((self.evaluate_every_epochs or 1) * per_epoch)))
        # The steps say it now, and the run's config.yaml can be given again.
        counted = replace(self, train=train, evaluation=evaluation, evaluate_every_epochs=None)
        check_warmup(counted)
        return counted
