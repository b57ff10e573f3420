"""`cloze pretrain`: shards in, checkpoints and curves out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cloze.launch.config import DeepSpeedConfig, PretrainConfig
from cloze.launch.engine.building import build_engine
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.engine.state import full_parameter
from cloze.launch.pretrain.choices import differences, facts_of, resolve_compile
from cloze.launch.pretrain.guesses import Guesses
from cloze.launch.pretrain.objectives import PretrainingObjective
from cloze.launch.pretrain.phases import Start
from cloze.launch.pretrain.probing import resolve
from cloze.launch.run import runs
from cloze.launch.run.preemption import StopRequest
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.environment import Environment
from cloze.launch.training import running
from cloze.launch.training.evaluation import evaluate
from cloze.launch.training.running import Process
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.flops import num_parameters, training_flops
from cloze.model.initialization import init_weights, init_word_embeddings
from cloze.pipeline.errors import UserError
from cloze.pipeline.loading.batches import BatchStream, BatchWarmup, evaluation_batches
from cloze.pipeline.loading.order import choose_streams
from cloze.pipeline.samples.masking import RateSchedule
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.shards import ShardReader
from cloze.pipeline.storage import readable_errors
from cloze.pipeline.tokenization.tokenizer import Tokenizer


def pretrain(config: PretrainConfig, environment: Environment) -> int:
    """Run or continue a pretraining; returns the exit status. Called by every process of the run, with what
    `prepare_process` has returned.
    """
    deepspeed_config(config, environment.world_size)  # whatever is wrong in it is said before anything is written
    manifest, model = check_data(Path(config.data), config.model, config.train.sequence_length)
    check_masking(config, manifest)
    config = replace(config, model=model, train=config.train.on(environment.world_size))
    config = replace(config, data_streams=choose_data_streams(config, environment.world_size))
    console = Console(environment.is_main)
    if manifest.remark:
        console.warn(manifest.remark)

    def work(process: Process, stop: StopRequest) -> bool:
        resolved = resolve_compile(config, process.device, process.console)
        resolved = resolve(resolved, manifest, build_model, environment, process.device, process.console)
        return train(resolved, prepare_trainer(resolved, manifest, process), stop)

    return running.carry_out(config, runs.data_facts(manifest), environment, console, work)


def check_data(data: Path, model: BertConfig, longest: int | None = None) -> tuple[Manifest, BertConfig]:
    """The manifest, and the model with what the data decides filled in.

    Args:
        longest: tokens of the longest sequence that the run is meant for; None: any.

    Raises:
        UserError: vocabulary, length or tokenizer of shards and model do not match.
    """
    manifest = Manifest.load(data)
    if model.vocab_size not in (0, manifest.vocab_size):
        raise UserError(f"model.vocab_size: found {model.vocab_size}, expected {manifest.vocab_size}, the vocabulary "
                        f"of the shards in {data}; leave it at 0 to take theirs")
    tokenizer = Tokenizer.from_folder(data / runs.TOKENIZER)
    found = tokenizer.fingerprint
    if found != manifest.tokenizer_fingerprint:
        raise UserError(f"{data / runs.TOKENIZER}: found a tokenizer with fingerprint {found[:12]}, expected "
                        f"{manifest.tokenizer_fingerprint[:12]}, the one that made the shards; prepare the data again")
    if tokenizer.special_tokens != manifest.special_tokens:
        raise UserError(f"{data / runs.TOKENIZER}: found special tokens {tokenizer.special_tokens}, expected "
                        f"{manifest.special_tokens}, those of the manifest; prepare the data again")
    if longest is not None and manifest.max_length > longest:
        raise UserError(f"train.sequence_length: found {longest}, expected at least {manifest.max_length}, the "
                        f"max_length of the shards in {data}; give the shards that the run is meant for, or set it to "
                        "null")
    if manifest.max_length > model.max_position_embeddings:
        raise UserError(f"model.max_position_embeddings: found {model.max_position_embeddings}, expected at least "
                        f"{manifest.max_length}, the max_length of the shards in {data}")
    return manifest, replace(model, vocab_size=manifest.vocab_size, pad_token_id=manifest.special_tokens.pad)


def choose_data_streams(config: PretrainConfig, world_size: int) -> int:
    """The run's number of streams: as given, as in its earlier parts, or as the batch sizes allow.

    Raises:
        UserError: its earlier parts had none.
    """
    sizes = list(config.train.batch_sizes.values())
    saved = runs.saved_data_streams(Path(config.output), config.checkpoint.accept_changes)
    fits = saved is not None and not any(size % saved for size in sizes)  # else it is the batch that has changed
    return config.data_streams or (saved if fits else choose_streams(sizes, world_size))


def open_split(config: PretrainConfig, split: str, environment: Environment, device: torch.device) -> ShardReader:
    """Reader of a split. Rank 0 alone asks for the sizes of all shards, and the others hear what it found. Collective.

    Raises:
        UserError: a shard is missing or has another size.
    """
    with distributed.together("find the shards", config.data, device):
        return ShardReader(config.data, split, check_sizes=environment.is_main)


def print_deepspeed_config(config: DeepSpeedConfig, environment: Environment) -> None:
    """Print, as JSON, what a run of so many processes would give to DeepSpeed; nothing is started."""
    print(json.dumps(deepspeed_config(config, config.processes), indent=1))


def build_model(config: PretrainConfig):
    """The model of the run with its initial weights."""
    model = BertForPreTraining(config.model, attention_kernel=config.train.attention_kernel,
                               gradient_checkpointing=config.train.gradient_checkpointing)
    init_weights(model, config.seed)
    if config.train.compile:
        model.bert.encoder.compile_layers()
    return model


def take_word_vectors(config: PretrainConfig, model, console: Console) -> None:
    """Copy the vectors of `init_word_vectors` into a freshly drawn model; a token without one stays as drawn.

    Raises:
        UserError, ModelError: there is no such file, or its vectors are not those of tokens, in the model's width.
    """
    path, tokens = Path(config.init_word_vectors), Tokenizer.from_folder(Path(config.data) / runs.TOKENIZER).tokens
    numbers = {token: number for number, token in enumerate(tokens) if token and number != config.model.pad_token_id}
    with readable_errors(path):
        found = init_word_embeddings(model, path, numbers)
    console.say(f"init_word_vectors: {found:,} of {len(numbers):,} tokens start from {path}")


def prepare_trainer(config: PretrainConfig, manifest: Manifest, process: Process):
    """Model, engine and trainer, at the step of the newest checkpoint if there is one; then the folder is described."""
    environment, console = process.environment, process.console
    checkpoints, step, elastic = running.open_checkpoints(config, runs.data_facts(manifest), process)
    model = build_model(config)
    torch.manual_seed(config.seed)  # nothing here draws from it; whatever a library draws is then the same each time
    if step is None and config.init_word_vectors:
        take_word_vectors(config, model, console)
    start = Start(config, manifest, model, checkpoints, console) if step is None and config.init_from else None
    parameters = num_parameters(model)  # before ZeRO-3 empties them
    made = deepspeed_config(config, environment.world_size, load_universal=start.elastic if start else elastic)
    engine = build_engine(model, config, made, process.device)
    _print_facts(config, manifest, process, engine, parameters)
    objective = PretrainingObjective(config.train.loss_reduction)
    batches = validation(config, manifest, process)
    trainer = running.make_trainer(
        config, process, engine, checkpoints,
        facts={**runs.data_facts(manifest), "data_streams": config.data_streams}, objective=objective,
        evaluate=None if batches is None else partial(evaluate, engine, objective, batches, process.device),
        flops=partial(_micro_batch_flops, config.model),
    )
    if start:
        start.finish(trainer, console)
    running.resume(trainer, step)
    decided, output = facts_of(config, process.device), Path(config.output)
    if step is not None and (told := differences(config, runs.device_facts(output), decided)):
        console.warn(told)
    if environment.is_main:
        runs.keep_device_facts(output, decided)
        save_tokenizer = partial(shutil.copytree, manifest.folder / runs.TOKENIZER)
        runs.describe(config, runs.data_facts(manifest), save_tokenizer, made)
    return trainer


def _print_facts(config: PretrainConfig, manifest: Manifest, process: Process, engine, parameters: int) -> None:
    counts = manifest.splits["train"].counts
    tokens, samples = counts["tokens"], counts["samples"] // manifest.pair_sets  # an epoch goes over one set of pairs
    histogram = manifest.splits["train"].length_histogram
    squares = sum(length * length * number for length, number in enumerate(histogram))
    masked = manifest.masked_share if config.masking.rate is None else config.masking.rate
    per_token = training_flops(config.model, (tokens, squares), masked * tokens, summed=True) / tokens
    steps_per_epoch = samples / config.train.global_batch_size
    epochs = (f"{config.train.max_steps / steps_per_epoch:.2f} epochs of {steps_per_epoch:,.1f} steps "
              f"({samples:,} samples, {tokens:,} tokens)")
    process.console.facts(f"cloze pretrain -> {config.output}", [
        ("parameters", f"{parameters:,}"),
        ("FLOPs a token", f"{per_token / 1e6:,.1f} M, forward and backward"),
        *running.training_facts(config, process, engine, epochs),
        ("MLM loss to beat", f"{manifest.unigram_entropy:.3f}, the unigram entropy of the training tokens"),
    ])


def validation(config: PretrainConfig, manifest: Manifest, process: Process):
    """What makes the validation batches of this rank, or None if no document was held out. Collective.

    Raises:
        UserError: something is to be decided by a validation that cannot be.
    """
    if not manifest.splits["validation"].counts.get("samples"):
        for name in ("keep_best", "patience", "target"):
            if getattr(config.evaluation, name):
                raise UserError(f"evaluation.{name}: found {getattr(config.evaluation, name)}, expected none: the "
                                f"validation split of {config.data} is empty; prepare the data with one")
        process.console.warn(f"{config.data}: the validation split is empty; nothing is evaluated")
        return None
    return partial(
        evaluation_batches, open_split(config, "validation", process.environment, process.device),
        micro_batch_size=config.train.micro_batch_size, rank=process.environment.rank,
        world_size=process.environment.world_size, max_samples=config.evaluation.samples,
        segments=config.model.segments,
    )


def train(config: PretrainConfig, trainer, stop: StopRequest) -> bool:
    """Feed the trainer from where it stands until it is complete (True) or was asked to stop (False)."""
    environment = trainer.environment
    reader = open_split(config, "train", environment, trainer.device)
    stream = BatchStream(
        reader, global_batch_size=config.train.global_batch_size, micro_batch_size=config.train.micro_batch_size,
        rank=environment.rank, world_size=environment.world_size, streams=config.data_streams, seed=config.seed,
        samples_consumed=trainer.state.samples_consumed, warmup=batch_warmup(config, reader.manifest),
        segments=config.model.segments,
        masking_rate=masking_rate(config),
    )
    try:
        shown = partial(showing, config, trainer) if trainer.evaluate else None
        return running.run(config, trainer, stream, stop, shown)
    finally:
        stream.close()


def check_masking(config: PretrainConfig, manifest: Manifest) -> None:
    """Raise UserError for a masking rate where the shards hold their masks."""
    if config.masking.rate is not None and manifest.mask_sets:
        raise UserError(f"masking.rate: found {config.masking.rate} with shards in {config.data} that hold their "
                        "masks, expected null; or prepare them with --masking.mode dynamic")


def masking_rate(config: PretrainConfig) -> RateSchedule | None:
    """The masking rate over the samples of the run; None: the manifest's."""
    chosen = config.masking
    if chosen.rate is None:
        return None
    end = config.train.max_steps * config.train.global_batch_size
    return RateSchedule(chosen.rate, chosen.final_rate or chosen.rate, round(chosen.change_begins * end), end)


def batch_warmup(config: PretrainConfig, manifest: Manifest) -> BatchWarmup | None:
    """How global batches grow: by tokens, which are counted by the mean of a sample, so that all ranks know the size of
    every batch without asking."""
    train, counts = config.train, manifest.splits["train"].counts
    if train.initial_global_batch_size is None:
        return None
    samples = -(-train.batch_warmup_tokens * counts["samples"] // counts["tokens"])
    return BatchWarmup(train.initial_global_batch_size, train.increment, samples)


def showing(config: PretrainConfig, trainer, metrics):
    """What each evaluation shows beside its numbers: blanks and guesses, word embeddings."""
    reader = ShardReader(config.data, "validation", check_sizes=False)
    tokenizer = Tokenizer.from_folder(Path(config.data) / runs.TOKENIZER)
    count = min(config.monitor.examples, reader.num_samples)
    guesses = count and Guesses(trainer.engine, trainer.device, reader, tokenizer, count, config.model.segments,
                                metrics)

    def show(step: int) -> None:
        if guesses:
            guesses(step)
        if config.monitor.embeddings:
            table = full_parameter(trainer.engine, trainer.engine.module.bert.embeddings.word.weight)
            if metrics:
                names = [json.dumps(token)[1:-1] or "?" for token in tokenizer.tokens]  # no tabs, no line breaks
                metrics.embeddings(step, table[:len(names)], names)

    return show


def _micro_batch_flops(config: BertConfig, micro_batch: dict) -> float:
    """Model FLOPs of a micro-batch, from its real lengths."""
    offsets = micro_batch["sequence_offsets"].long()
    lengths = offsets[1:] - offsets[:-1]
    sizes = int(offsets[-1]), int((lengths * lengths).sum())
    return training_flops(config, sizes, len(micro_batch["labels"]), summed=True)
