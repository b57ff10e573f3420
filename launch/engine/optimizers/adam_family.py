"""What torch lacks of Adam's family: AdamW without bias correction, LAMB, StableAdamW.

The states are named and kept as those of torch.optim.AdamW (`exp_avg`, `exp_avg_sq`, and `step` as a tensor on the
host), so that DeepSpeed partitions, saves and converts them in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamFamily(Optimizer):
    """Keeps two moments a parameter; a subclass says how one group moves."""

    def __init__(self, params, *, lr: float, betas: tuple[float, float], eps: float, **more) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, **more})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient; `closure` as torch.optim defines it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p),
                                         exp_avg_sq=torch.zeros_like(p))
            states = [self.state[p] for p in params]
            for state in states:
                state["step"] += 1
            self.move(group, params, [p.grad for p in params], [state["exp_avg"] for state in states],
                      [state["exp_avg_sq"] for state in states], int(states[0]["step"]))
        return loss

    def move(self, group: dict, params: list[Tensor], gradients: list[Tensor], means: list[Tensor],
             squares: list[Tensor], step: int) -> None:
        """Update moments and parameters of one group in place. `step` counts from 1."""
        raise NotImplementedError


def _advance(means: list[Tensor], squares: list[Tensor], gradients: list[Tensor], beta1: float, beta2: float) -> None:
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)


class UncorrectedAdamW(AdamFamily):
    """AdamW whose moments are not divided by 1 - beta^t: the BERT release's (google-research/bert `optimization.py`).

    In the first steps both moments are too small; their quotient makes the steps larger than corrected ones.
    """

    def move(self, group, params, gradients, means, squares, step) -> None:
        _advance(means, squares, gradients, *group["betas"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(params, means, roots, -group["lr"])


class Lamb(AdamFamily):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's update with decay, scaled for each tensor by |weights| / |update|.

    The scale is 1 where either norm is 0. `min_ratio` and `max_ratio` bound it, as in DeepSpeed's recipe; with
    `adapt_undecayed: false` it is 1 for what does not decay, as in NVIDIA's FusedLAMB. The global clipping of the
    gradient that FusedLAMB does itself is `train.gradient_clipping`. Query, key and value lie in one matrix and so
    share one scale, as in DeepSpeed's BERT.
    """

    def __init__(self, params, *, bias_correction: bool = True, min_ratio: float = 0.0,
                 max_ratio: float = float("inf"), adapt_undecayed: bool = True, **common) -> None:
        super().__init__(params, bias_correction=bias_correction, min_ratio=min_ratio, max_ratio=max_ratio,
                         adapt_undecayed=adapt_undecayed, **common)

    def move(self, group, params, gradients, means, squares, step) -> None:
        beta1, beta2 = group["betas"]
        _advance(means, squares, gradients, beta1, beta2)
        first, second = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, second**0.5)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_div_(updates, first)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if group["weight_decay"] or group["adapt_undecayed"]:
            weights = torch.stack(torch._foreach_norm(params))
            lengths = torch.stack(torch._foreach_norm(updates))
            ratios = (weights / lengths).clamp(group["min_ratio"], group["max_ratio"])
            ratios = ratios.where((weights > 0) & (lengths > 0), 1.0)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(params, updates, alpha=-group["lr"])


class StableAdamW(AdamFamily):
    """AdamW with AdaFactor's clipping of each tensor's update (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2).

    The rate of a tensor is divided by max(1, RMS of gradient / root of the second moment). Both betas are corrected so
    that the moments need no correction.
    """

    def move(self, group, params, gradients, means, squares, step) -> None:
        beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in group["betas"])
        _advance(means, squares, gradients, beta1, beta2)
        floors = torch._foreach_clamp_min(squares, group["eps"] ** 2)
        surprises = torch._foreach_div(torch._foreach_mul(gradients, gradients), floors)
        rms = torch.stack([surprise.mean() for surprise in surprises]).sqrt().clamp_min(1.0)
        rates = group["lr"] / rms
        torch._foreach_mul_(params, list((1 - rates * group["weight_decay"]).unbind()))
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        torch._foreach_mul_(updates, list(rates.unbind()))
        torch._foreach_sub_(params, updates)
