"""The sum of gradients over the ranks at ZeRO stage 0, which begins while the last backward of a step still runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from cloze.launch.system import distributed

# Bytes from which on a bucket takes no further gradient. Of 16, 32, 64, 128 and 256 MiB this leaves the shortest steps
# at 1,024 GPUs, or within 0.1% of them (docs/scaling.md): each sum takes some 200 us there, however small it is, and of
# fewer large ones less is hidden. No setting: in which order NCCL adds the ranks up depends on it, and an interrupted
# run has to end with the bits of one that was not.
BUCKET_BYTES = 64 << 20
# Elements of fp32 that a GPU's kernels read at once, from addresses that are multiples of so many.
_ALIGNED = 4


def sum_gradients(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let `GradientSums` make the mean of the gradients over the ranks, instead of DeepSpeed after the last backward.
    """
    backward, world_size = engine.backward, engine.dp_world_size
    sums: GradientSums | None = None

    def learning() -> list[nn.Parameter]:  # fine-tuning may change what does, from step to step
        return [parameter for parameter in engine.module.parameters() if parameter.requires_grad and parameter.numel()]

    def backward_and_sum(loss: Tensor, **options: Any) -> Any:
        nonlocal sums
        if not engine.is_gradient_accumulation_boundary():
            return backward(loss, **options)
        sums = GradientSums(learning(), world_size, BUCKET_BYTES)
        try:
            with sums.sending():
                return backward(loss, **options)  # at whose end DeepSpeed calls `finish`
        finally:
            sums = None  # an error leaves nothing for the next step

    def finish(*_: Any, **__: Any) -> None:
        assert sums is not None, "DeepSpeed sums in the last backward of a step"
        sums.finish()

    if world_size == 1:
        engine.buffered_allreduce_fallback = lambda *_, **__: _complete(learning())
    else:
        engine.backward, engine.buffered_allreduce_fallback = backward_and_sum, finish


class GradientSums:
    """The sums of one step's gradients, bucket by bucket, from the last parameters to the first, as backward goes.

    Ranks may finish with parameters in different orders, and have no gradient of some: so buckets follow from the
    parameters alone, and each is sent after those before it.

    Args:
        parameters: those that learn, in the order of the model.
        size: bytes from which on a bucket takes no further parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world_size: int, size: int) -> None:
        self._world_size, self._num_sent = world_size, 0
        self._buckets = [_Bucket(group) for group in reversed(groups(parameters, size))]

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Around backward, in which a bucket is sent when all of its gradients are there."""
        hooks = [parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
                 for bucket in self._buckets for parameter in bucket.parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, bucket: _Bucket, parameter: Tensor) -> None:
        if bucket.is_sent:
            raise RuntimeError(f"a gradient of shape {tuple(parameter.shape)} was added to after it had been sent to "
                               "other ranks, expected backward to come to each parameter once")
        bucket.missing.discard(parameter)
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._num_sent].send()
        self._num_sent += 1

    def finish(self) -> None:
        """After backward: send the buckets that are left, and make means of all."""
        while self._num_sent < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            bucket.finish(self._world_size)


def groups(parameters: Sequence[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Parameters that are sent together, in the order of the model.

    Filled from the first ones on: the words' embedding, with which backward is done last, has more than `size` bytes in
    large models and goes alone; what is left over is sent first.
    """
    found: list[list[nn.Parameter]] = []
    held = size
    for parameter in parameters:
        if held >= size:
            found.append([])
            held = 0
        found[-1].append(parameter)
        held += parameter.nbytes
    return found


def _complete(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Their gradients, with zeros where there is none: other ranks may have one, and the optimizer takes all."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


class _Bucket:
    """Gradients that are sent at once."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        # Last come those whose length would leave the next one unaligned.
        self.parameters = sorted(parameters, key=lambda parameter: parameter.numel() % _ALIGNED != 0)
        self.missing: set[Tensor] = set(self.parameters)
        """Those that backward has not come to."""
        self._flat: Tensor | None = None
        self._wait: Callable[[], object] | None = None

    @property
    def is_sent(self) -> bool:
        return self._flat is not None

    @torch.no_grad()
    def send(self) -> None:
        """Begin the sum. From here on the gradients lie in what is sent: none is held twice, and none copied back."""
        gradients = _complete(self.parameters)
        self._flat = torch.cat([gradient.flatten() for gradient in gradients])
        parts = self._flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        self._wait = distributed.begin_sum(self._flat)

    def finish(self, world_size: int) -> None:
        """Make means of the sums, without a wait of a GPU's host."""
        assert self._flat is not None and self._wait is not None, "it was sent"
        self._wait()
        self._flat.mul_(1.0 / world_size)
