"""Fine-tuning as a recipe of `train`: its model, examples, loss, evaluation and report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import TrainState, train_state
from cloze.launch.config import FinetuneConfig
from cloze.launch.engine.engine import Engine
from cloze.launch.finetune.examples.base import ExampleStream
from cloze.launch.finetune.features import encode_once
from cloze.launch.finetune.job import Job, read_job
from cloze.launch.finetune.models import freeze, share_of_backward, start_model, unfreezing
from cloze.launch.finetune.reporting import Evaluation, check_metric, report, where
from cloze.launch.pretrained.origin import keep_origin
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training.evaluation import Measure
from cloze.launch.training.loop import Loop
from cloze.launch.training.objective import TrainingObjective
from cloze.launch.training.process import Process
from cloze.launch.training.recipe import Recipe
from cloze.launch.training.start_table import training_facts
from cloze.model.bert import BertPreTrained
from cloze.model.flops import TokenCounts, num_parameters, training_flops
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.loading.batches import RankBatch
from cloze.pipeline.tokenization.tokenizer import copy_tokenizer


@contextmanager
def open_finetuning(config: FinetuneConfig, environment: Environment, console: Console) -> Iterator[Finetuning]:
    """Context with the recipe of a run, whose inputs are read.

    Raises:
        UserError, ModelError: as `read_job`.
    """
    console.say("reading the model and the examples")
    job = read_job(config)
    job = replace(job, config=replace(job.config, train=job.config.train.on(environment.world_size)))
    _warn_of_length(job, console)
    hashes = job.hashes
    if hashes[job.config.train_file] == hashes[job.config.validation]:
        console.warn(
            f"validation: found the examples that are learned from ({job.config.validation}), expected others: its "
            "metrics, by which the best checkpoint is chosen, say what is known by heart"
        )
    yield Finetuning(job, environment.rank)


def _warn_of_length(job: Job, console: Console) -> None:
    known, config = job.source.trained_length, job.config
    if known and known < min(config.lengths[0], job.train.longest):
        console.warn(
            f"max_length: found {config.max_length}, more than the {known} tokens that {config.model} "
            "was trained on: its further positions are trained on these examples only; pretrain a phase of "
            f"that length, or give --max_length {known}"
        )


class Finetuning(Recipe):
    """A run of `cloze finetune`."""

    config: FinetuneConfig

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.config, self.facts = job.config, job.facts
        self.objective: TrainingObjective = job.kind.objective(job.config, job.train, rank)
        self._train = job.train
        """What the model is trained on: the examples, or features of them."""
        self._model_step = job.source.step

    def open(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> None:
        """Nothing, but for a check: model and examples have been read."""
        if step is not None:
            check_metric(self.config, train_state(checkpoints.state(step)), process)

    def build_model(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> BertPreTrained:
        """The pretrained model with a head for the task; what is frozen is so from here on."""
        job = self.job
        if step is not None:  # the source's newest checkpoint may be another one than at the first start
            self._model_step = checkpoints.state(step).get("model_step")
        source = replace(job.source, step=self._model_step)
        self._model, self._origin = start_model(job.architecture, source, job.head, self.config)
        self._num_parameters = num_parameters(self._model)
        freeze(self._model, self.config.freeze)
        return self._model

    def table(self, process: Process, engine: Engine) -> tuple[str, list[tuple[str, str]]]:
        job, config = self.job, self.config
        names = job.head.labels if job.head else ()
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        assert config.train.max_steps is not None, "read_job has counted them"
        epochs = f"{config.train.max_steps * config.train.global_batch_size / len(job.train):.2f} epochs"
        return f"cloze finetune {config.task} -> {process.shown(config).output}", [
            ("parameters", f"{self._num_parameters:,}, of which {num_parameters(self._model):,} learn"),
            ("weights", self._origin),
            *([("labels", f"{len(names)}: {shown}")] if names else []),
            ("metrics", job.validation.measured),
            *((f"{examples.name}", examples.facts) for examples in (job.train, job.validation, *job.test)),
            *training_facts(config, process, engine, epochs, job.rate),
        ]

    def make_evaluation(self, engine: Engine, process: Process, resumed: bool) -> Measure:
        """What measures the metrics of the task. A frozen encoder runs here over all examples, once. Collective."""
        validation = self.job.validation
        if self.config.freeze == "encoder":
            examples = self._train, validation
            beat = partial(process.heartbeat.beat, 0, "compute")
            began = time.perf_counter()
            engine.model.eval()
            with engine.as_in_a_step():
                self._train, validation = (
                    encode_once(
                        engine.model.features,
                        each,
                        self.config.train.micro_batch,
                        process.environment,
                        process.device,
                        beat,
                    )
                    for each in examples
                )
            engine.model.train()
            process.console.say(
                f"the encoder has run over {sum(map(len, examples)):,} examples once, in "
                f"{time.perf_counter() - began:.1f} s; only the head is trained from here on"
            )
        self._evaluation = Evaluation(validation, self.config.train.micro_batch, engine, process.environment)
        return self._evaluation

    def save_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self.job.source.tokenizer, folder)

    def save_origin(self, folder: Path) -> None:
        job = self.job
        if job.source.folder:
            pairs, segments = job.kind.joins(job.config, job.task), job.source.config.type_vocab_size > 1
            keep_origin(job.source.folder, folder, job.source.tokenizer, pairs=pairs, segments=segments)

    def make_show(self, engine: Engine, metrics: MetricsWriter | None) -> Callable[[int], None]:
        return partial(self._evaluation.show, metrics)

    def kept_facts(self) -> Fields:
        """The step of the checkpoint whose weights the run began from."""
        return {"model_step": self._model_step}

    def flops(self, micro_batch: MicroBatch) -> float:
        """Model FLOPs of a micro-batch, from its real lengths; heads are neglected (below a thousandth). A third is the
        forward of all layers, the rest the backward of those that it goes through.
        """
        if "features" in micro_batch:
            return 0.0
        whole = training_flops(self._model.config, replace(TokenCounts.of_micro_batch(micro_batch), masked=0))
        return whole * (1 + 2 * share_of_backward(self._model)) / 3

    def open_stream(self, state: TrainState, process: Process) -> AbstractContextManager[Iterator[RankBatch]]:
        """This rank's batches from the state's position on."""
        config, environment = self.config, process.environment
        stream = ExampleStream(
            self._train,
            config.train.global_batch_size,
            config.train.micro_batch,
            environment.rank,
            environment.world_size,
            config.seed,
            state.samples_consumed,
        )
        if config.unfreeze_every_epochs is None:
            return nullcontext(iter(stream))
        steps = max(1, round(config.unfreeze_every_epochs * len(self._train) / config.train.global_batch_size))
        return nullcontext(unfreezing(iter(stream), self._model, state.step, steps))

    def finish(self, loop: Loop, process: Process, stop: StopRequest) -> bool:
        """Write the results, predictions and the model."""
        return report(self.job, self._model_step, loop, process, stop)

    def last_lines(self, process: Process) -> list[str]:
        return where(self.config, self.job.task, self.job.kind, process.stored)
