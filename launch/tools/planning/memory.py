"""Bytes of GPU memory by kind, and bytes that the ranks send each other, by ZeRO stage.

As DeepSpeed 0.19.8 does it with fp32 accumulation, which launch/engine/config.py always asks for.
"""

from dataclasses import asdict, dataclass

from cloze.launch.engine.summing import BUCKET_BYTES, IN_FLIGHT
from cloze.launch.tools.planning.assumptions import (
    BUCKET_ELEMENTS,
    COLLECTIVE_BUFFER_BYTES,
    CONTEXT_BYTES,
    CPU_CONTEXT_BYTES,
)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    """Parameters in the dtype that products take, and fp32 masters where they are others."""
    gradients: int
    moments: int
    activations: int
    """The most that forward and backward hold beside these, copies of weights in 16 bits included."""
    buffers: int
    """Bytes of the buffers of reductions."""
    system: int
    """What CUDA and NCCL, or oneDNN and threads, take for themselves."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def tensors(self) -> int:
        """Memory allocated by torch's allocator."""
        return self.total - self.system


def share(count: int, processes: int) -> int:
    """Elements of a partition: padded to be equal."""
    return -(-count // processes)


def weights_are_16_bit(precision: str, stage: int) -> bool:
    """Whether parameters are 16-bit with fp32 masters; else they are fp32 (`deepspeed_config`)."""
    return precision == "fp16" or (precision == "bf16" and stage > 0)


def memory(
    stage: int,
    count: int,
    processes: int,
    activations: int,
    *,
    precision: str,
    states: int,
    on_gpu: bool,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> MemoryEstimate:
    """Memory of one process.

    Args:
        count: parameters of the model. states: bytes that the optimizer keeps of all of them.
    """
    own = share(count, processes)
    halved = weights_are_16_bit(precision, stage)
    model = 2 * count if halved else 4 * count
    if stage == 3:
        # Its own share, and the layers that are gathered at the time: all of them, up to stage3_max_live_parameters.
        model = (0 if offload_parameters else share(model, processes)) + (2 if halved else 4) * min(count, 10**9)
    masters = (4 * own if halved else 0) if not offload_optimizer else 0
    moments = (share(states, processes) if stage else states) if not offload_optimizer else 0
    # Stages 2 and 3 keep the sums of their own share; at 1 and 2 a micro-step's own gradients, in 16 bits, are whole.
    gradients = 4 * count if stage < 2 else (0 if offload_optimizer else 4 * own)
    if halved and stage in (1, 2):
        gradients += 2 * count
    bucket = 0
    if processes > 1 or stage >= 2:
        bucket = _bucket(stage, count, activations, halved)
    return MemoryEstimate(model + masters, gradients, moments, activations, bucket, _system(processes, on_gpu))


def divided_memory(
    stage: int,
    count: int,
    owned: int,
    processes: int,
    activations: int,
    *,
    states: int,
    accumulates: bool,
    on_gpu: bool,
) -> MemoryEstimate:
    """Memory of one process where whole tensors are divided (launch/engine/division.py): fp32 weights are whole.

    Args:
        count: parameters of the model. owned: those that this process updates. states: bytes of their optimizer states.
        accumulates: whether a step has several micro-batches.
    """
    # Stage 2 frees what others own while backward goes on; the sums of earlier micro-batches lie beside the new ones.
    gradients = 4 * count if stage < 2 else 4 * owned * (1 + accumulates)
    # At stage 2 one bucket is filled while others are sent; at stage 1 gradients move into what is sent.
    buckets = min(4 * count, (1 + IN_FLIGHT) * BUCKET_BYTES) if stage == 2 and processes > 1 else 0
    return MemoryEstimate(4 * count, gradients, states, activations, buckets, _system(processes, on_gpu))


def _system(processes: int, on_gpu: bool) -> int:
    """Bytes that a process takes without a model."""
    return CONTEXT_BYTES + (COLLECTIVE_BUFFER_BYTES if processes > 1 else 0) if on_gpu else CPU_CONTEXT_BYTES


def _bucket(stage: int, count: int, activations: int, halved: bool) -> int:
    """Bytes of the buffers from which gradients are sent, beyond the bytes of activations that are freed by then."""
    largest = min(count, BUCKET_ELEMENTS)
    by_stage = (
        0,  # gradients move into the buffers, which are smaller than what backward has freed by then
        max(0, 4 * largest - activations),  # made after the last backward
        (6 if halved else 4) * largest,  # and in their own dtype, from which they are cast
        4 * BUCKET_ELEMENTS,  # whatever the model (stage3.py, reduce_bucket_size)
    )
    return by_stage[stage]


def traffic(stage: int, count: int, processes: int, micro_steps: int, *, precision: str) -> tuple[float, int]:
    """Bytes that one process sends in a step, and collectives, of a ring's (n - 1) / n of the whole each way.

    Stages 0 and 1 sum fp32 gradients once a step; stage 2 reduces them in every micro-step; stage 3 gathers weights for
    forward and backward too. Stages 1 and 2 gather new weights after the step.
    """
    if processes == 1:
        return 0.0, 0
    ring = (processes - 1) / processes
    weights = count * (2 if weights_are_16_bit(precision, stage) else 4)
    buckets = share(count, BUCKET_ELEMENTS)
    by_stage = (
        (2 * 4 * count, 1),
        (2 * 4 * count + weights, 2),
        (micro_steps * 4 * count + weights, micro_steps + 1),
        (micro_steps * (4 * count + 2 * weights), 3 * micro_steps),
    )
    sent, collectives = by_stage[stage]
    return ring * sent, collectives * buckets
