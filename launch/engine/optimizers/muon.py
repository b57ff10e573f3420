"""Muon for the encoder's matrices, AdamW for everything else, as one optimizer."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from cloze.launch.engine.optimizers.adam_family import reverted_on_inf
from cloze.launch.engine.optimizers.groups import Group

# The quintic iteration of Jordan et al. 2024 (kellerjordan.github.io/posts/muon), as in torch.optim.Muon.
ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7
# Root mean square of an update, that of AdamW's (arXiv 2502.16982, section 2.2).
_SIZE = 0.2
# Of matrices in one product. A hundred small ones are some two thousand kernels of a few microseconds each, and asking
# for one took the host of an H200 7 to 17. The bound is not measured: it leaves BERT-base's largest matrices alone, and
# the copies that bring others together below 100 MB.
_ELEMENTS_TOGETHER = 2**22
# Names of a processor's instructions for products in bf16 (torch.cpu.get_capabilities), on x86 and Arm.
_BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")


class MuonWithAdamW(Optimizer):
    """Muon over the groups whose `muon` is true and torch's AdamW over the others.

    Muon's update is scaled to the size of AdamW's, so that one learning rate and one weight decay serve both. With the
    defaults its steps are those of torch.optim.Muon with `match_rms_adamw`, bit for bit on a CPU with instructions for
    bf16; its own, because torch's knows no matrices within a weight, no other decay, and no format but bf16. Both obey
    `found_inf` on the device.

    Args:
        rows: weights that hold several matrices one below the other, with the rows of each; a weight without an entry
            is one matrix.
        decay: plain: lr × weight_decay of each weight; cautious: of those alone that the update shrinks
            (arXiv 2510.12402); hyperball: none, each matrix keeps its Frobenius norm, of which the rate is the share
            that an update has (arXiv 2606.16899).
    """

    _step_supports_amp_scaling = True  # torch's word for: `step` obeys `found_inf` by itself
    found_inf: torch.Tensor | None = None
    at_once: bool | None = None
    """Whether small matrices that are alike share their products; None: on a GPU. Set where a GPU's step is planned
    without one."""

    def __init__(
        self,
        groups: list[Group],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        rows: Mapping[Tensor, list[int]] | None = None,
        decay: Literal["plain", "cautious", "hyperball"] = "plain",
    ) -> None:
        self._rows, self._decay = rows or {}, decay
        others = [group for group in groups if not group["muon"]]
        # None for no group, as of a model that is frozen but for its encoder.
        self._adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        matrices: list[Group] = [{**group, "momentum": momentum} for group in groups if group["muon"]]
        super().__init__([*matrices, *(self._adamw.param_groups if self._adamw else [])], {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # the engine computes losses, and gives none to be computed again
        """Update every parameter that has a gradient."""
        self._step_muon([group for group in self.param_groups if group["muon"]])
        if self._adamw:
            # Given anew each time: loading a state makes new groups and states.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            fused: Any = self._adamw  # torch's types say nothing of what it skips by
            fused.found_inf = self.found_inf
            fused.step()

    def _step_muon(self, groups: list[Group]) -> None:
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        if not params:  # another rank's, or of a skipped step
            return
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        with reverted_on_inf(self.found_inf, [*params, *momenta], [p.grad for p in params]):
            for group in groups:
                for weights in self._together([p for p in group["params"] if p.grad is not None]):
                    self._update(weights, group)

    def _rows_of(self, weight: Tensor) -> list[int]:
        return self._rows.get(weight, [len(weight)])

    def _together(self, weights: list[Tensor]) -> Iterator[list[Tensor]]:
        """Weights that are updated at once: on a GPU small ones with the same matrices, elsewhere each alone."""
        kinds: dict[object, list[Tensor]] = {}
        for number, weight in enumerate(weights):
            at_once = weight.device.type == "cuda" if self.at_once is None else self.at_once
            kind = (weight.shape, weight.dtype, tuple(self._rows_of(weight))) if at_once else number
            kinds.setdefault(kind, []).append(weight)
        for alike in kinds.values():
            size = max(1, _ELEMENTS_TOGETHER // alike[0].numel())
            yield from (alike[first : first + size] for first in range(0, len(alike), size))

    def _update(self, weights: list[Tensor], group: Group) -> None:
        """Update weights that are alike."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]  # each has one
        averages = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, averages, group["momentum"])  # Nesterov's
        rows, decay = self._rows_of(weights[0]), group["lr"] * group["weight_decay"]
        for matrices, directions in zip(_alike(weights, rows), _alike(updates, rows), strict=True):
            steps = _orthogonalized_at_once(directions)
            if self._decay == "hyperball":
                for matrix, step in zip(matrices, steps, strict=True):
                    norm = _norm(matrix)
                    matrix.sub_(step * (group["lr"] * norm / _norm(step).clamp(min=_LEAST_NORM)))
                    matrix.mul_(norm / _norm(matrix).clamp(min=_LEAST_NORM))
                continue
            if self._decay == "cautious":
                for matrix, step in zip(matrices, steps, strict=True):
                    matrix.sub_(matrix * (matrix * step > 0), alpha=decay)
            else:
                torch._foreach_mul_(matrices, 1 - decay)
            size = _SIZE * math.sqrt(max(matrices[0].shape[-2:]))
            torch._foreach_add_(matrices, steps, alpha=-group["lr"] * size)


def _alike(weights: Sequence[Tensor], rows: Sequence[int]) -> Iterator[list[Tensor]]:
    """Views of each weight's matrices of `rows` rows: (R, C), and (N, R, C) of N neighbours with as many rows, which a
    single product serves.
    """
    first = 0
    for height, run in itertools.groupby(rows):
        count = len(list(run))
        parts = [weight[first : first + count * height] for weight in weights]
        yield parts if count == 1 else [part.unflatten(0, (count, height)) for part in parts]
        first += count * height


def _orthogonalized_at_once(matrices: list[Tensor]) -> list[Tensor]:
    """Each of several tensors of one shape, (R, C) or (N, R, C), orthogonalized by the same products."""
    if len(matrices) == 1:
        return [orthogonalized(matrices[0])]
    stacked = torch.stack(matrices)
    # In the format of the weights: `_foreach_add_` of two formats would be a launch for each.
    found = orthogonalized(stacked.flatten(0, -3)).to(stacked.dtype)
    return list(found.view_as(stacked))


def _norm(matrices: Tensor) -> Tensor:
    """The Frobenius norm of each: (..., 1, 1)."""
    norm: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    return norm


def orthogonalized(matrices: Tensor) -> Tensor:
    """Matrices (R, C) or (N, R, C) with the same singular vectors and singular values of 0.7 to 1.2, in the format of
    their products: bf16, or fp32 on a CPU without instructions for bf16, on which products in it take hundreds of times
    as long.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    found = matrices.to(_product_format(matrices.device))
    found = found.mT if tall else found
    found = found / _norm(found).clamp(min=_LEAST_NORM)
    added = torch.addmm if matrices.dim() == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        products = found @ found.mT
        found = added(found, added(products, products, products, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


def _product_format(device: torch.device) -> torch.dtype:
    """By the processor, and not by a measurement: a resumed run has to come to the same."""
    capabilities = torch.cpu.get_capabilities()
    slow = device.type == "cpu" and not any(capabilities.get(name) for name in _BF16_PRODUCTS)
    return torch.float32 if slow else torch.bfloat16
