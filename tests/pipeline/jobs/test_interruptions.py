"""Kills, lost workers, full disks, other people's folders: clear words, and the same bytes afterwards."""

import base64
import errno
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloze.launch.run.run_locks import in_use, locked
from cloze.launch.run.runs import LOCK
from cloze.pipeline.config import SourceConfig, VerifyConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import prepare as preparing
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.reports import save_report
from cloze.pipeline.jobs.tokenize_stage import PARTITIONS, tokenize
from cloze.pipeline.jobs.verifying import verify
from cloze.pipeline.progress import Progress
from cloze.pipeline.shards.manifest import Manifest
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")

# A script as a user would write one: only a real process can be killed.
SCRIPT = """
import sys
from pathlib import Path
from cloze.pipeline import readers
from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus
if __name__ == "__main__":
    readers._GROUP_BYTES = 1  # a task for each file
    folder = Path(sys.argv[1])
    prepare(corpus.config(folder, [folder / "in"], output=str(folder / sys.argv[2]), workers=int(sys.argv[3])))
"""


def start(folder, name: str, workers: int) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), name, str(workers)],
        cwd=root,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_a_task(process: subprocess.Popen, work: Path) -> None:
    deadline = time.monotonic() + 300
    while not corpus.count(work, "task-*.json"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def marks(paths: list[Path]) -> dict[Path, tuple[int, int]]:
    """What tells a file from another one of the same name and bytes that is written later."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def complete(data: Path) -> list[Path]:
    """The reports of an interrupted run, and the shards that these name."""
    reports = list((data / ".work").glob("run-*/[!.]*-*.json"))
    contents = [json.loads(path.read_text().splitlines()[1]) for path in reports]
    return reports + [data / shard["file"] for content in contents for shard in content.get("shards", [])]


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_at_any_moment_and_run_again(folder, undisturbed, workers):
    """Killed when so and so many files exist, again and again, until it is through: the bytes are the same, and what
    was complete is not made again."""
    name = f"killed-{workers}"
    work = folder / name / ".work"
    interrupted, kept = 0, {}
    for wanted in (3, 8, 14, 20):
        process = start(folder, name, workers)
        while process.poll() is None:
            if corpus.count(work) >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        process.wait()
        interrupted += process.returncode != 0
        assert (folder / name / "manifest.json").is_file() == (process.returncode == 0)
        assert kept.items() <= marks(complete(folder / name)).items() or process.returncode == 0
        kept |= marks(complete(folder / name))
    assert interrupted >= 2 and kept
    assert start(folder, name, workers).wait() == 0
    shards = {path: mark for path, mark in kept.items() if path.suffix == ".arrow"}
    assert marks(list(shards)) == shards
    assert corpus.contents(folder / name) == undisturbed


def test_workers_end_with_a_killed_parent(folder, undisturbed):
    """Only the parent is killed: nothing tells the others but its absence."""
    process = start(folder, "parent", 3)
    wait_for_a_task(process, folder / "parent/.work")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)  # raises when the last of the group has gone
            time.sleep(0.01)
    assert start(folder, "parent", 3).wait() == 0
    assert corpus.contents(folder / "parent") == undisturbed


def test_a_killed_worker_ends_the_job_with_one_line(folder, undisturbed, monkeypatch):
    config = corpus.config(folder, [folder / "in"], output=str(folder / "worker"), workers=2)
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.tokenize", _die)
        with pytest.raises(UserError, match="a worker process died.*run the same command again"):
            prepare(config)
    prepare(config)
    assert corpus.contents(folder / "worker") == undisturbed


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_without_memory_ends_the_job_with_one_line(folder, tmp_path, monkeypatch, workers):
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"), workers=workers)
    monkeypatch.setattr("cloze.pipeline.jobs.prepare.build", _exhaust)
    with pytest.raises(UserError, match="too little memory.*fewer --workers"):
        prepare(config)
    assert not (tmp_path / "data/manifest.json").exists()


def _exhaust(task):
    raise MemoryError


def _die(task):
    """Kill the process that runs this, unless it is the parent, which works too."""
    if multiprocessing.parent_process():
        os.kill(os.getpid(), signal.SIGKILL)
    return tokenize(task)


def test_a_complete_run_is_not_repeated_and_another_is_refused(folder, undisturbed):
    before = (folder / "undisturbed/manifest.json").stat().st_mtime_ns
    config = corpus.config(folder, [folder / "in"], output=str(folder / "undisturbed"))
    assert prepare(config).hash == Manifest.load(folder / "undisturbed").hash
    assert (folder / "undisturbed/manifest.json").stat().st_mtime_ns == before
    other = corpus.config(folder, [folder / "in"], output=str(folder / "undisturbed"), seed=7)
    with pytest.raises(UserError, match="preparation.seed.*42, now 7"):
        prepare(other)
    with pytest.raises(UserError, match="sources"):
        prepare(corpus.config(folder, [folder / "in/part-0.jsonl.gz"], output=str(folder / "undisturbed")))


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("train/shard-00000.arrow", "removed", "found no such shard"),
        ("train/shard-00000.arrow", "emptied", "damaged shard: found 0 bytes"),
        ("test/shard-00000.arrow", "cut", "damaged shard: found"),
        ("validation", "removed", "validation/shard-00000.arrow: found no such shard"),
        ("tokenizer", "removed", "tokenizer/tokenizer.json: found no such file"),
        ("tokenizer/vocab.txt", "emptied", "vocab.txt: found another file"),
        ("manifest.json", "removed", "manifest.json"),
        ("manifest.json", "emptied", "manifest.json: damaged"),
    ],
)
def test_complete_data_that_has_lost_a_part_is_refused_with_advice_that_helps(
    folder, undisturbed, tmp_path, name, change, found
):
    """As after a copy that was cut short. `verify` advises the same."""
    output = shutil.copytree(folder / "undisturbed", tmp_path / "data")
    damage(output / name, change)
    left = corpus.contents(output)
    config = corpus.config(folder, [folder / "in"], output=str(output))
    with pytest.raises(UserError, match=rf"{found}.*; restore (it|that file|the file),? .*(remove|into another)"):
        prepare(config)
    assert corpus.contents(output) == left
    if name == "manifest.json":
        with pytest.raises(UserError, match="; restore the file or prepare the data into another folder"):
            verify(VerifyConfig(str(output)))
    shutil.copytree(folder / "undisturbed", output, dirs_exist_ok=True)
    prepare(config)
    assert corpus.contents(output) == undisturbed


def damage(path: Path, change: str) -> None:
    """Change what was written as a cleaner, a full disk or other hardware does."""
    if path.is_dir():
        shutil.rmtree(path)
        return
    content = path.read_bytes()
    path.unlink()
    if change != "removed":
        path.write_bytes({"emptied": b"", "cut": content[:-1], "flipped": content.swapcase()}[change])


def test_an_interrupted_run_of_another_command_is_refused(folder, monkeypatch):
    process = start(folder, "mixed", 1)
    wait_for_a_task(process, folder / "mixed/.work")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match="interrupted run with another preparation.seed"):
        prepare(corpus.config(folder, [folder / "in"], output=str(folder / "mixed"), seed=9))
    with monkeypatch.context() as patch:
        patch.setattr(np, "__version__", "1.0")  # other versions may give other bytes
        with pytest.raises(UserError, match=r"another library versions.numpy \(.*, now '1.0'\)"):
            prepare(corpus.config(folder, [folder / "in"], output=str(folder / "mixed")))


def test_an_interrupted_run_of_which_nothing_is_complete_is_begun_anew(tmp_path, monkeypatch):
    """The advice of an error is followed, with the tokenizer and the input changed too: a line says so. With a complete
    task the same is refused.
    """
    path = tmp_path / "in/a.txt"
    path.parent.mkdir()
    path.write_bytes("\n\n".join(corpus.documents(40)).encode() + b"\n\nA caf\xe9.")
    notes, progress = [], Progress()
    progress.note = notes.append
    with pytest.raises(UserError, match="replace such bytes with --source.encoding_errors replace"):
        prepare(corpus.config(tmp_path, [path]))
    corpus.tokenizer(lowercase=False).save(tmp_path / "cased")
    source = SourceConfig(encoding_errors="replace")
    changed = corpus.config(tmp_path, [path], source=source, tokenizer=str(tmp_path / "cased"))
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.build", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(changed, progress)
    (line,) = [note for note in notes if "begun anew" in note]
    assert "an interrupted run with another preparation.sources.encoding_errors ('stop', now 'replace')" in line
    assert len(list((tmp_path / "data/.work").glob("run-*"))) == 1
    with pytest.raises(UserError, match=r"another preparation.sources.text_field \('text', now 'body'\); repeat "):
        prepare(corpus.config(tmp_path, [path], source=replace(source, text_field="body")))
    prepare(changed)
    prepare(replace(changed, output=str(tmp_path / "alone")))
    assert corpus.contents(tmp_path / "data") == corpus.contents(tmp_path / "alone")


@pytest.mark.parametrize("damage", ["removed", "empty", "half", "a list", "no text", "no fields"])
def test_without_what_tells_its_command_no_other_one_takes_over_a_run(folder, undisturbed, monkeypatch, damage):
    """Its parts were once published as those of another corpus and seed."""
    output = folder / f"nameless-{damage}"
    configs = {seed: corpus.config(folder, [folder / "in"], output=str(output), seed=seed) for seed in (42, 9)}
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.build", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(configs[42])
    told = output / ".work/run.json"
    content = told.read_bytes()
    told.unlink()
    if damage != "removed":
        others = {"empty": b"", "half": content[:99], "a list": b"[]", "no text": b"\xff", "no fields": b"{}"}
        told.write_bytes(others[damage])
    with pytest.raises(UserError, match="run.json should tell, but that is missing or damaged"):
        prepare(configs[9])
    reports = list((output / ".work").glob("run-*/task-*.json"))
    kept = marks(reports)
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.build", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(configs[42])
        assert reports and marks(reports) == kept, "the same command takes over what is there"
    assert told.read_bytes() == content
    prepare(configs[42])
    assert corpus.contents(output) == undisturbed


def test_reports_of_another_run_that_lie_in_the_work_folder_are_not_taken(folder, undisturbed, monkeypatch):
    """As if both were copied together: the folder of a run's reports has its name."""
    output = folder / "together"
    config = corpus.config(folder, [folder / "in"], output=str(folder / "first"))
    with monkeypatch.context() as patch:
        patch.setattr("cloze.pipeline.jobs.prepare.build", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus.config(folder, [folder / "in"], output=str(output), seed=9))
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    shutil.copytree(output / ".work", folder / "first/.work", dirs_exist_ok=True, ignore=lambda *_: ["run.json"])
    prepare(config)
    assert corpus.contents(folder / "first") == undisturbed


@pytest.fixture(scope="module")
def two_runs(folder, tmp_path_factory):
    """Runs of two corpora, `own` and `other`, interrupted when all but the manifest is there."""
    made = tmp_path_factory.mktemp("runs")
    shutil.copytree(folder / "in", made / "in")
    for path in (made / "in").iterdir():
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"a", b"o")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloze.pipeline.readers._GROUP_BYTES", 1)
        patch.setattr("cloze.pipeline.jobs.prepare._publish", _interrupt)
        for name, source in (("own", folder / "in"), ("other", made / "in")):
            with pytest.raises(KeyboardInterrupt):
                prepare(corpus.config(folder, [source], output=str(made / name)))
    return made


@pytest.mark.parametrize("copied", ["task-*.part", "task-*.json", "*"])
def test_files_of_another_run_in_the_place_of_ones_own_are_made_again(folder, undisturbed, two_runs, copied, tmp_path):
    """As a backup that mixes two runs may give them back: other texts of the same number were published once."""
    shutil.copytree(two_runs / "own", tmp_path / "own")
    own, other = (next((place / ".work").glob("run-*")) for place in (tmp_path / "own", two_runs / "other"))
    found = [path for path in other.glob(copied) if path.name != "touched.json"]
    assert found and all((own / path.name).exists() for path in found)
    for path in found:
        shutil.copy2(path, own)
    prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "own")))
    assert corpus.contents(tmp_path / "own") == undisturbed


def test_a_report_of_values_of_another_kind_counts_as_none(folder, undisturbed, tmp_path):
    """Though its digest is right."""
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))

    def stop_at_the_end() -> None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("cloze.pipeline.jobs.prepare._publish", _interrupt)
            prepare(config)

    stop_at_the_end()
    (own,) = (tmp_path / "data/.work").glob("run-*")
    for record in (5, {"touched": 5}, {"other": []}):
        save_report(own / "touched.json", record)
        stop_at_the_end()
    others = [[None], "x", 10**30, -1, True, 1e308, {}]
    changes = {
        "task-*.json": [
            *[{"bytes": value} for value in others],
            *[{"counts": value} for value in ({}, {"a": 1}, 5)],
            {"tokens": ["x"] * PARTITIONS},
            *[{"digests": value} for value in (5, "x" * 64, "00")],
            *[{"parts": value} for value in others],
            {"parts": 1 << 40},
            {"documents": [1]},
            {"other": 1},
        ],
        "64-*.json": [
            *[{"counts": value} for value in ({}, {"documents": "x"}, 5)],
            *[{"length_histogram": value} for value in (None, [1], ["x"] * 65)],
            *[{"unigrams": value} for value in (5, "x", "é", "", base64.b64encode(zlib.compress(b"1234")).decode())],
            *[{"shards": value} for value in (5, [5], [{}], [{"file": "x"}])],
            *[{"file": value} for value in (5, [], "../../x")],
            {"samples": "x"},
        ],
    }
    for pattern, values in changes.items():
        reports = {path: json.loads(path.read_text().splitlines()[1]) for path in sorted(own.glob(pattern))}
        while values:
            for path, content in reports.items():
                change = values.pop() if values else {}
                if "bytes" in change:
                    change = {"counts": content["counts"] | change}
                if change.keys() & {"file", "samples"}:
                    change = {"shards": [content["shards"][0] | change]}
                save_report(path, content | change)
            save_report(next(iter(reports)), [])
            stop_at_the_end()
            assert all(json.loads(path.read_text().splitlines()[1]) == content for path, content in reports.items())
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("size", ["small", "large"])
def test_other_content_with_the_old_size_and_time_of_change_is_noticed(tmp_path, monkeypatch, size):
    """Put in its place between the plan and the reading, by a tool that restores both."""
    if size == "large":
        monkeypatch.setattr("cloze.pipeline.readers.files.BLOCK_BYTES", 8)
    path = tmp_path / "in/a.txt"
    path.parent.mkdir()
    path.write_text("the first text\n")
    real = preparing.open_work

    def change(*given):
        old = path.stat()
        time.sleep(0.02)  # the clock of a file system may have ticks of ten milliseconds
        path.write_text("another text..\n")
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (old.st_size, old.st_mtime_ns)
        return real(*given)

    monkeypatch.setattr(preparing, "open_work", change)
    with pytest.raises(UserError, match="a.txt: changed while it was read"):
        prepare(corpus.config(tmp_path, [path], output=str(tmp_path / "data")))


def test_a_folder_with_other_files_is_refused(folder, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="other files"):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_on_one_folder(folder, tmp_path):
    import fcntl

    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    (tmp_path / "data/.work").mkdir(parents=True)
    with open(tmp_path / "data/.work/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            prepare(config)
    prepare(config)


def test_the_same_command_that_is_faster_meanwhile_has_done_the_work(folder, undisturbed, tmp_path, monkeypatch):
    """It ends between the look for a complete output and the work folder."""
    config, make_work = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data")), preparing.make_work

    def later(*given):
        monkeypatch.setattr(preparing, "make_work", make_work)
        prepare(config)
        make_work(*given)

    monkeypatch.setattr(preparing, "make_work", later)
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed


def test_a_file_system_without_locks_is_named(folder, tmp_path, monkeypatch):
    """Lustre without -o flock, and NFS, which locks only what is open for writing."""

    def refuse(file, _):
        assert file.writable()
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / LOCK).touch()
    for start in (
        lambda: prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))),
        lambda: locked(tmp_path).__enter__(),
        lambda: in_use(tmp_path),
    ):
        with pytest.raises(UserError, match="lock: can't be locked .*, expected a file system with flock; choose"):
            start()


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("train/shard-00000.arrow", "removed", "found no such shard"),
        ("train/shard-00000.arrow", "cut", "damaged shard: found"),
        ("tokenizer/vocab.txt", "removed", "vocab.txt: found no such file"),
        ("tokenizer/tokenizer_config.json", "flipped", "tokenizer_config.json: found another file"),
    ],
)
def test_nothing_is_published_that_is_not_there_any_more(
    folder, undisturbed, monkeypatch, tmp_path, name, change, found
):
    """What is removed or changed between its writing and the manifest; the same command makes it again."""
    publish, path = preparing._publish, tmp_path / "data" / name

    def disturbed(*arguments):
        damage(path, change)
        return publish(*arguments)

    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    with monkeypatch.context() as patch, pytest.raises(UserError, match=found):
        patch.setattr(preparing, "_publish", disturbed)
        prepare(config)
    assert not (tmp_path / "data/manifest.json").exists()
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed


def test_a_kill_between_publishing_and_cleaning_leaves_nothing(folder, undisturbed, tmp_path, monkeypatch):
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "cloze.pipeline.jobs.prepare._remove_work", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    assert (tmp_path / "data/.work").is_dir() and (tmp_path / "data/manifest.json").is_file()
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed


def test_an_orphan_that_writes_while_the_work_is_removed_ends_nothing(folder, undisturbed, tmp_path, monkeypatch):
    """As a task on a cluster does whose command was killed, while the next one completes the job."""
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    work, remove, notes = tmp_path / "data/.work", os.rmdir, []

    def remove_too_late(path, **where):
        if Path(path).name == ".work":
            (work / "task-000000.json").write_text("{}")
        remove(path, **where)

    progress = Progress()
    progress.note = notes.append
    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", remove_too_late)
        prepare(config, progress)
    assert work.is_dir() and f"{work} could not be removed" in notes[-1]
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed and not work.exists()


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from cloze.pipeline import readers
from cloze.pipeline.config import SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from tests.pipeline import corpus
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
readers._GROUP_BYTES = 1  # a task for each file
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
folder = Path(sys.argv[1])
try:
    prepare(corpus.config(folder, [folder / "in"], output=str(folder / "full")))
except UserError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("limit", [20_000, 60_000])
def test_a_failing_write_ends_in_one_line_and_a_rerun_finishes(folder, undisturbed, limit):
    """A limit on the size of files stands for the full disk: writes fail in the middle, in stage 1 or 2."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder), str(limit)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1 and "run the same command again" in done.stdout
    assert not (folder / "full/manifest.json").exists()
    assert not list((folder / "full").rglob(".tmp-*"))
    if limit == 60_000:
        prepare(corpus.config(folder, [folder / "in"], output=str(folder / "full")))
        assert corpus.contents(folder / "full") == undisturbed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("size", ["300k", "900k"])
def test_a_full_disk_ends_in_one_line_and_a_rerun_finishes(folder, undisturbed, tmp_path, monkeypatch, size):
    """Full in stage 1 or 2, by what others write: an estimate has found room enough."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine refuses to mount a tmpfs: " + mounted.stderr.decode().strip())
    monkeypatch.setattr("cloze.pipeline.jobs.prepare.check_disk", lambda *_: None)
    config = corpus.config(folder, [folder / "in"], output=str(disk / "data"))
    try:
        with pytest.raises(UserError, match=f"{disk}/data/.*: the disk is full; free space or choose another --output"):
            prepare(config)
        assert (corpus.count(disk / "data/.work", "task-*.json") == 5) == (size == "900k")
        assert not (disk / "data/manifest.json").exists() and not list(disk.rglob(".tmp-*"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        prepare(config)
        assert corpus.contents(disk / "data") == undisturbed
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_worker_that_outlives_a_run_does_not_keep_its_tokenizer(tmp_path):
    """The same output folder, prepared again with another tokenizer, in the same process."""
    path = corpus.write_jsonl(tmp_path / "a.jsonl", corpus.documents(40))
    config = corpus.config(tmp_path, [path])
    prepare(config)
    shutil.rmtree(tmp_path / "data")
    corpus.tokenizer(lowercase=False).save(tmp_path / "cased")
    prepare(corpus.config(tmp_path, [path], tokenizer=str(tmp_path / "cased")))
    alone = corpus.config(tmp_path, [path], tokenizer=str(tmp_path / "cased"), output=str(tmp_path / "alone"))
    prepare(alone)
    assert corpus.contents(tmp_path / "alone") == corpus.contents(tmp_path / "data")


def test_ctrl_c_ends_workers_that_start_without_a_word(tmp_path):
    """A terminal sends it to all processes; in the middle of imports Python's own answer is a traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'cloze.pipeline.jobs.executors':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "if any('spawn_main' in word for word in sys.orig_argv):\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    sys.meta_path.insert(0, Finder)\n"
    )
    program = (
        "from cloze.pipeline.jobs.executors import LocalExecutor\n"
        "with LocalExecutor(3) as executor:\n"
        "    for _ in range(3):\n"
        "        executor.submit(int)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[3]}"},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
