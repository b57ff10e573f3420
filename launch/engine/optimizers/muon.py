"""Muon for the encoder's matrices, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from cloze.launch.engine.optimizers.adam_family import undone
from cloze.launch.engine.optimizers.groups import Group


class MuonWithAdamW(Optimizer):
    """torch's Muon over the groups whose `muon` is true and torch's AdamW over the others.

    Groups and states are this object's, so that rates are set, and states saved and loaded, as with any optimizer; the
    two inner ones only do the arithmetic. Muon's update is scaled to the size of AdamW's (`match_rms_adamw`, arXiv
    2502.16982), so that one learning rate and one weight decay serve both. Both obey `found_inf` on the device.
    """

    _step_supports_amp_scaling = True  # torch's word for: `step` obeys `found_inf` by itself
    found_inf: torch.Tensor | None = None

    def __init__(
        self, groups: list[Group], *, lr: float, betas: tuple[float, float], eps: float, momentum: float
    ) -> None:
        self.inner: dict[bool, Optimizer] = {}  # neither of them is made for no group, as of a frozen encoder
        for muon in (True, False):
            if chosen := [group for group in groups if group["muon"] == muon]:
                self.inner[muon] = (
                    Muon(chosen, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
                    if muon
                    else AdamW(chosen, lr=lr, betas=betas, eps=eps, fused=True)
                )
        super().__init__([group for inner in self.inner.values() for group in inner.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one of two
        """Update every parameter that has a gradient; `closure` as torch.optim defines it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon, inner in self.inner.items():
            # Given anew each time: loading a state makes new groups and states.
            inner.param_groups = [group for group in self.param_groups if group["muon"] == muon]
            inner.state = self.state
            if isinstance(inner, Muon):
                self._step_muon(inner)
            else:
                fused: Any = inner  # torch's types say nothing of what it skips by
                fused.found_inf = self.found_inf
                inner.step()
        return loss

    def _step_muon(self, inner: Muon) -> None:
        """torch's Muon knows no `found_inf`."""
        params = [p for group in inner.param_groups for p in group["params"] if p.grad is not None]
        if not params:  # another rank's, or of a skipped step
            return
        momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in params]
        with undone(self.found_inf, [*params, *momenta], [p.grad for p in params if p.grad is not None]):
            inner.step()
