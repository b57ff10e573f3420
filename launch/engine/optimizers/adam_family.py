"""Optimizers that torch lacks: AdamW without bias correction, LAMB, StableAdamW.

The states are named and kept as those of torch's fused AdamW (`exp_avg`, `exp_avg_sq`, and `step` as a tensor on the
parameter's device), so that DeepSpeed partitions, saves and converts them in the same way. As torch's fused optimizers
they skip a step on the device, where `found_inf` is 1: the host need not know.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from cloze.launch.engine.optimizers.groups import Group


@contextlib.contextmanager
def reverted_on_inf(found_inf: Tensor | None, tensors: list[Tensor], gradients: list[Tensor]) -> Iterator[None]:
    """Around a change of `tensors` by `gradients`: if `found_inf` (fp32, no dimension) is 1, nothing will have changed.

    For updates without a kernel that skips. The gradients are overwritten then, since nothing takes a NaN back.
    """
    if found_inf is None:
        yield
        return
    skip = found_inf.bool()
    for gradient in gradients:
        gradient.masked_fill_(skip, 0.0)
    before = torch._foreach_mul(tensors, found_inf)
    yield
    torch._foreach_mul_(tensors, 1 - found_inf)
    torch._foreach_add_(tensors, before)


@functools.cache
def _no_bias_correction(device: torch.device) -> Tensor:
    """A count of steps with which 1 - beta^t is 1: no bias correction."""
    return torch.full((), math.inf, device=device)


class GroupTensors(NamedTuple):
    """The parameters of a group that a step moves, and what belongs to each."""

    params: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    """First moments."""
    exp_avg_sqs: list[Tensor]
    """Second moments."""
    steps: list[Tensor]
    """Counts from 1; fp32, no dimension."""

    def uncorrected(self) -> GroupTensors:
        """The same, so that no moment's bias is corrected."""
        return self._replace(steps=[_no_bias_correction(self.params[0].device)] * len(self.params))


class AdamFamily(Optimizer):
    """Keeps two moments a parameter; a subclass says how one group moves."""

    _step_supports_amp_scaling = True  # torch's word for: `step` obeys `found_inf` by itself
    found_inf: Tensor | None = None

    def __init__(self, params: ParamsT, *, lr: float, betas: tuple[float, float], eps: float, **more: object) -> None:
        # fused: by it torch and DeepSpeed put a loaded `step` on the parameter's device.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": True, **more})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # the engine computes losses, and gives none to be computed again
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            exp_avgs, exp_avg_sqs, steps = zip(*(self._moments(p) for p in params), strict=True)
            # A list, since torch would ask the device for the number that a tensor alone stands for.
            torch._foreach_add_(steps, 1 if self.found_inf is None else [1 - self.found_inf] * len(steps))
            self.update_group(
                group, GroupTensors(params, [p.grad for p in params], list(exp_avgs), list(exp_avg_sqs), list(steps))
            )

    def _moments(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both moments and the count of steps of one parameter, at first zero."""
        state = self.state[p]
        if not state:
            state.update(
                step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
            )
        if state["step"].device != p.device:  # of a checkpoint from when it was kept on the host
            state["step"] = state["step"].to(p.device)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]

    def update_group(self, group: Group, tensors: GroupTensors) -> None:
        """Update moments and parameters of one group in place; where `found_inf` is 1 nothing may change."""
        raise NotImplementedError

    def _fused(self, group: Group, tensors: GroupTensors, *, lr: float, weight_decay: float) -> None:
        """torch's AdamW, one pass over all tensors; it skips by itself."""
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            tensors.params,
            tensors.gradients,
            tensors.exp_avgs,
            tensors.exp_avg_sqs,
            [],
            tensors.steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )


class UncorrectedAdamW(AdamFamily):
    """AdamW whose moments are not divided by 1 - beta^t: the BERT release's (google-research/bert `optimization.py`).

    In the first steps both moments are too small; their quotient makes the steps larger than corrected ones.
    """

    def update_group(self, group: Group, tensors: GroupTensors) -> None:
        self._fused(group, tensors.uncorrected(), lr=group["lr"], weight_decay=group["weight_decay"])


class Lamb(AdamFamily):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update with decay, scaled for each tensor by |weights| / |update|.

    The scale is 1 where either norm is 0. `min_ratio` and `max_ratio` bound it, as in DeepSpeed's recipe; with
    `adapt_undecayed: false` it is 1 for what does not decay, as in NVIDIA's FusedLAMB. The global clipping of the
    gradient that FusedLAMB does itself is `train.gradient_clipping`. Query, key and value lie in one matrix and so
    share one scale, as in DeepSpeed's BERT.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        bias_correction: bool = True,
        min_ratio: float = 0.0,
        max_ratio: float = float("inf"),
        adapt_undecayed: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(
            params,
            bias_correction=bias_correction,
            min_ratio=min_ratio,
            max_ratio=max_ratio,
            adapt_undecayed=adapt_undecayed,
            **common,
        )

    def update_group(self, group: Group, tensors: GroupTensors) -> None:
        params = tensors.params
        updates = [torch.zeros_like(p) for p in params]  # from 0 and at rate 1, AdamW's step is minus Adam's update
        corrected = tensors if group["bias_correction"] else tensors.uncorrected()
        self._fused(group, corrected._replace(params=updates), lr=1.0, weight_decay=0.0)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=-group["weight_decay"])
        if group["weight_decay"] or group["adapt_undecayed"]:
            weights = torch.stack(torch._foreach_norm(params))
            lengths = torch.stack(torch._foreach_norm(updates))
            ratios = (weights / lengths).clamp(group["min_ratio"], group["max_ratio"])
            ratios = ratios.where((weights > 0) & (lengths > 0), 1.0)
            if self.found_inf is not None:
                ratios = ratios * (1 - self.found_inf)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(params, updates, alpha=group["lr"])


class StableAdamW(AdamFamily):
    """AdamW with AdaFactor's clipping of each tensor's update (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2).

    The rate of a tensor is divided by max(1, RMS of gradient / root of the second moment). Both betas are corrected so
    that the moments need no correction.
    """

    def update_group(self, group: Group, tensors: GroupTensors) -> None:
        params, gradients, exp_avgs, exp_avg_sqs, steps = tensors
        with reverted_on_inf(self.found_inf, [*params, *exp_avgs, *exp_avg_sqs], gradients):
            step = steps[0].double().clamp_min(1.0)  # 0 after nothing but skipped steps
            beta1, beta2 = (((beta - beta**step) / (1 - beta**step)).float() for beta in group["betas"])
            torch._foreach_mul_(exp_avgs, beta1)
            torch._foreach_add_(exp_avgs, torch._foreach_mul(gradients, 1 - beta1))
            ratios = torch._foreach_mul(gradients, gradients)
            torch._foreach_mul_(exp_avg_sqs, beta2)
            torch._foreach_add_(exp_avg_sqs, torch._foreach_mul(ratios, 1 - beta2))
            torch._foreach_div_(ratios, torch._foreach_clamp_min(exp_avg_sqs, group["eps"] ** 2))
            rms = torch.stack([ratio.mean() for ratio in ratios]).sqrt().clamp_min(1.0)
            rates = group["lr"] / rms
            torch._foreach_mul_(params, list((1 - rates * group["weight_decay"]).unbind()))
            roots = torch._foreach_sqrt(exp_avg_sqs)
            torch._foreach_add_(roots, group["eps"])
            updates = torch._foreach_div(exp_avgs, roots)
            torch._foreach_mul_(updates, list(rates.unbind()))
            torch._foreach_sub_(params, updates)
