"""Pretraining as a recipe of `train`: its model, data, objective and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import TrainState
from cloze.launch.config import PretrainConfig
from cloze.launch.config.training import AUTO
from cloze.launch.engine.engine import Engine
from cloze.launch.pretrain.device_defaults import crowded, differences, facts_of, resolve_compile
from cloze.launch.pretrain.first_model import build_model, check_word_vectors, take_word_vectors
from cloze.launch.pretrain.init_from import Start
from cloze.launch.pretrain.inputs import RunInputs, open_inputs
from cloze.launch.pretrain.micro_batch_size import resolve
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.readers import cache_facts, open_training, read_once
from cloze.launch.pretrain.schedules import batch_warmup, run_masking, samples_of_run
from cloze.launch.pretrain.shapes import local_description
from cloze.launch.pretrain.source_statistics import Sources
from cloze.launch.pretrain.validation import make_show, open_validation, validation_sets
from cloze.launch.pretrained.origin import keep_origin
from cloze.launch.run import integrity, runs
from cloze.launch.run.metrics import MetricsWriter
from cloze.launch.system.console import Console
from cloze.launch.system.devices import data_sheet_of, take_flash_attention_3
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.training.evaluation import Measure, evaluate_sets
from cloze.launch.training.process import Process
from cloze.launch.training.recipe import Recipe
from cloze.launch.training.start_table import origin_of_rate, training_facts
from cloze.model.bert import BertPreTrained
from cloze.model.flops import TokenCounts, encoder_weights, num_parameters
from cloze.model.parametrization import describe
from cloze.pipeline.config import PAIR_OBJECTIVES
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.loading.batches import BatchStream
from cloze.pipeline.storage import sha256_of
from cloze.pipeline.tokenization.tokenizer import Tokenizer, copy_tokenizer


@contextmanager
def open_pretraining(config: PretrainConfig, environment: Environment, console: Console) -> Iterator[Pretraining]:
    """Context with the recipe of a run, whose inputs are open. Collective.

    Raises:
        UserError: as `open_inputs`.
    """
    with read_once(config, environment):
        recipe = Pretraining(open_inputs(config, environment.world_size))
        if config.train.learning_rate == AUTO:
            model = recipe.config.model
            whose = "the model's" if model.parametrization == "standard" else "its base's"
            origin = origin_of_rate(AUTO, encoder_weights(model.base_shape), whose)
            console.say(f"peak rate: {recipe.config.train.learning_rate:g}, {origin}")
            if config.init_from:
                console.say(
                    "that is a rate for random weights; --config adapt has what continues a model (docs/adapt.md)"
                )
        for manifest in recipe.data.manifests:
            if manifest.remark:
                console.warn(manifest.remark)
        yield recipe


class Pretraining(Recipe):
    """A run of `cloze pretrain`."""

    config: PretrainConfig
    objective: Objective

    def __init__(self, inputs: RunInputs) -> None:
        self.config, self.data, self.held_out, self.objective, self.callbacks, self.facts = inputs
        self.ema = self.config.ema
        if self.data.names:
            self.sources = Sources(self.data, self.config.streams, self.objective.pretraining_output)
        self._num_parameters = 0
        self._start: Start | None = None

    def open(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> None:
        """Open the shards, and for a new run the weights that it starts from. Collective."""
        config, data = self.config, self.data
        self._training = open_training(config, data, process.environment, process.device)
        if not self.held_out:
            process.console.warn(f"{data.manifest.folder}: the validation split is empty; nothing is evaluated")
        measured = {each.name for each in self.held_out}
        for name in (*data.names, *config.evaluation.sets) if self.held_out else ():
            if name not in measured:
                process.console.warn(f"the validation split of {name} is empty; it has no curves of its own")
        self._validation = open_validation(config, self.held_out, process)
        if step is None and config.init_word_vectors:
            check_word_vectors(Path(config.init_word_vectors), config.model.embedding_width)
        if step is None and config.init_from:
            self._start = Start(config, data.manifest, checkpoints, process.console)

    def choose_by_device(self, process: Process) -> None:
        """Choose kernels, compilation and the size of micro-batches. Collective."""
        super().choose_by_device(process)
        console, device, dropout = process.console, process.device, self.config.model.attention_probs_dropout_prob
        if why := take_flash_attention_3(device, dropout):
            console.warn(f"flash attention 3 is installed and cannot be used ({why}); version 2 computes")
        config = resolve_compile(self.config, device, console)
        build = partial(build_model, config, self.objective)
        self.config = resolve(config, self.data, self.objective, build, process.environment, device, console)

    def build_model(self, process: Process, checkpoints: CheckpointManager, step: int | None) -> BertPreTrained:
        """The model with random weights, word vectors, or those of `init_from`. Collective."""
        config, console = self.config, process.console
        model = build_model(config, self.objective)
        if step is None and config.init_word_vectors:
            vectors = Path(config.init_word_vectors)
            take_word_vectors(vectors, self._tokenizer, model, console)
            self.first_weights = sha256_of(vectors)
        if self._start:
            self._start.take(model, console)
            self.first_weights = self._start.source.hash
            self.needs_conversion = self._start.elastic
        self._num_parameters = num_parameters(model)  # before ZeRO-3 partitions them
        sheet = data_sheet_of(process.device) if process.device.type == "cuda" else None
        if sheet is not None:
            flops = self._flops_per_token() * self.data.num_tokens / self.data.num_samples
            if line := crowded(config, process.environment.world_size, flops, self._num_parameters, sheet):
                console.warn(line)
        return model

    @property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.data.manifest.folder / runs.TOKENIZER)

    def table(self, process: Process, engine: Engine) -> tuple[str, list[tuple[str, str]]]:
        config, data = self.config, self.data
        tokens, samples = data.num_tokens, data.num_samples
        steps_per_epoch = samples / config.train.global_batch_size
        epochs = (
            f"{config.train.max_steps / steps_per_epoch:.2f} epochs of {steps_per_epoch:,.1f} steps "
            f"({samples:,} samples, {tokens:,} tokens)"
        )
        entropies = ", ".join(
            f"{name} {manifest.unigram_entropy:.3f}".lstrip()
            for name, manifest in zip(data.names or ("",), data.manifests, strict=True)
        )
        return f"cloze pretrain -> {process.shown(config).output}", [
            ("parameters", f"{self._num_parameters:,}"),
            ("FLOPs a token", f"{_millions(self._flops_per_token())} M, forward and backward"),
            *([("parametrization", describe(config.model))] if config.model.parametrization == "mup" else []),
            *data.described(),
            *training_facts(config, process, engine, epochs),
            *cache_facts(config, data),
            ("MLM loss to beat", f"{entropies}, the unigram entropy of the training tokens"),
            *([("best by", config.evaluation.metric)] if config.evaluation.keep_best and self.held_out else []),
        ]

    def _flops_per_token(self) -> float:
        """Mean over the run, by the lengths of the corpus."""
        config, histogram = self.config, self.data.length_histogram
        lengths = np.arange(len(histogram))
        size, squares = float(lengths @ histogram), float(lengths**2 @ histogram)
        masking = run_masking(config, self.data)
        next_tokens = masking.mean_causal_share(samples_of_run(config, self.data))
        predicted = next_tokens + (1 - next_tokens) * self.data.most_masked(masking)
        return self.objective.flops(TokenCounts(size, squares, predicted * size)) / size

    def first_state(self, engine: Engine, process: Process) -> TrainState:
        """The state of a new run, with the optimizer states of `init_from` if they are asked for. Collective."""
        return self._start.finish(engine, process.console) if self._start else TrainState()

    def make_evaluation(self, engine: Engine, process: Process, resumed: bool) -> Measure | None:
        """What measures the loss on the validation sets; also warns of a resume on another device. Collective."""
        self._compare_devices(process, resumed)
        if sets := validation_sets(self.config, self._validation, process):
            return partial(evaluate_sets, engine, self.objective, sets, process.device)
        return None

    def _compare_devices(self, process: Process, resumed: bool) -> None:
        decided, output = facts_of(self.config, process.device), Path(self.config.output)
        if resumed and (changed := differences(self.config, runs.device_facts(output), decided)):
            process.console.warn(changed)
        if process.environment.is_main:
            runs.keep_device_facts(output, decided)

    def save_tokenizer(self, folder: Path) -> None:
        copy_tokenizer(self._tokenizer, folder)

    def save_origin(self, folder: Path) -> None:
        source, output = self._start.source.path if self._start else None, Path(self.config.output)
        kept = integrity.seal_of(output / runs.ORIGIN) is not None or not (output / runs.SOFTWARE).is_file()
        if source is None and self.config.init_from and kept:
            # of a run that goes on, whose folder was removed
            source = runs.model_folder(local_description(self.config.init_from))
        if source is not None:
            pairs = any(manifest.objective in PAIR_OBJECTIVES for manifest in self.data.manifests)
            segments = self.config.model.type_vocab_size > 1
            keep_origin(source, folder, self._tokenizer, pairs=pairs, segments=segments)

    def make_show(self, engine: Engine, metrics: MetricsWriter | None) -> Callable[[int], None]:
        return make_show(self.config, self.data, engine, metrics)

    def kept_facts(self) -> dict[str, object]:
        """The number of data streams, which the order of samples depends on."""
        return {"data_streams": self.config.data_streams}

    def flops(self, micro_batch: MicroBatch) -> float:
        return self.objective.flops(TokenCounts.of_micro_batch(micro_batch))

    def open_stream(self, state: TrainState, process: Process) -> AbstractContextManager[BatchStream]:
        """This rank's batches from the state's position on."""
        config, environment = self.config, process.environment
        return closing(
            BatchStream(
                self._training,
                global_batch_size=config.train.global_batch_size,
                micro_batch_size=config.train.micro_batch,
                rank=environment.rank,
                world_size=environment.world_size,
                streams=config.streams,
                seed=config.seed,
                samples_consumed=state.samples_consumed,
                warmup=batch_warmup(config, self.data),
                segments=config.model.segments,
                masking=run_masking(config, self.data),
            )
        )


def _millions(count: float) -> str:
    """A count in millions, with at least four digits."""
    return f"{count / 1e6:,.1f}" if count >= 1e9 else f"{count / 1e6:.4g}"
