"""What a checkpoint says of itself, and what is not believed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloze.launch.checkpoint.state import CHECKSUMS, steps_in
from cloze.pipeline.errors import UserError
from cloze.pipeline.storage import sha256_of
from tests.launch.checkpoint.small_checkpoints import manager, publish


def _swap(path):
    (path / "rank-00000.pt").rename(path / "aside")
    (path / "rank-00001.pt").rename(path / "rank-00000.pt")
    (path / "aside").rename(path / "rank-00001.pt")
    _vouch(path, "rank-00000.pt", "rank-00001.pt", "state.json")


def _vouch(path, *names: str) -> None:
    (path / CHECKSUMS).write_text(
        json.dumps({name: ((path / name).stat().st_size, sha256_of(path / name)) for name in names})
    )


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_swap, "state.json was written with other files than checksums.json lists"),
        (lambda path: _vouch(path, "state.json"), "state.json was written with other files"),
        (lambda path: (path / CHECKSUMS).write_text("[1, 2]"), "checksums.json does not list state.json"),
        (lambda path: (path / CHECKSUMS).write_text("{}"), "checksums.json does not list state.json"),
        (lambda path: (path / CHECKSUMS).write_text("7"), "missing or damaged (TypeError)"),
        (lambda path: (path / CHECKSUMS).write_text('["state.json"]'), "missing or damaged (AttributeError)"),
        (lambda path: path.rename(path.with_name("step-00000009")), "state.json is that of step 2"),
    ],
)
def test_checksums_written_anew_do_not_make_a_checkpoint_good(tmp_path, harm, reason):
    warnings = []
    publish(manager(tmp_path, warnings), 1, b"first", b"other")
    publish(manager(tmp_path, warnings), 2, b"first", b"other")
    harm(tmp_path / "step-00000002")
    assert manager(tmp_path, warnings).latest() == 1
    (warning,) = warnings
    assert reason in warning


@pytest.mark.parametrize(
    ("name", "value"),
    [("metrics_lines", "many"), ("tokens", None), ("world_size", True), ("best_value", [1]), ("shaping", 3)]
    + [
        pytest.param("best_value", 10**310, id="best_value-huge"),
        ("best_value", float("-inf")),
        ("samples_consumed", 10**30),
        ("tokens", -1),
        ("seconds", float("nan")),
        ("world_size", 0),
        ("zero_stage", 7),
    ],
)
def test_a_state_of_another_kind_is_damage(tmp_path, name, value):
    """Its hashes agree: a resume would compute with it."""
    warnings = []
    publish(manager(tmp_path, warnings), 1, b"first")
    publish(manager(tmp_path, warnings), 2, b"first", facts={name: value})
    assert manager(tmp_path, warnings).latest() == 1
    (warning,) = warnings
    assert f"damaged (state.json: {name} is '{str(value)[:60]}')" in warning


def test_a_folder_that_may_not_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    """A run began anew, and cut its curve, until its first save was refused."""

    def denied(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    (tmp_path / "step-00000001").mkdir()
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(UserError, match="permission denied"):
        steps_in(tmp_path)


def test_what_finds_and_fetches_checkpoints_imports_no_torch():
    code = (
        "import sys; from cloze.launch.checkpoint import fetching, state; from cloze.launch.pretrained import finding; "
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
