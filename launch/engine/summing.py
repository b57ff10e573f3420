"""The sum of gradients over the ranks where parameters are whole, overlapped with the last backward of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

import torch
from torch import Tensor, nn

from cloze.launch.system import distributed

# Bytes from which on a bucket takes no further gradient. Of 16, 32, 64, 128 and 256 MiB this gives the shortest step at
# 1,024 GPUs, or one within 0.1% of it (docs/scaling.md): a sum has a latency of some 200 us there, and fewer, larger
# sums overlap less. Not configurable: NCCL adds in an order that depends on it, and an interrupted run has to end with
# the bits of an uninterrupted one.
BUCKET_BYTES = 64 << 20
# Number of fp32 elements in one vectorized load of a GPU, to which gradients are aligned in a bucket.
_ALIGNED = 4
# Buckets whose sums are under way while backward goes on, where gradients are freed after them: one is being sent, and
# one waits, so that the network is never idle.
IN_FLIGHT = 2


@contextlib.contextmanager
def averaged_gradients(
    parameters: Sequence[nn.Parameter], world_size: int, kept: Set[nn.Parameter] | None = None
) -> Iterator[None]:
    """Context around the last backward of a step, after which gradients are averages over the ranks, and none that is
    kept is missing.

    Args:
        parameters: as for GradientSums, like kept.
    """
    if world_size == 1:
        yield
        complete(parameters)
        return
    sums = GradientSums(parameters, world_size, BUCKET_BYTES, kept)
    with sums.sending():
        yield
    sums.finish()


class GradientSums:
    """The sums of one step's gradients, bucket by bucket from the last parameters to the first, during backward.

    Ranks may compute gradients in different orders and lack some of them. Buckets therefore depend on the parameters
    alone and are sent in a fixed order; a bucket without all of its gradients holds back those after it until
    backward has ended.

    Args:
        parameters: the trained parameters, in the order of the model.
        size: bytes from which on a bucket takes no further parameter.
        kept: parameters whose gradients this rank needs; those of others are freed as soon as they are summed. None:
            all.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world_size: int, size: int, kept: Set[nn.Parameter] | None = None
    ) -> None:
        self._world_size, self._kept = world_size, kept
        self._num_sent = self._num_finished = 0
        self._buckets = [_Bucket(each) for each in reversed(buckets_of(parameters, size))]

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Context around backward, in which a bucket is sent as soon as all of its gradients are complete."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, bucket: _Bucket, parameter: Tensor) -> None:
        if bucket.is_sent:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was added to after it had been sent to "
                "other ranks, expected backward to come to each parameter once"
            )
        bucket.missing.discard(parameter)
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._num_sent].send()
        self._num_sent += 1
        if self._kept is not None and self._num_sent - self._num_finished > IN_FLIGHT:
            self._finish_next()

    def _finish_next(self) -> None:
        self._buckets[self._num_finished].finish(self._world_size, self._kept)
        self._num_finished += 1

    def finish(self) -> None:
        """After backward: send the remaining buckets, wait for all sums and divide them by the world size."""
        while self._num_sent < len(self._buckets):
            self._send_next()
        while self._num_finished < len(self._buckets):
            self._finish_next()


def buckets_of(parameters: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Parameters of each bucket, in the order of the model.

    Buckets are filled from the first parameter on: the word embedding, whose gradient is complete last, exceeds `size`
    bytes in large models and has a bucket of its own; the incomplete bucket at the end is sent first.
    """
    buckets: list[list[nn.Parameter]] = []
    held = size
    for parameter in parameters:
        if held >= size:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


def complete(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients; a missing one becomes zeros, since other ranks may have one and the optimizer reads all."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


class _Bucket:
    """Gradients that are sent together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        # Parameters whose size would leave the next one unaligned come last.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.numel() % _ALIGNED != 0)
        self.missing: set[Tensor] = set(self.parameters)
        """Parameters whose gradients backward has not completed."""
        self._flat: Tensor | None = None
        self._wait: Callable[[], object] | None = None

    @property
    def is_sent(self) -> bool:
        return self._wait is not None

    @torch.no_grad()
    def send(self) -> None:
        """Start the sum. From then on the gradients are views of the buffer that is sent, so none exists twice or is
        copied back."""
        gradients = complete(self.parameters)
        self._flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = self._flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        self._wait = distributed.begin_sum(self._flat)

    @torch.no_grad()
    def finish(self, world_size: int, kept: Set[nn.Parameter] | None) -> None:
        """Wait for the sum (on a GPU only its stream waits, not the host), divide it, and free what is not kept."""
        assert self._flat is not None and self._wait is not None, "it was sent"
        self._wait()
        self._flat.mul_(1.0 / world_size)
        if kept is None:
            return
        for parameter in self.parameters:  # a view would keep the whole buffer
            gradient = parameter.grad
            parameter.grad = gradient.clone() if gradient is not None and parameter in kept else None
        self._flat = None
