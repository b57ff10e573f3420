"""Which checkpoints stay and which go, on folders that have only what makes them a checkpoint."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from cloze.launch.checkpoint.converting import convert_to_universal
from cloze.launch.checkpoint.manager import CheckpointManager
from cloze.launch.checkpoint.state import read_state
from cloze.launch.engine.repairs import check_steps, kept_hyper_parameters, padding_can_be_loaded
from cloze.launch.system import distributed
from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError
from tests.launch.checkpoint.small_checkpoints import manager, publish


def test_the_newest_stay_and_that_of_the_best_evaluation(folder):
    warnings = []
    checkpoints = manager(folder, warnings)
    assert checkpoints.latest() == 4
    checkpoints.retire(best=1)
    assert checkpoints.steps() == [1, 3, 4] and not warnings
    checkpoints.retire(best=4)
    assert checkpoints.steps() == [3, 4]


def test_what_the_state_of_an_earlier_version_lacks_is_the_default(folder):
    state = read_state(folder / "step-00000004")
    assert (state["best_step"], state["best_metric"], state["world_size"]) == (-1, None, 1)


def test_a_damaged_one_of_before_the_resume_takes_no_good_ones_place(folder):
    """Step 3 has not been verified when the run resumes from step 4; it must not be counted as the second good one."""
    (folder / "step-00000003" / "weights.pt").write_bytes(b"other" * 20)
    warnings = []
    checkpoints = manager(folder, warnings)
    assert checkpoints.latest() == 4
    checkpoints.retire(best=-1)
    checkpoints.retire(best=-1)
    assert checkpoints.steps() == [2, 3, 4], "two good ones, and the damaged one, which may only be out of reach"
    (warning,) = warnings
    assert "step-00000003: damaged (weights.pt has another SHA-256" in warning


@pytest.mark.parametrize(
    ("lost", "reason"),
    [("", "checksums.json or state.json is missing"), ("weights.pt", "weights.pt is missing")],
)
def test_a_run_does_not_end_well_without_its_last_checkpoint(folder, monkeypatch, lost, reason):
    monkeypatch.setattr(distributed, "reduce_sum", lambda failures: failures)  # of one process
    checkpoints = manager(folder, [])
    assert checkpoints.latest() == 4
    checkpoints.finish(None, lambda: None)
    lost = folder / "step-00000004" / lost
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    run = folder.parent
    with pytest.raises(UserError, match=f"{reason}.*remove what is left of {run}, and the same command begins"):
        checkpoints.finish(None, lambda: None)
    (run / "config.yaml").touch()
    with pytest.raises(UserError, match=f"step-00000004: found that {reason}.*the same command goes on from"):
        checkpoints.finish(None, lambda: None)


def test_the_checkpoint_of_the_best_evaluation_is_looked_for_too(folder):
    """Also one that an earlier start has written; not one that was never kept."""
    checkpoints = manager(folder, [])
    assert checkpoints.latest() == 4
    for best, lost in ((9, False), (2, False), (2, True)):
        checkpoints._best, checkpoints._found = {best}, {1, 2, 3, 4}  # as where a run goes on
        if lost:
            shutil.rmtree(checkpoints.path(2))
            with pytest.raises(
                UserError, match="step-00000002: found that .*the best weights are lost; the same command"
            ):
                checkpoints.check_last()
        else:
            checkpoints.check_last()


@pytest.mark.parametrize("whole", [True, False])
def test_a_death_between_the_renames_of_a_replacement_loses_no_checkpoint(tmp_path, monkeypatch, whole):
    """Of the same step, as after an evaluation; the only one there is. Is the new one damaged, the old one is back."""
    warnings, rename = [], os.replace
    publish(manager(tmp_path, warnings), 1, b"old")

    def die(source, target):
        rename(source, target)
        if str(target).endswith(".replaced.tmp"):
            raise KeyboardInterrupt  # whatever the code would do next is not done, as after a SIGKILL

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", die)
        publish(manager(tmp_path, warnings), 1, b"new")
    if not whole:
        (tmp_path / "step-00000001.tmp" / "rank-00000.pt").write_bytes(b"cut")
    monkeypatch.setattr(distributed, "from_main", lambda step, device: step)
    reader, said = manager(tmp_path, warnings), []
    reader._for, reader.warn = manager(tmp_path / "another", warnings), said.append
    before = sorted(tmp_path.rglob("*"))
    assert reader.agree_on_latest() is None and "is being replaced" in said[0]
    assert sorted(tmp_path.rglob("*")) == before, "one that starts from this run changes nothing of it"
    assert manager(tmp_path, warnings).agree_on_latest() == 1
    assert (tmp_path / "step-00000001" / "rank-00000.pt").read_bytes() == (b"new" if whole else b"old")
    (warning,) = warnings
    assert "an earlier process died while it replaced this checkpoint" in warning


def test_nothing_goes_where_nothing_is_good(folder):
    for path in folder.glob("*/weights.pt"):
        path.unlink()
    warnings = []
    checkpoints = manager(folder, warnings)
    assert checkpoints.latest() is None
    checkpoints.retire(best=-1)
    assert checkpoints.steps() == [1, 2, 3, 4] and len(warnings) == 4


def test_loading_takes_where_the_scale_stands_and_leaves_what_is_configured():
    """As DeepSpeed loads at ZeRO 1 to 3: the scaler and the limit of the norm come from the checkpoint."""

    def scaler(scale, window, minimum, shift, refill):
        return DynamicLossScaler(
            init_scale=scale,
            scale_window=window,
            min_scale=minimum,
            delayed_shift=shift,
            consecutive_hysteresis=refill,
            dtype=torch.float16,
        )

    optimizer = torch.optim.AdamW([torch.zeros(1)])
    optimizer.state = {"p": {"step": torch.tensor(7.0)}}
    partitioned = SimpleNamespace(optimizer=optimizer, clip_grad=0.5, loss_scaler=scaler(4.0, 300, 1.0, 3, False))
    engine = SimpleNamespace(optimizer=partitioned, zero_optimization=lambda: True)
    with kept_hyper_parameters(engine):
        partitioned.clip_grad = 1.0
        partitioned.loss_scaler = scaler(1024.0, 1000, 2.0, 1, True)
    check_steps(engine, 7)
    loaded = partitioned.loss_scaler
    assert partitioned.clip_grad == 0.5 and loaded.cur_scale == 1024.0
    assert (loaded.scale_window, loaded.min_scale, loaded.delayed_shift) == (300, 1.0, 3)
    assert not loaded.consecutive_hysteresis


@pytest.mark.parametrize("into_fp16", [True, False])
def test_a_checkpoint_of_another_precision_brings_no_loss_scaler(into_fp16):
    """Else a run in fp16 would go on unscaled, and one in bf16 with a scale that is doubled without end."""
    scalers = (
        DynamicLossScaler(
            init_scale=2.0**16,
            scale_window=1000,
            min_scale=1.0,
            delayed_shift=2,
            consecutive_hysteresis=False,
            dtype=torch.float16,
        ),
        LossScaler(scale=1.0),
    )
    own, loaded = scalers if into_fp16 else scalers[::-1]
    partitioned = SimpleNamespace(
        optimizer=torch.optim.AdamW([torch.zeros(1)]), clip_grad=1.0, loss_scaler=own, dynamic_loss_scale=own.dynamic
    )
    with kept_hyper_parameters(SimpleNamespace(optimizer=partitioned, zero_optimization=lambda: True)):
        partitioned.loss_scaler, partitioned.dynamic_loss_scale = loaded, loaded.dynamic
    assert partitioned.loss_scaler is own and partitioned.dynamic_loss_scale is into_fp16
    assert own.cur_scale == (2.0**16 if into_fp16 else 1.0)


def test_what_cannot_be_removed_does_not_keep_a_checkpoint_from_being_written(folder, monkeypatch):
    """A file that is open over NFS keeps its folder for a while."""
    for name in ("step-00000001.tmp", "step-00000005.tmp"):
        (folder / name).mkdir()
    remove = shutil.rmtree

    def busy(path, *arguments, **options):
        if path.name == "step-00000001.tmp":
            raise OSError(16, "Device or resource busy")
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    warnings = []
    engine = SimpleNamespace(model=torch.nn.Linear(1, 1))
    manager(folder, warnings)._make_room(engine, folder / "step-00000006.tmp")
    assert not (folder / "step-00000005.tmp").exists()
    (warning,) = warnings
    assert "step-00000001.tmp: could not be removed (Device or resource busy)" in warning
    with pytest.raises(OSError, match="busy"):
        manager(folder, warnings)._make_room(engine, folder / "step-00000001.tmp")


def test_conversions_of_another_run_lie_with_the_new_one(folder, tmp_path):
    """The other run may be training, and removes what it takes for leftovers; or lie in a read-only folder."""
    new = CheckpointManager(tmp_path / "new", Environment(), torch.device("cpu"), warn=print)
    checkpoints = CheckpointManager(folder, Environment(), torch.device("cpu"), warn=print, run=new)
    assert checkpoints._universal(3) == tmp_path / "new" / "step-00000003.universal.tmp"


def test_there_is_room_for_a_conversion_before_it_begins(folder, tmp_path, monkeypatch):
    """For as many bytes as the checkpoint's files have."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=99))
    with pytest.raises(UserError, match="universal.tmp: found 99 bytes free, expected at least 100 to convert"):
        convert_to_universal(folder / "step-00000004", tmp_path / "step-00000004.universal.tmp", 1)


def test_a_conversion_that_fails_on_rank_0_fails_on_all(folder, monkeypatch):
    monkeypatch.setattr(distributed, "reduce_sum", torch.ones_like)  # what rank 0 adds
    checkpoints = CheckpointManager(folder, Environment(rank=1, world_size=2), torch.device("cpu"), warn=print)
    with pytest.raises(UserError, match="found a process that could not convert a checkpoint"):
        checkpoints.convert(4)


class Parameter:
    """What DeepSpeed's loader sees of one: its fragment of the flat group, or None where others have all of it."""

    def __init__(self, fragment: torch.Tensor | None) -> None:
        self._hp_mapping = (
            None
            if fragment is None
            else SimpleNamespace(
                get_optim_state_keys=lambda: ["exp_avg", "exp_avg_sq"],
                optim_fragment={},
                get_hp_fragment_address=lambda: SimpleNamespace(start=0, numel=len(fragment)),
                get_hp_fragment=lambda optim_state_key: fragment,
            )
        )

    def load_hp_checkpoint_state(self, *arguments, **options) -> torch.Tensor:
        return torch.tensor(7.0)


class Partitioned(SimpleNamespace):
    load_hp_checkpoint_state_from_checkpoint_dir = ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir


def test_a_group_of_which_a_process_has_padding_alone_is_loaded(tmp_path):
    """As the last of hundreds of processes meets it, through DeepSpeed's own loader."""
    (tmp_path / "zero").mkdir()
    torch.save({"param_groups": [{"lr": 1.0}, {"lr": 2.0}]}, tmp_path / "zero" / "optimizer_state.pt")
    flat, padding = torch.zeros(4), torch.zeros(2)
    optimizer = torch.optim.AdamW([{"params": [flat]}, {"params": [padding]}])
    optimizer.state = {flat: {}, padding: {}}
    groups = [[Parameter(torch.ones(3))], [Parameter(None)]]
    partitioned = Partitioned(
        optimizer=optimizer,
        bit16_groups=groups,
        mpu=None,
        _load_global_state=lambda state: None,
        param_names={parameter: "name" for group in groups for parameter in group},
    )
    arguments = "bit16_groups", str(tmp_path)
    with pytest.raises(IndexError):
        partitioned.load_hp_checkpoint_state_from_checkpoint_dir(*arguments)
    with padding_can_be_loaded(SimpleNamespace(optimizer=partitioned)):
        partitioned.load_hp_checkpoint_state_from_checkpoint_dir(*arguments)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    assert optimizer.state[flat]["exp_avg"].tolist() == [1, 1, 1, 0] and optimizer.state[flat]["step"] == 7
    assert {name: value.tolist() for name, value in optimizer.state[padding].items()} == {
        "step": 7.0,
        "exp_avg": [0, 0],
        "exp_avg_sq": [0, 0],
    }
    assert partitioned.bit16_groups is groups and len(partitioned.param_names) == 2
    with pytest.raises(IndexError):
        partitioned.load_hp_checkpoint_state_from_checkpoint_dir(*arguments)
