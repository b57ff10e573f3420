"""What `cloze doctor` examines."""

import pytest
import torch

from cloze.launch.commands import parse
from cloze.launch.tools import doctor_checks
from cloze.launch.tools.doctor import merged
from cloze.launch.tools.doctor_checks import Finding
from cloze.pipeline.errors import UserError
from cloze.version import DISTRIBUTION


def test_a_gpu_without_bf16_is_reported_with_what_trains_on_it(monkeypatch):
    old = {"mem_get_info": (100, 100), "is_bf16_supported": False, "get_device_name": "an old GPU"}
    for name, value in old.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    (finding,) = doctor_checks.device(torch.device("cuda", 0))
    config = parse("pretrain", ["--data", "d", "--output", "o", *finding.advice.partition("train with ")[2].split()])
    assert (config.train.precision, config.zero.stage) == ("fp16", 1)


def test_the_sum_of_gradients_is_compared_with_a_step_of_the_run():
    """BERT-base's 440 MB on two H100: a step of its 256 sequences takes some tens of milliseconds."""
    with pytest.raises(UserError, match="nonsense"):
        doctor_checks.collective(torch.device("cpu"), 1, "nonsense")
    slow, fast = (doctor_checks.share_of_step("bert-base-phase1", 2, 1 / rate, device="h100") for rate in (1e9, 200e9))
    assert (slow.verdict, fast.verdict) == ("warning", "ok")
    assert "0.44 GB, takes 0.44" in slow.found and "of a planned step of 0.0" in slow.found
    assert "larger global batch" in slow.advice


def test_one_line_for_all_ranks():
    same = [[Finding("device", "8 GiB", measure=8)], [Finding("device", "8 GiB", measure=8)]]
    assert merged(same) == [Finding("device", "8 GiB", measure=8)]
    slower = [[Finding("output", "9 MB/s", measure=9)], [Finding("output", "2 MB/s", measure=2)]]
    assert merged(slower)[0].found == "rank 1: 2 MB/s"
    worse = [[Finding("output", "9 MB/s", "warning", "w", measure=1)], [Finding("output", "full", "problem", "p")]]
    assert (merged(worse)[0].found, merged(worse)[0].verdict) == ("rank 1: full", "problem")
    broken = [[Finding("shards", text, "problem", "p")] for text in ("a: missing", "b: missing")]
    assert merged(broken)[0].found == "rank 0: a: missing; rank 1: b: missing", "every damage at once"
    different = [[Finding("versions", "torch 1", uniform=True)], [Finding("versions", "torch 2", uniform=True)]]
    assert merged(different)[0].verdict == "problem"
    assert "torch 1" in merged(different)[0].found and "torch 2" in merged(different)[0].found


def test_what_the_index_knows_by_the_imported_name_is_found(monkeypatch):
    """PyPI's `cloze` is something unrelated, whose files lie in a folder of the same name."""
    monkeypatch.setattr(doctor_checks.metadata, "requires", lambda name: [])
    installed = {DISTRIBUTION: "0.1.0"}
    monkeypatch.setattr(doctor_checks.metadata, "version", lambda name: named(installed, name))
    assert [finding.check for finding in doctor_checks.versions()] == ["versions"]
    installed["cloze"] = "0.11.0"
    _, finding = doctor_checks.versions()
    assert (finding.verdict, finding.found) == ("problem", "cloze 0.11.0, which is not cloze-bert")
    assert "install cloze-bert again" in finding.advice


def named(installed: dict[str, str], name: str) -> str:
    if name not in installed:
        raise doctor_checks.metadata.PackageNotFoundError(name)
    return installed[name]
