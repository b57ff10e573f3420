"""`cloze doctor` in real processes: what it finds, what it keeps for a run, and that nothing hangs it."""

import os
import re
import threading
from functools import partial

import pytest
import torch

from cloze.launch.cli import main
from cloze.launch.config import DoctorConfig
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.system import devices, distributed
from cloze.launch.tools import doctor_checks
from cloze.launch.tools.doctor import doctor
from cloze.launch.tools.planning import kernels
from tests.forked import ForkedRun
from tests.launching import finish, pretrain_arguments
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("doctor"))


def hurried(command: list[str]) -> int:
    """The command, with less time for the matrix products, and less to do for the kernels and the disk."""
    devices._SECONDS = 0.05
    kernels._COPIED, kernels._LINEAR, kernels._HEADS = {"cpu": 1 << 20}, (64, 64, 1), (4, 32, 16)
    doctor_checks._TEST_FILE_BYTES = 4 << 20
    doctor_checks.measure_kernels = partial(kernels.measure_kernels, seconds=0.05)
    return main(command)


def one_cannot_write(folder: str, command: list[str]) -> int:
    """The command, with a folder of its own for each rank; that of rank 1 is a file."""
    return hurried([*command, "--output", folder + ("/file" if os.environ["RANK"] == "1" else "/out")])


def examine(*options: str, cache, processes: int = 1, status: int = 0, main=hurried, **variables: str) -> str:
    output = finish(ForkedRun(["doctor", *options], processes, main, XDG_CACHE_HOME=str(cache), **variables), status)
    assert "Traceback" not in output
    return output


def table(output: str) -> dict[str, tuple[str, str]]:
    """What was found and the verdict, by check; cells of several lines are joined, words that were cut are not."""
    rows: dict[str, list[str]] = {}
    check = ""
    for line in output.splitlines():
        if not line.startswith("│"):
            continue
        name, found, verdict = (cell.strip() for cell in line.strip("│").split("│"))
        check = name or check
        text, known = rows.get(check, ("", ""))
        rows[check] = (f"{text} {found}".strip(), known or verdict)
    return rows


def verdicts(output: str) -> dict[str, str]:
    """Verdict by check."""
    return {check: verdict for check, (_, verdict) in table(output).items()}


def test_all_is_well_and_a_run_then_knows_its_peak(data, tmp_path):
    output = examine("--data", str(data), "--output", str(tmp_path / "out"), cache=tmp_path / "cache")
    found = verdicts(output)
    assert {"versions", "device", "matrix product", "data", "shards", "processes"} <= found.keys()
    assert "problem" not in found.values()
    assert re.search(r"writes [\d,]+ MB/s, reads [\d,]+ MB/s", table(output)["output"][0])
    assert not list((tmp_path / "out").iterdir()), "it leaves nothing behind"
    for folder, has_mfu in (("cache", True), ("no-cache", False)):
        run = tmp_path / f"run-{folder}"
        finish(
            ForkedRun(pretrain_arguments(data, run, "--train.max_steps", "2"), XDG_CACHE_HOME=str(tmp_path / folder))
        )
        values = [line["speed/mfu"] for line in read_metrics(run) if "speed/mfu" in line]
        assert bool(values) == has_mfu and all(0 < value < 1 for value in values)


def test_what_is_not_examined_says_so(tmp_path):
    output = examine(cache=tmp_path / "cache")
    found = table(output)
    assert found["output"][1] == found["data"][1] == found["clock"][1] == found["all-reduce"][1] == "skipped"
    assert "give --output" in found["output"][0] and "give --data" in found["data"][0]
    assert "skipped:" not in output, "and nothing is to be done about it"


def test_a_run_faster_than_its_peak_says_what_that_means(data, tmp_path, monkeypatch):
    """Once, and the run goes on with a peak that it measures anew: no figure above it is shown."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    devices.keep_measured(torch.device("cpu"), {torch.float32: 1e3})
    output = finish(ForkedRun(pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "3"), 1, hurried))
    assert output.count("of the peak is impossible") == 1
    assert f"the peak in {tmp_path / 'cache' / 'cloze' / 'matmul-flops.json'} was measured while" in output
    values = [line["speed/mfu"] for line in read_metrics(tmp_path / "run") if "train/loss" in line]
    assert len(values) == 3 and all(0 < value < 1 for value in values)
    assert devices.peak_flops(torch.device("cpu"), torch.float32) > 1e9, "kept for the next run"


def test_a_share_above_the_data_sheet_s_peak_is_not_shown(data, tmp_path):
    output = finish(
        ForkedRun(pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "3"), 1, slower_than_its_sheet)
    )
    assert output.count("of the peak is impossible and not shown: the data sheet's rate for 'CPU'") == 1
    assert "MFU" not in output and not any("speed/mfu" in line for line in read_metrics(tmp_path / "run"))


def slower_than_its_sheet(command: list[str]) -> int:
    devices.data_sheet_flops = lambda device: 1.0
    return main(command)


def with_peaks_of_their_own(command: list[str]) -> int:
    """The command in processes whose machines know different things of their devices."""
    devices._SECONDS = 0.3
    known = os.environ["KNOWN"].split()[int(os.environ["RANK"])]
    if known == "sheet":
        devices.data_sheet_flops = lambda device: 1.0
    else:
        os.environ["XDG_CACHE_HOME"] = f"{os.environ['XDG_CACHE_HOME']}/{known}"
    return main(command)


@pytest.mark.parametrize(("known", "warnings", "shown"), [("measured nothing", 0, False), ("measured sheet", 1, True)])
def test_ranks_that_know_different_peaks_stay_together(data, tmp_path, monkeypatch, known, warnings, shown):
    """One has a peak far below its speed, the other none, or one that it does not measure anew: what to do about a
    share above 1 takes a collective, which all have to reach."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "measured"))
    devices.keep_measured(torch.device("cpu"), {torch.float32: 1e3})
    run = tmp_path / "run"
    output = finish(
        ForkedRun(
            pretrain_arguments(data, run, "--train.max_steps", "3"),
            2,
            with_peaks_of_their_own,
            KNOWN=known,
            XDG_CACHE_HOME=str(cache),
        )
    )
    lines = [line for line in read_metrics(run) if "train/loss" in line]
    assert output.count("of the peak is impossible") == warnings and len(lines) == 3
    assert all(("speed/mfu" in line) == shown and line.get("speed/mfu", 0) < 1 for line in lines)


@pytest.mark.slow
def test_two_processes_are_examined_together(data, tmp_path):
    output = examine("--data", str(data), "--output", str(tmp_path / "out"), processes=2, cache=tmp_path / "cache")
    found = table(output)
    assert found["processes"] == ("2 on 1 machine, started by torchrun, through gloo", "ok")
    assert re.search(r"[\d.]+ GB/s with 16 MiB", found["all-reduce"][0])
    assert {found[check][1] for check in ("clock", "all-reduce", "shared output", "shards")} == {"ok"}


@pytest.mark.slow
def test_a_damaged_shard_is_a_problem_on_whichever_rank_finds_it(tmp_path):
    folder = make_shards(tmp_path / "data")
    path = sorted((folder / "train").iterdir())[1]  # of rank 1
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    output = examine("--data", str(folder), processes=2, status=2, cache=tmp_path / "cache")
    assert table(output)["shards"][1] == "problem" and "expected" in table(output)["shards"][0]
    assert "problem: shards: prepare or copy the damaged shards again" in output


def test_bad_folders_are_problems_with_status_2(tmp_path):
    (tmp_path / "file").write_text("")
    output = examine("--data", str(tmp_path), "--output", str(tmp_path / "file"), status=2, cache=tmp_path / "cache")
    assert verdicts(output)["data"] == verdicts(output)["output"] == "problem"


@pytest.mark.slow
def test_what_hangs_is_named_in_time(tmp_path):
    """A disk that never answers: opening a pipe without a reader blocks for ever."""
    os.mkfifo(tmp_path / ".doctor-rank-00000")
    output = examine("--output", str(tmp_path), "--timeout_seconds", "10", status=2, cache=tmp_path / "cache")
    assert verdicts(output)["output"] == "problem" and "no answer in 10 s" in table(output)["output"][0]
    assert verdicts(output)["versions"] == "ok", "what comes before and after it is examined all the same"


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_in_time(tmp_path):
    output = examine(
        "--timeout_seconds",
        "2",
        status=2,
        cache=tmp_path / "cache",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29733",
    )
    assert verdicts(output)["processes"] == "problem" and "see that every machine was started" in output


def test_a_folder_that_one_rank_cannot_write_is_named_by_rank_0_in_time(tmp_path):
    """As where one machine has not mounted it; the other ranks continue without waiting."""
    (tmp_path / "file").write_text("")
    output = examine(
        "--timeout_seconds",
        "30",
        processes=2,
        status=2,
        cache=tmp_path / "cache",
        main=partial(one_cannot_write, str(tmp_path)),
    )
    found = table(output)
    assert found["output"][1] == "problem" and found["output"][0].startswith("rank 1: "), output
    assert found["shared output"][1] == "problem" and "files of rank 1 are not to be seen" in found["shared output"][0]


def test_every_thread_works_on_the_gpu_of_its_rank(tmp_path, monkeypatch, capsys):
    """CUDA's current device is a thread's own and first GPU 0: there a barrier would allocate, and meet itself."""
    on = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: on.update({threading.current_thread().name: device}))
    monkeypatch.setattr(distributed, "initialize", lambda environment, timeout: torch.device("cuda", 1))
    assert doctor(DoctorConfig(output=str(tmp_path / "out"))) == 2, "nothing was really joined"
    assert on.keys() >= {"MainThread", "processes", "device", "matrix product", "shared memory", "output"}
    assert set(on.values()) == {torch.device("cuda", 1)}
