"""`train.micro_batch_size: auto`: finds the largest micro-batch that fits into memory by trial, once per run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from cloze.launch.config import PretrainConfig
from cloze.launch.config.training import divisors
from cloze.launch.engine.config import deepspeed_config
from cloze.launch.engine.engine import Engine
from cloze.launch.pretrain.data import TrainingData
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.masked import MaskedTokens
from cloze.launch.pretrain.schedules import run_masking
from cloze.launch.run import runs
from cloze.launch.system import distributed
from cloze.launch.system.console import Console
from cloze.launch.system.devices import to_device
from cloze.launch.system.environment.launchers import Environment, processes_on_this_machine
from cloze.launch.system.exit_status import out_of_memory
from cloze.launch.system.memory import GIB, available_bytes, peak_bytes, resident_bytes
from cloze.launch.training.objective import ModelOutput
from cloze.model.config import BertConfig
from cloze.model.flops import encoder_weights
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import Fields, MicroBatch
from cloze.pipeline.loading.collate import concatenated
from cloze.pipeline.loading.streams import RunMasking

# Share of memory kept free for what the probe does not measure: NCCL's buffers of later collectives (evaluation,
# checkpoints), workspaces of kernels chosen for other shapes, other processes on the GPU. Fragmentation is small: a
# simulation of torch's allocator with BERT-base's batches of changing lengths needed up to 37% more than one shape, but
# within 1% of the tensors' size with expandable segments (launch/system/environment/process.py).
SPARE_SHARE = 0.1
# Masked tokens of the probe's sequences relative to the run's masking rate: some sequences have more than others.
MASKED_MARGIN = 1.25
PROBE_SEED = 0
PROBE_RATE = 1e-4  # of the steps, whose weights are thrown away
# Batches with lengths drawn from the corpus, after the longest ones, so that the allocator's behaviour with changing
# sizes is measured too.
MIXED_BATCHES = 2
# On a CPU the largest micro-batch is not the fastest: a layer's activations should stay in the caches.
CPU_MICRO_BATCH = 32
# The factors of an upper bound of what a process on a CPU needs, in fp32 values.
_OF_PARAMETER = 10  # per parameter: its weight, gradient, two moments, copies and DeepSpeed's buffers
_OF_HIDDEN = 15  # per token and layer, times the hidden size
_OF_INNER = 5  # per token and layer, times the inner size
_OF_PROBABILITY = 5  # per token, layer and head, times the tokens of a sequence: attention's probabilities
_OF_PREDICTED = 5  # per predicted token, times the size of the vocabulary
# Per token, term of disentangled attention and head, times the tokens of a sequence, in one layer: two products with
# all distances, and their gradient.
_OF_DISTANCE = 4
# Share of the memory up to which that bound makes a probe unnecessary.
_ROOMY_SHARE = 0.5
_LESS_MEMORY = "set train.gradient_checkpointing to all, raise zero.stage, or take a smaller model"


def resolve(
    config: PretrainConfig,
    data: TrainingData,
    objective: Objective,
    build_model: Callable[[], nn.Module],
    environment: Environment,
    device: torch.device,
    console: Console,
) -> PretrainConfig:
    """The configuration with a number for `train.micro_batch_size` if it was auto or null. Collective.

    The saved number of an earlier start is kept if it divides this rank's share of the batch.

    Args:
        build_model: builds the model of the run.

    Raises:
        UserError: not even one sequence fits.
    """
    if config.train.micro_batch_size not in ("auto", None):
        return config
    share = config.train.common_size // environment.world_size  # a remainder was refused before
    candidates = divisors(share)
    saved = distributed.from_main(runs.saved_micro_batch_size(Path(config.output)) or 0, device)
    if saved:
        chosen = max(size for size in candidates if size <= saved)
    elif config.train.micro_batch_size is None and device.type == "cpu":
        chosen = max(_fast_on_cpu(candidates))
    else:
        chosen = _found(config, data, objective, build_model, environment, device, console, candidates)
    return with_micro_batch_size(config, chosen)


def with_micro_batch_size(config: PretrainConfig, size: int) -> PretrainConfig:
    """The same configuration with this number."""
    return replace(config, train=replace(config.train, micro_batch_size=size))


def _fast_on_cpu(candidates: list[int]) -> list[int]:
    return [size for size in candidates if size <= CPU_MICRO_BATCH]


def _found(
    config: PretrainConfig,
    data: TrainingData,
    objective: Objective,
    build_model: Callable[[], nn.Module],
    environment: Environment,
    device: torch.device,
    console: Console,
    candidates: list[int],
) -> int:
    """The size for auto: the most that fit by trial; on a CPU among those that are fast, and without a trial where
    memory cannot matter. Collective.
    """
    given = config.train.memory_limit_gib
    limit = None if given is None else int(given * GIB)
    if device.type == "cuda":
        memory = Memory.of_gpu(device, limit)
    else:
        memory = Memory.of_host(processes_on_this_machine(environment), limit)
        candidates = _fast_on_cpu(candidates)
        most = most_bytes(config.model, data, run_masking(config, data), candidates[-1])
        free = memory.limit() - memory.peak()
        counted = given is None and type(objective) is MaskedTokens
        if counted and not distributed.on_any_rank(most > _ROOMY_SHARE * free, device):
            console.say(
                f"micro-batch: {candidates[-1]} sequences, without a trial: more are no faster on a CPU, and they need "
                f"at most {most / GIB:.1f} of {free / GIB:.1f} GiB"
            )
            return candidates[-1]

    def build() -> Probe:
        return build_probe(config, data, objective, build_model(), environment, device)

    chosen = _search(build, data.max_length, memory, device, console, candidates)
    console.say(f"micro-batch: {chosen} sequences are the most that fit, of {data.max_length} tokens each")
    return chosen


def most_bytes(model: BertConfig, data: TrainingData, masking: RunMasking, size: int) -> int:
    """An upper bound of the memory that a process on a CPU needs for `size` sequences of the maximum length."""
    vocabulary, tokens = data.manifest.vocab_size, size * data.max_length
    rows = 2 * vocabulary + model.max_position_embeddings  # untied, at most
    parameters = encoder_weights(model) + rows * model.embedding_width
    layer = (
        _OF_HIDDEN * model.hidden_size
        + _OF_INNER * model.intermediate_size * (1 + model.gated_feed_forward)
        + _OF_PROBABILITY * model.num_attention_heads * data.max_length
    )
    predicted = min(1.0, MASKED_MARGIN * data.most_masked(masking)) * tokens
    values = _OF_PARAMETER * parameters + tokens * model.num_hidden_layers * layer
    if model.relative_terms:
        width, terms = model.hidden_size, len(model.relative_terms)
        maps = model.num_hidden_layers * terms * width**2 if model.relative_projections else 0
        values += _OF_PARAMETER * (2 * model.relative_span * width + maps)
        values += tokens * _OF_DISTANCE * terms * model.num_attention_heads * data.max_length
    return int(4 * (values + _OF_PREDICTED * predicted * vocabulary))


@contextlib.contextmanager
def _catching_out_of_memory(instead: UserError | None = None) -> Iterator[None]:
    """Leave the block where an allocation fails; nothing keeps the error, whose frames hold tensors.

    Args:
        instead: raised in its place.
    """
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        if instead is not None:
            raise instead from error


def _search(
    build: Callable[[], Probe],
    max_length: int,
    memory: Memory,
    device: torch.device,
    console: Console,
    candidates: list[int],
) -> int:
    """The largest candidate that fits, by trial of sequences of this length. Collective."""
    console.say("micro-batch: building a model and an engine like the run's to try sizes")
    nothing_fits = UserError(
        "train.micro_batch_size: found no memory for the model and its optimizer alone, expected room "
        "for them and a micro-batch; raise zero.stage, or take a smaller model"
    )
    with _catching_out_of_memory(nothing_fits):
        probe = build()

    def run(size: int, agree: Callable[[bool], bool]) -> bool:
        console.say(f"micro-batch: trying {size} sequence{'s' * (size > 1)} of {max_length} tokens")
        return probe.run(size, agree)

    try:
        return largest_that_fits(candidates, run, memory, lambda fits: not distributed.on_any_rank(not fits, device))
    finally:
        probe.release()


@dataclass(frozen=True)
class Memory:
    """Memory of this process, in bytes."""

    peak: Callable[[], int]
    """The most so far."""
    limit: Callable[[], int]
    """What the process may use."""

    @classmethod
    def of_gpu(cls, device: torch.device, given: int | None) -> Memory:
        """That of the process's GPU, of which it may use what it has and what is free.

        Args:
            given: the limit, instead; as of `of_host`.
        """

        def limit() -> int:
            return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if given is None else given

        return cls(lambda: torch.cuda.max_memory_reserved(device), limit)

    @classmethod
    def of_host(cls, processes: int, given: int | None = None) -> Memory:
        """That of the machine, which `processes` processes of the run share.

        Raises:
            UserError: no limit is given, and the system does not report its free memory.
        """
        if given is None:
            held, free = resident_bytes(), available_bytes()
            if held is None or free is None:
                raise UserError(
                    "train.micro_batch_size: found auto on a system that does not tell its free memory, expected Linux "
                    "or a GPU; give a number, or train.memory_limit_gib"
                )
            # Computed at the start, when the other processes use as little memory as this one.
            given = held + free // processes
        return cls(peak_bytes, lambda: given)


def largest_that_fits(
    candidates: list[int],
    run: Callable[[int, Callable[[bool], bool]], bool],
    memory: Memory,
    agree: Callable[[bool], bool],
) -> int:
    """The largest candidate that every rank can run. Collective.

    A size is tried only if all ranks expect it to fit, by the peaks of smaller sizes: a rank that runs out of memory
    within a reduction leaves the others waiting, and a machine without memory kills processes.

    Args:
        run: (size, agree) -> whether the size ran on all ranks; False: a rank was out of memory, and all ranks stopped.
        agree: this rank's bool -> whether it is true on all ranks.

    Raises:
        UserError: the first candidate does not fit.
    """
    peaks = [(0, memory.peak())]
    best = 0
    for size in _with_intermediate_sizes(candidates):
        (first, low), (last, high) = peaks[-2] if len(peaks) > 1 else peaks[0], peaks[-1]
        slope = (high - low) / (last - first) if last > first else 0.0
        expected = high + slope * (size - last)
        if not agree(expected <= memory.limit() * (1 - SPARE_SHARE)) or not run(size, agree):
            break
        peaks.append((size, memory.peak()))
        if not agree(peaks[-1][1] <= memory.limit() * (1 - SPARE_SHARE)):
            break
        best = size if size in candidates else best
    if not best:
        raise UserError(
            f"train.micro_batch_size: found no size that fits: the peak was {memory.peak() / GIB:.1f} GiB at "
            f"{candidates[0]} sequences, expected at most {1 - SPARE_SHARE:.0%} of {memory.limit() / GIB:.1f} GiB; "
            f"{_LESS_MEMORY}"
        )
    return best


def _with_intermediate_sizes(candidates: list[int]) -> Iterator[int]:
    """The candidates, ascending, with sizes between distant ones: a measurement predicts at most the doubled size."""
    for size, further in pairwise(candidates):
        yield size
        while (size := 2 * size) < further:
            yield size
    yield candidates[-1]


@dataclass(frozen=True)
class ProbeBatches:
    """Batches of random tokens on a device, with the lengths of a run's batches."""

    max_length: int
    """Tokens of the longest sequence that the run can have."""
    length_histogram: np.ndarray | Sequence[int]
    """Sequences of each length in the corpus, from 0 to `max_length`."""
    vocab_size: int
    masked_share: float
    """The largest share of a sequence's tokens that the run masks."""
    device: torch.device
    next_tokens: bool = False
    """Whether the run also has batches with every next token to predict, and causal attention."""

    def of(self, size: int) -> list[Fields]:
        """A batch of `size` sequences of maximum length, and MIXED_BATCHES batches of `size` with lengths drawn from
        the histogram; inputs of `BertForPreTraining.forward`. With `next_tokens` those with causal attention first, and
        all of them again with masked ones.
        """
        generator = torch.Generator().manual_seed(PROBE_SEED)
        histogram = torch.as_tensor(self.length_histogram, dtype=torch.float64)
        drawn = torch.multinomial(histogram, MIXED_BATCHES * size, replacement=True, generator=generator)
        longest = torch.full((1, size), self.max_length)
        parts = (True, False) if self.next_tokens else (False,)
        every = torch.cat((longest, drawn.view(-1, size)))
        return [self._batch(lengths, causal, generator) for causal in parts for lengths in every]

    def _batch(self, lengths: torch.Tensor, causal: bool, generator: torch.Generator) -> Fields:
        """Sequences of these lengths (size,), with the maximum number of tokens to predict."""
        share = min(1.0, MASKED_MARGIN * self.masked_share)
        # Nothing follows a sequence's last token; with it all tokens would be read, for which there is another graph.
        predicted = lengths - 1 if causal else (share * lengths).ceil()
        starts, tokens = lengths.cumsum(0) - lengths, int(lengths.sum())
        ids = torch.randint(self.vocab_size, (tokens,), generator=generator)
        places = torch.arange(tokens) - starts.repeat_interleave(lengths)
        positions = (places < predicted.repeat_interleave(lengths)).nonzero()[:, 0]
        offsets = torch.cat((starts, torch.tensor([tokens]))).numpy()
        (batch,) = concatenated(ids.numpy(), offsets, lengths.numpy(), np.array([len(lengths)]))
        return to_device(
            batch
            | ({"causal": True} if causal else {})
            | {
                "masked_positions": positions,
                "labels": ids[positions],
                "next_sentence_label": torch.zeros(len(lengths), dtype=torch.int64),
            },
            self.device,
        )


def probe_batches(data: TrainingData, masking: RunMasking, device: torch.device) -> ProbeBatches:
    """The batches that measure the maximum memory of a run on this data."""
    return ProbeBatches(
        data.max_length,
        data.length_histogram,
        data.manifest.vocab_size,
        data.most_masked(masking),
        device,
        next_tokens=masking.next_tokens_until > 0 or masking.causal_share > 0,
    )


def build_probe(
    config: PretrainConfig,
    data: TrainingData,
    objective: Objective,
    model: nn.Module,
    environment: Environment,
    device: torch.device,
) -> Probe:
    """A Probe of the run; its engine is built with the run's configuration."""
    share = config.train.global_batch_size // environment.world_size
    # Two micro-steps per step if the run can have them: gradient accumulation takes additional memory.
    steady = replace(
        config.train,
        initial_global_batch_size=None,
        batch_increment=None,
        batch_warmup_tokens=0,
        batch_phases=[],
        causal_share=0.0,
    )
    alone = with_micro_batch_size(replace(config, train=steady), share // 2 if share % 2 == 0 else share)
    engine = Engine(model, config, deepspeed_config(alone, environment.world_size), device)
    return Probe(
        engine,
        objective,
        probe_batches(data, run_masking(config, data), device),
        environment.world_size,
        share // alone.train.micro_batch,
        partitions_weights=config.zero.stage == 3,
    )


class Probe:
    """Steps of an engine like the run's, to measure its memory; the engine is destroyed afterwards.

    Args:
        batches: batches for the steps.
        world_size: number of processes of the run.
        micro_steps: micro-steps per step.
        partitions_weights: whether weights are gathered in forward (ZeRO stage 3), so that no rank can run alone.
    """

    def __init__(
        self,
        engine: Engine,
        objective: Objective,
        batches: ProbeBatches,
        world_size: int,
        micro_steps: int,
        partitions_weights: bool,
    ) -> None:
        self._engine, self._objective, self._batches = engine, objective, batches
        self._world_size, self._micro_steps, self._partitions_weights = world_size, micro_steps, partitions_weights
        engine.model.train()

    def run(self, size: int, agree: Callable[[bool], bool]) -> bool:
        """Whether steps of `size` sequences run on all ranks.

        First each rank runs forward and backward alone, without reductions, so that it can fail alone and all ranks can
        stop (not at stage 3, which gathers weights in forward). A whole step with reductions and the optimizer follows.

        Raises:
            UserError: this rank is out of memory in a whole step, where the others wait for it and can't be told.
        """
        longest, *mixed = self._batches.of(size)
        if not self._partitions_weights and not agree(self._fits_alone(longest)):
            return False
        others_wait = UserError(
            f"train.micro_batch_size: found no memory for a whole step of {size} sequences, "
            f"expected room for it; {f'give less than {size}, or ' if size > 1 else ''}"
            f"{_LESS_MEMORY}"
        )
        with _catching_out_of_memory(others_wait if self._world_size > 1 else None):
            # The longest batch again after each mixed one: it must fit into the memory that the mixed one has
            # fragmented.
            for batch in (longest, *(each for other in mixed for each in (other, longest))):
                for number in range(self._micro_steps):
                    self._engine.backward(self._loss(batch), last=number == self._micro_steps - 1)
                self._engine.step(PROBE_RATE)
            return True
        return False

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        return self._loss_of(self._engine(**batch, dropout_seed=PROBE_SEED), batch)

    def _loss_of(self, output: ModelOutput, batch: MicroBatch) -> torch.Tensor:
        totals = torch.tensor(self._objective.counts([batch]), dtype=torch.float64, device=self._batches.device)
        return self._objective(output, batch, totals)[0]

    def _fits_alone(self, batch: MicroBatch) -> bool:
        model = self._engine.model
        parameters = [each for each in model.parameters() if each.requires_grad]
        # With the weights of a step, for which layers are compiled.
        with _catching_out_of_memory(), self._engine.as_in_a_step():
            loss = self._loss_of(model(**batch, dropout_seed=PROBE_SEED), batch)
            # Not through the engine or `backward`, whose gradient hooks would start reductions.
            torch.autograd.grad(loss, parameters, allow_unused=True)
            return True
        return False

    def release(self) -> None:
        """Release the memory before the run uses it."""
        self._engine.close()
        del self._engine
        gc.collect()
        if self._batches.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._batches.device)
