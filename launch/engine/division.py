"""Division of an optimizer's work among the ranks by whole tensors: `zero.stage` 1 and 2 of Muon, LAMB and StableAdamW.

DeepSpeed partitions flat vectors of all parameters, of which these optimizers can't update a part: they measure or
orthogonalize whole tensors. Here each parameter has an owner, the only rank that keeps its optimizer states, that clips
its gradient and that updates it; the others then take the new weights from it. torch's ZeroRedundancyOptimizer divides
in the same way, but keeps every gradient on every rank and clips all of them there, and one rank collects all states
for a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cloze.launch.config import RunConfig
from cloze.launch.engine import summing
from cloze.launch.engine.optimizers.groups import Group, matrix_rows, parameter_groups
from cloze.launch.engine.optimizers.muon import ITERATIONS
from cloze.launch.system import distributed

# FLOPs of matrix products that take as long as the update of one element, which moves seven fp32 numbers: on a GPU 28
# bytes at 3.3 TB/s and 500 TFLOP/s in bf16 (an H100; an A100's are in proportion), on a core of a CPU 28 bytes at 20
# GB/s and 100 GFLOP/s. Not measured at the start, since every rank must come to the same owners.
_FLOPS_PER_ELEMENT = {True: 4000.0, False: 140.0}  # on a GPU, or on a CPU


def update_cost(shape: Sequence[int], muon: bool, *, on_gpu: bool, rows: Sequence[int] | None = None) -> float:
    """Cost of updating a parameter, in updates of one element.

    Args:
        muon: whether Muon orthogonalizes it (arXiv 2502.16982): in each iteration three products, of a matrix of
            `low` × `high` two of low × low × high and one of low × low × low.
        rows: of each matrix, where it orthogonalizes several; None: one.
    """
    cost = float(math.prod(shape))
    for height in rows or shape[:1] if muon else ():
        low, high = sorted((height, shape[1]))
        cost += ITERATIONS * (4.0 * low * low * high + 2.0 * low**3) / _FLOPS_PER_ELEMENT[on_gpu]
    return cost


def owners(costs: dict[str, float], world_size: int) -> dict[str, int]:
    """Rank that owns each parameter: the most expensive first, each to the rank with the least so far (Graham 1969:
    the largest sum is at most 4/3 of the best possible one).

    Args:
        costs: by name; from shapes alone, so that all ranks, and all runs with these shapes, come to the same.
    """
    loads = [0.0] * world_size
    owner_of = dict.fromkeys(costs, 0)
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        rank = min(range(world_size), key=loads.__getitem__)
        owner_of[name] = rank
        loads[rank] += costs[name]
    return owner_of


class Division:
    """Which parameters this rank updates, and the exchange of gradients and weights with those that update the others.

    Args:
        model: its parameters are whole on every rank.
        groups: the optimizer's, over all trained parameters.
        stage: 1: optimizer states are divided, and gradients from the sum over the ranks to the end of the step.
            2: gradients are summed over the ranks, and divided, after each micro-batch.
        on_gpu: whether the optimizer runs on GPUs.
        rows: `matrix_rows`.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        stage: int,
        rank: int,
        world_size: int,
        *,
        on_gpu: bool,
        rows: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        self.stage, self.rank, self._world_size = stage, rank, world_size
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = groups
        muon = {self.names[parameter]: group["muon"] for group in groups for parameter in group["params"]}
        self._parameters = {name: each for each, name in self.names.items() if name in muon and each.numel()}
        self.costs = {
            name: update_cost(each.shape, muon[name], on_gpu=on_gpu, rows=(rows or {}).get(each))
            for name, each in self._parameters.items()
        }
        """Cost of updating each trained parameter, by its name, in the order of the model."""
        self.owners = owners(self.costs, world_size)
        """Rank that updates each trained parameter, by its name."""
        self._owned = [each for name, each in self._parameters.items() if self.owners[name] == rank]

    @classmethod
    def of(cls, model: nn.Module, config: RunConfig, device: torch.device) -> Division | None:
        """The division of a run among its processes; None where DeepSpeed divides, or nothing is divided."""
        if config.zero.stage == config.sharding_stage:
            return None
        groups, place = parameter_groups(model, config.optimizer), distributed.place()
        rows = matrix_rows(model, config.optimizer.matrices)
        return cls(model, groups, config.zero.stage, *place, on_gpu=device.type == "cuda", rows=rows)

    def owns(self, name: str) -> bool:
        """Whether this rank updates a parameter."""
        return self.owners.get(name) == self.rank

    @property
    def owned_groups(self) -> list[Group]:
        """The optimizer's groups with this rank's parameters alone; some may be empty."""
        return [
            {**group, "params": [each for each in group["params"] if self.owns(self.names[each])]}
            for group in self._groups
        ]

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Context around a backward, after which gradients are averages over the ranks, and only the owner's are left.

        At stage 2 they are added to those of the step's earlier micro-batches. Collective.
        """
        earlier: list[Tensor | None] = []
        if self.stage == 2:
            earlier = [parameter.grad for parameter in self._owned]
            for parameter in self._owned:
                parameter.grad = None
        with summing.averaged_gradients(list(self._parameters.values()), self._world_size, kept=set(self._owned)):
            yield
        for parameter, gradient in zip(self._owned, earlier, strict=False):
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)

    def clip(self, limit: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over all parameters, with its bits: each rank measures and clips its own.
        Collective."""
        norms = torch.zeros(len(self._parameters), device=next(iter(self._parameters.values())).device)
        places = [place for place, name in enumerate(self._parameters) if self.owns(name)]
        gradients = [each.grad for each in self._owned if each.grad is not None]
        assert len(gradients) == len(places), "each trained parameter has a gradient after `averaging`"
        if gradients:
            norms[places] = torch.stack(torch._foreach_norm(gradients))
        norm: Tensor = torch.linalg.vector_norm(distributed.reduce_sum(norms))  # sums of one number and zeros are exact
        nn.utils.clip_grads_with_norm_(self._owned, limit, norm)
        return norm

    @torch.no_grad()
    def share(self) -> None:
        """Give the weights that this rank has updated to the others, and take theirs. Collective.

        By sums of their bits as integers, in which all ranks but the owner have zeros: in few collectives whatever the
        number of ranks and tensors, where a broadcast of each would cost a latency each.
        """
        if self._world_size == 1:
            return
        sending: list[tuple[list[nn.Parameter], Tensor, Callable[[], object]]] = []
        for bucket in summing.buckets_of(list(self._parameters.values()), summing.BUCKET_BYTES):
            parts = [parameter.detach().flatten().view(torch.int32) for parameter in bucket]
            owned = [self.owns(self.names[parameter]) for parameter in bucket]
            flat = torch.cat([part if own else torch.zeros_like(part) for part, own in zip(parts, owned, strict=True)])
            sending.append((bucket, flat, distributed.begin_sum(flat)))
            if len(sending) > summing.IN_FLIGHT:
                _take(*sending.pop(0))
        for sent in sending:
            _take(*sent)


def _take(bucket: list[nn.Parameter], flat: Tensor, wait: Callable[[], object]) -> None:
    """Wait for the bits of the weights of a bucket, and set the weights to them."""
    wait()
    for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        parameter.copy_(part.view(parameter.dtype).view(parameter.shape))
