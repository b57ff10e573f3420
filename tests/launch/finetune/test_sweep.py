"""Several seeds and settings: what is run, and where; what failed; what they make together."""

import json
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloze.launch.cli import main
from cloze.launch.run import runs
from cloze.launch.run.run_locks import locked
from cloze.launch.run.runs import LOCK
from cloze.launch.run.status_file import read_status
from cloze.launch.sweeps import pool as sweep_pool
from cloze.launch.sweeps.run import Run, claim
from tests.commands import forked_cloze, main_of_python
from tests.forked import ForkedRun
from tests.launch.finetune.running import arguments
from tests.launch.finetune.small import make_model, sst2
from tests.launching import finish, kill_when, step_of


@pytest.mark.parametrize(
    "grid, said",
    [
        ("epoch=1,2", "did you mean --epochs?"),
        ("learning_rate=1e-3,-1", "found -1"),
        ("learning_rate=1e-3,fast", "fast"),
        ("max_length=16,65", "at most 64"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(model, files, tmp_path, capsys, grid, said):
    assert main(arguments("sst2", model, *files, tmp_path / "sweep", "--grid", grid)) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "sweep").exists()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Files of two steps, where nothing needs to be learned."""
    return sst2(tmp_path_factory.mktemp("few"), train=16)


def result(folder: Path, run: str) -> dict:
    return json.loads((folder / run / "results.json").read_text())


@pytest.fixture
def forking(tmp_path):
    """The main of a sweep whose runs are forked."""
    with forked_cloze(tmp_path / "programs") as program:
        yield partial(main_of_python, program)


@pytest.mark.slow
def test_killed_and_started_again_it_repeats_no_finished_run_and_sums_all_up(model, files, tmp_path, capsys, forking):
    """Two seeds of a setting that learns and of one that hardly moves, whose constant answers count as failed.

    Finished runs are no results of a sweep with another dropout.
    """
    folder = tmp_path / "sweep"
    words = arguments("sst2", model, *files, folder, "--seeds", 2, "--epochs", 3, "--grid", "learning_rate=3e-3,1e-12")
    names = [f"learning_rate={rate}/seed-{seed}" for rate in ("3e-3", "1e-12") for seed in (42, 43)]
    kill_when(
        ForkedRun(words, main=forking),
        lambda: (folder / names[0] / "results.json").exists() and step_of(folder / names[1]) >= 5,
    )
    written = (folder / names[0] / "results.json").stat().st_mtime_ns
    said = finish(ForkedRun(words, main=forking))
    assert "1 of 4 runs are complete already" in said
    assert (folder / names[0] / "results.json").stat().st_mtime_ns == written
    summary = json.loads((folder / "results.json").read_text())
    assert [each["runs"] for each in summary["settings"]] == [names[:2], names[2:]]
    for each in summary["settings"]:
        values = [result(folder, run)["validation"]["accuracy"] for run in each["runs"]]
        measured = each["metrics"]["validation/accuracy"]
        assert list(measured["values"].values()) == values and measured["n"] == 2
        assert measured["median"] == pytest.approx(statistics.median(values))
        assert measured["mean"] == pytest.approx(sum(values) / 2)
        assert measured["deviation"] == pytest.approx(statistics.stdev(values))
        share = max(files[1].read_text().count(f"\t{label}\n") for label in "01") / 21
        assert list(each["failed"]) == [run for run, value in zip(each["runs"], values, strict=True) if value <= share]
    best = max(names, key=lambda run: result(folder, run)["validation"]["accuracy"])
    assert summary["best"]["run"] == {"value": result(folder, best)["validation"]["accuracy"], "name": best}
    assert summary["best"]["median"]["settings"] == {"train.learning_rate": "3e-3"}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / runs.STATUS).read_text())["state"] == "complete"
    assert main([*words, "--dropout", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "dropout" in error and "seed-42" in error


def test_a_stop_is_passed_on_and_the_sweep_asks_to_be_queued_again(model, files, tmp_path, forking):
    folder = tmp_path / "sweep"
    words = arguments("sst2", model, *files, folder, "--seeds", 2, "--epochs", 200)
    process = ForkedRun(words, main=forking)
    while step_of(folder / "seed-42") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert "seed-42: stopped" in finish(process, 75)
    assert json.loads((folder / "seed-42" / runs.STATUS).read_text())["state"] == "requeue"
    assert json.loads((folder / runs.STATUS).read_text())["state"] == "requeue"
    assert not (folder / "seed-43").exists()


def run_here(run: Run, device: str, before: Callable[[Run], object]) -> SimpleNamespace:
    """A run of a sweep in this process."""
    before(run)
    with claim(run):
        return SimpleNamespace(poll=lambda: 0, returncode=main(run.command[3:]))


def shorten(path: Path) -> None:
    """Remove the last line of a file."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_complete_runs_measure_test_files_that_are_new_or_were_corrected(model, few, tmp_path, monkeypatch):
    """Without being trained again."""
    began: list[str] = []
    monkeypatch.setattr(sweep_pool, "_start", partial(run_here, before=lambda run: began.append(run.name)))
    first, second = (shutil.copyfile(few[1], tmp_path / f"{name}.tsv") for name in ("first", "second"))
    shorten(second)
    folder, tested = tmp_path / "sweep", dict[str, int]()
    both = ("--test", first, second)
    for step, options in enumerate(((), ("--test", first), both, both, ("--test", second))):
        if step == 3:
            shorten(first)
        assert main(arguments("sst2", model, *few, folder, "--seeds", 2, "--epochs", 1, *options)) == 0
        assert began == ["seed-42", "seed-43"] * (step + 1)
        for seed in (42, 43):
            found = result(folder, f"seed-{seed}")
            tested = {name: found[name]["examples"] for name in found if name.startswith("test/")}
            assert len(tested) == len(options[1:])
        (setting,) = json.loads((folder / "results.json").read_text())["settings"]
        measured = {name for name in setting["metrics"] if name.endswith("/accuracy")}
        assert measured == {f"{split}/accuracy" for split in ("validation", *tested)}
        assert step != 3 or tested["test/first"] == tested["test/second"]
    assert step_of(folder / "seed-42") == result(folder, "seed-42")["steps"]


def test_runs_of_replaced_inputs_make_no_table(model, few, tmp_path, capsys, monkeypatch):
    """What the second run reads is replaced after the first has ended; that one serves all sweeps here."""
    inputs = {"model": tmp_path / "model", "train": tmp_path / "train.tsv", "validation": tmp_path / "dev.tsv"}
    test, folder, replaced = tmp_path / "other.tsv", tmp_path / "sweep", ""

    def replace(run: Run) -> None:
        if run.name == "seed-43" and replaced == "model":
            make_model(inputs["model"], seed=5)
        elif run.name == "seed-43" and replaced:
            shorten(inputs.get(replaced, test))

    monkeypatch.setattr(sweep_pool, "_start", partial(run_here, before=replace))
    for replaced in ("model", "train", "validation", "test", ""):
        shutil.copytree(model, inputs["model"], dirs_exist_ok=True)
        for path, file in ((inputs["train"], few[0]), (inputs["validation"], few[1]), (test, few[1])):
            shutil.copyfile(file, path)
        status = main(arguments("sst2", *inputs.values(), folder, "--seeds", 2, "--epochs", 1, "--test", test))
        found = "results of other test files" if replaced == "test" else f"a run with {replaced}_hash"
        error = capsys.readouterr().err
        assert status == (2 if replaced else 0), error
        assert not replaced or f"seed-43: found {found} " in error
        assert (folder / "results.json").exists() == (not replaced)
        assert read_status(folder)["state"] == ("failed" if replaced else "complete")
        shutil.rmtree(folder / "seed-43")


@pytest.mark.parametrize("lost", ["model/model.safetensors", "metrics.jsonl"])
def test_runs_that_have_lost_a_file_make_no_table(model, few, tmp_path, capsys, monkeypatch, lost):
    """Also where it is lost while another run is at work; the same command writes a model again."""
    words = arguments("sst2", model, *few, folder := tmp_path / "sweep", "--seeds", 2, "--epochs", 1)
    began: list[str] = []

    def lose(run: Run) -> None:
        began.append(run.name)
        if run.name == "seed-43" and len(began) == 2:
            (folder / "seed-42" / lost).unlink()

    monkeypatch.setattr(sweep_pool, "_start", partial(run_here, before=lose))
    assert main(words) == 2 and read_status(folder)["state"] == "failed"
    assert f"seed-42/{lost}: found no such file, expected it as the run has written it" in capsys.readouterr().err
    assert not (folder / "results.json").exists()
    if lost == "metrics.jsonl":  # which no command can write again
        assert main(words) == 2
        shutil.rmtree(folder / "seed-42")
    assert main(words) == 0 and began == ["seed-42", "seed-43", "seed-42"]
    assert (folder / "seed-42" / lost).stat().st_size > 0


@pytest.mark.parametrize("grid", ["epochs=1,1.0", "learning_rate=1e-3,0.001", "evaluation.keep_best=true,True"])
def test_settings_that_are_the_same_in_other_words_are_refused(model, files, tmp_path, capsys, grid):
    assert main(arguments("sst2", model, *files, tmp_path / "sweep", "--grid", grid)) == 2
    assert "with the same settings, expected others" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_that_is_refused_changes_nothing_of_the_one_at_work(model, files, tmp_path, capsys):
    """Whose runs would begin by the other's settings."""
    with locked(folder := tmp_path / "sweep"):
        assert main(arguments("sst2", model, *files, folder, "--seeds", 2)) == 2
    assert "in use by another job" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_single_run_keeps_its_results_before_a_sweep_into_its_folder(model, files, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("of a run")
    (tmp_path / "results.json").write_text("of that run")
    assert main(arguments("sst2", model, *files, tmp_path, "--seeds", 2)) == 2
    assert "the folder of a single run (config.yaml), expected a new one" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "results.json"}


def test_settings_are_compared_on_one_file(model, files, tmp_path, capsys):
    assert (
        main(arguments("sst2", model, *files, tmp_path / "sweep", "--grid", f"validation={files[0]},{files[1]}")) == 2
    )
    assert "grid: found 'validation', expected another field: it is the same for all runs" in capsys.readouterr().err


def test_seeds_under_torchrun_are_refused(model, files, tmp_path, monkeypatch, capsys):
    torchruns = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    assert main(arguments("sst2", model, *files, tmp_path / "sweep", "--seeds", 2)) == 2
    assert "seeds, grid: found them in a run of 2 processes" in capsys.readouterr().err
