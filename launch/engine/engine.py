"""The engine: a model in training, whatever its precision and ZeRO stage. What DeepSpeed calls things stays inside."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from cloze.launch.config import RunConfig
from cloze.launch.engine.building import build_deepspeed
from cloze.launch.engine.checkpoint_files import CheckpointFiles, Read, Submit, loading
from cloze.launch.engine.config import PRECISIONS, Settings
from cloze.launch.engine.division import Division
from cloze.launch.engine.fragments import Fragment, UpdatedParts, base_optimizer, master_fragments
from cloze.launch.engine.optimizers import parameter_groups
from cloze.launch.engine.repairs import check_steps, kept_hyper_parameters, padding_can_be_loaded
from cloze.launch.engine.states import load_states, submit_states, submitting_model
from cloze.launch.engine.summing import averaged_gradients
from cloze.model.weight_copies import WeightCopies

# Name of a parameter, and flat parts of its fp32 master and of its gradient.
Parts = Iterable[tuple[str, Tensor, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What a step has done; still on the device, so that the host waits only where it reads a number."""

    skipped: Tensor
    """float64 (1,): 1 if the gradient was infinite or NaN, so that nothing was changed, else 0; alike on all ranks."""
    gradient_norm: Tensor | float
    """Norm of the gradient of the global batch before clipping; infinite or NaN in a skipped step."""
    rate: float
    """Learning rate of the step."""
    loss_scale: float | None = None
    """Factor of the loss in the next step; None except in fp16."""


class Engine:
    """Trains a model: forward, backward, step. DeepSpeed computes, partitions and communicates.

    Where DeepSpeed does not partition, gradients are summed (summing.py), clipped and skipped here, and optimizers that
    need whole tensors are divided among the ranks by tensors (division.py); elsewhere DeepSpeed's optimizers do so.

    Args:
        model: moves to `device`; for bf16 and fp16 above stage 0 its parameters become 16-bit.
        config: of the run.
        settings: DeepSpeed's, made by `deepspeed_config`.

    Raises:
        UserError: as `build_deepspeed`.
    """

    def __init__(self, model: nn.Module, config: RunConfig, settings: Settings, device: torch.device) -> None:
        self.model: Any = model
        """Has an encoder `bert`, in fine-tuning as in pretraining."""
        self.device = device
        self._division = Division.of(model, config, device)
        groups = self._division.owned_groups if self._division else None
        self._deepspeed = build_deepspeed(model, config, settings, device, groups)
        self.sharding_stage = int(self._deepspeed.zero_optimization_stage())
        """ZeRO stage of DeepSpeed, which cuts tensors into parts; 0: every process has each weight whole."""
        self.stage = self._division.stage if self._division else self.sharding_stage
        """What is divided among the processes, in parts or by whole tensors, as in `zero.stage`."""
        self._config = config
        self._world_size: int = self._deepspeed.dp_world_size
        self._autocasts = bool(self._deepspeed.torch_autocast_enabled())
        self._until_step_end = ExitStack()
        self._copies: WeightCopies | None = None
        if self.sharding_stage == 0:
            self._deepspeed.enable_backward_allreduce = False  # `backward` sums
            self._clipping = config.train.gradient_clipping or float("inf")
            self._found_inf = torch.zeros((), device=device)
            optimizer = base_optimizer(self._deepspeed)
            # torch's fused optimizers and ours skip a step by this number on the device, and no host waits for it.
            self._optimizer_skips = device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False)
            if self._optimizer_skips:
                # torch's fused optimizers look for an attribute of this name, which GradScaler sets too.
                optimizer.found_inf = self._found_inf  # type: ignore[attr-defined]
            # A CPU casts each weight where it is used, in its caches: a step with copies took 1.00 to 1.03 times as
            # long there.
            if self._autocasts and device.type != "cpu":
                self._copies = WeightCopies(model, self.dtype)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def __call__(self, **inputs: Any) -> Any:
        """The model's output. Collective at stage 3."""
        if self._copies and self.model.training and not self._copies.active:
            self._until_step_end.enter_context(self._copies)  # weights are cast once for all passes of a step
        return self._deepspeed(**inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss` to that of the step. After the last micro-batch of a step gradients are the sums
        over all ranks.

        Args:
            loss: (), this rank's share of the loss of the global batch.
            last: whether this is the step's last micro-batch; the ranks meet in its backward, at stages 2 and 3 in all.
        """
        self._deepspeed.set_gradient_accumulation_boundary(last)
        # Gradients are averaged over the ranks; times the world size, the average is the sum. A
        # loss that is infinite or NaN makes the gradient NaN, whatever it was: so all ranks skip the step, and none
        # need ask. (0 times what is not finite is NaN: two kernels, where asking and filling takes eight.)
        share = loss.detach() * 0 + self._world_size
        meet = self.sharding_stage == 0 and (last or self.stage == 2)
        with self._averaging_over_ranks() if meet else contextlib.nullcontext():
            self._deepspeed.backward(loss * share, scale_wrt_gas=False)
        if not last:
            self._deepspeed.step()  # counts the micro-batch

    def step(self, rate: float) -> Outcome:
        """Clip the gradients and update the weights, unless a gradient is infinite or NaN.

        Args:
            rate: learning rate, of which each group of parameters has its share.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        if self.sharding_stage == 0:
            norm = self._clip()
            self._deepspeed.step()
            self._until_step_end.close()
            if self._division:
                self._division.share()
            return Outcome(self._found_inf.double().reshape(1), norm, rate)
        self._deepspeed.step()
        optimizer = self._deepspeed.optimizer
        # full, and not tensor, which would be made on the host and wait for the device to take it
        skipped = torch.full((1,), float(optimizer.overflow), dtype=torch.float64, device=self.device)
        scale = float(optimizer.loss_scale) if self.scales_loss else None
        norm = self._deepspeed.get_global_grad_norm()
        return Outcome(skipped, 0.0 if norm is None else norm, rate, scale)

    def _averaging_over_ranks(self) -> AbstractContextManager[None]:
        """Context around a backward that averages the gradients over the ranks: `backward` has multiplied the loss by
        the world size, so that the averages are the sums. In fine-tuning the trained parameters may change from step to
        step.
        """
        if self._division:
            return self._division.averaging()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad and parameter.numel()]
        return averaged_gradients(trained, self._world_size)

    def _clip(self) -> Tensor:
        """Clip the gradients, note whether they are finite, and return their norm before that."""
        parameters = list(self.model.parameters())
        divided = self._division
        norm = divided.clip(self._clipping) if divided else nn.utils.clip_grad_norm_(parameters, self._clipping)
        self._found_inf.copy_(~norm.isfinite())
        if not self._optimizer_skips and self._found_inf.item():
            # On a CPU there is nothing to wait for; DeepSpeed's kernels on a GPU know nothing of `found_inf`.
            for parameter in parameters:
                parameter.grad = None  # without gradients an optimizer changes nothing
        return norm

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path, submit: Submit) -> None:
        """Hand over the content of each file that this process writes into a checkpoint's folder. Collective.

        Args:
            submit: is given live tensors: copies them before it returns.
        """
        submit_model = submit
        if self.sharding_stage == 0:
            submit_model = submitting_model(submit, base_optimizer(self._deepspeed), self.model, self._division)
        self._deepspeed.checkpoint_engine = CheckpointFiles(submit=submit_model)
        self._deepspeed.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)  # makes the folder
        if self._division:
            submit_states(base_optimizer(self._deepspeed), self._division, folder, submit)

    def load(self, folder: Path, read: Read, optimizer_steps: int) -> bool:
        """Take weights and optimizer states from a checkpoint's folder, but no constants: those are the
        configuration's. Returns whether DeepSpeed found its files there. Collective.

        Args:
            folder: a path that means itself as a glob and as a regular expression (DeepSpeed uses it as both).
            read: reads a file, and refuses what is neither a tensor nor a plain value.
            optimizer_steps: steps that the optimizer states must be of.

        Raises:
            OtherContent: they hold what this engine would not write.
            UserError: the optimizer states are of other steps.
        """
        with loading(self._deepspeed, folder, read, optimizer_steps) as model_file:
            with (
                kept_hyper_parameters(self._deepspeed),
                padding_can_be_loaded(self._deepspeed),
                contextlib.redirect_stdout(io.StringIO()),  # DeepSpeed prints what it loads, on every rank
            ):
                path, _ = self._deepspeed.load_checkpoint(
                    str(folder.parent), tag=folder.name, load_optimizer_states=self.sharding_stage > 0
                )
                if path is not None and self.sharding_stage == 0:
                    groups = parameter_groups(self.model, self._config.optimizer)
                    optimizer = base_optimizer(self._deepspeed)
                    load_states(optimizer, self.model, groups, model_file, folder, read, optimizer_steps)
            check_steps(self._deepspeed, optimizer_steps)
        return path is not None

    # ---- weights -----------------------------------------------------------------------------------------------------

    def fragments(self) -> Iterator[Fragment]:
        """The fp32 master weights that this process updates, by the names of the parameters."""
        fragments = master_fragments(self._deepspeed)
        return (each for each in fragments if self._division is None or self._division.owns(each.name))

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """A copy of a parameter in fp32 on the host, gathered from all ranks where it is partitioned. Collective."""
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.sharding_stage == 3):
            return parameter.detach().float().cpu().clone()

    @torch.no_grad()
    def set_parameter(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter on every process to `values`, all of them in a flat tensor; its fp32 master does not change.
        Collective at stage 3.
        """
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.sharding_stage == 3):
            parameter.copy_(values.view(parameter.shape))

    @contextlib.contextmanager
    def watch_update(self, before: Callable[[Parts], None], after: Callable[[Parts], None]) -> Iterator[None]:
        """Context around `step`: the functions are called with the parts that this process updates, right before the
        optimizer changes them, when their gradients are summed and clipped, and right after. DeepSpeed updates one
        group of parameters after the other: the functions are called in turn, for each.
        """
        parts, optimizer = UpdatedParts(self._deepspeed), base_optimizer(self._deepspeed)
        hooks = (
            optimizer.register_step_pre_hook(lambda *_: before(parts)),
            optimizer.register_step_post_hook(lambda *_: after(parts)),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---- facts, read off the live engine and not off the configuration -----------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products run in."""
        dtype: torch.dtype = (
            self._deepspeed.torch_autocast_dtype() if self._autocasts else next(self.model.parameters()).dtype
        )
        return dtype

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as in fp16, where a skipped step changes the scale."""
        return bool(self._deepspeed.fp16_enabled())

    @property
    def precision(self) -> str:
        """Formats of matrix products, of parameters and of their copies that the optimizer updates, in words."""
        names = {dtype: name for name, dtype in PRECISIONS.items()}
        kept, updated = (
            "+".join(sorted({names[tensor.dtype] for tensor in tensors}))
            for tensors in (self.model.parameters(), (each.values for each in master_fragments(self._deepspeed)))
        )
        text = f"{names[self.dtype]} products, {kept} parameters"
        return text if kept == updated else f"{text} with {updated} master copies"

    @property
    def optimizer_name(self) -> str:
        """Class of the optimizer that updates the masters."""
        return type(base_optimizer(self._deepspeed)).__name__

    @contextlib.contextmanager
    def as_in_a_step(self) -> Iterator[None]:
        """Context in which the model by itself computes as the engine does, forward and backward."""
        copies = self._copies if self.model.training and self._copies and not self._copies.active else None
        with torch.autocast(self.device.type, self.dtype, enabled=self._autocasts), copies or contextlib.nullcontext():
            yield

    def close(self) -> None:
        """Release the memory of the engine."""
        self._deepspeed.destroy()
