"""Rounds of exchange: the same bytes as without, few parts opened, kills in every round; and parts that are damaged."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs import parts
from cloze.pipeline.jobs import prepare as preparing
from cloze.pipeline.jobs.exchange_stage import END, ExchangeLayout
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.progress import Progress
from tests.pipeline import corpus

pytestmark = pytest.mark.usefixtures("a_task_for_each_file")

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = {512: 0, 3: 1, 2: 2}  # by the limit of parts that are read at once, of the five parts of `folder`

# Kills itself where the first argument says: before a part of this prefix gets its name, or when one is removed.
KILLED = """
import os, signal, sys
from pathlib import Path
from cloze.pipeline import readers
from cloze.pipeline.jobs import prepare
from tests.pipeline import corpus

def killing(function, place):
    def call(*arguments, **named):
        name = Path(arguments[place]).name
        if name.startswith(prefix) and name.endswith((".part", ".arrow")):
            seen.append(name)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call

folder, action, prefix = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
seen = []
readers._GROUP_BYTES = 1  # a task for each file
prepare.FILES_AT_ONCE = 2
if action == "write":
    os.replace = killing(os.replace, 1)
else:
    Path.unlink = killing(Path.unlink, 0)
prepare.prepare(corpus.config(folder, [folder / "in"], output=str(folder / "killed")))
"""


class Notes(Progress):
    def __init__(self):
        self.stages, self.notes = [], []

    def stage(self, name, total, unit):
        self.stages.append(name)

    def note(self, text):
        self.notes.append(text)


def config(folder: Path, name: str, **changes):
    return corpus.config(folder, [folder / "in"], output=str(folder / name), **changes)


def interrupted(folder: Path, name: str, monkeypatch, stage: str) -> Path:
    """A run that ended where the stage ("exchange" or "build") would have begun its third task; its work."""
    begun = []
    real = getattr(preparing, stage)

    def stop(task):
        begun.append(task)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, stage, stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config(folder, name))
    return next((folder / name / ".work").glob("run-*"))


@pytest.mark.parametrize(("limit", "workers"), [(3, 1), (2, 2)])
def test_rounds_do_not_change_a_byte(folder, undisturbed, monkeypatch, limit, workers):
    monkeypatch.setattr(preparing, "FILES_AT_ONCE", limit)
    progress = Notes()
    prepare(config(folder, f"rounds-{limit}-{workers}", workers=workers), progress)
    rounds = [f"exchange {number + 1}" for number in range(ROUNDS[limit])]
    assert progress.stages == ["tokenize", *rounds, "build"]
    assert corpus.contents(folder / f"rounds-{limit}-{workers}") == undisturbed


@pytest.mark.parametrize("limit", [2, 3, 512])
def test_a_task_opens_so_many_parts_and_no_more(folder, undisturbed, monkeypatch, limit):
    """Twice as many where a shard lies across two ranges of hashes; and this process but those of the lowest hashes."""
    opened = []
    real = parts._open
    monkeypatch.setattr(parts, "_open", lambda path: (opened.append(path.name), real(path))[1])
    most = {"exchange": 0, "build": 0}
    for stage in most:
        function = getattr(preparing, stage)

        def counted(task, stage=stage, function=function):
            opened.clear()
            found = function(task)
            most[stage] = max(most[stage], len(opened))
            opened.clear()
            return found

        monkeypatch.setattr(preparing, stage, counted)
    monkeypatch.setattr(preparing, "FILES_AT_ONCE", limit)
    prepare(config(folder, f"opened-{limit}"))
    assert 0 < most["exchange"] <= limit if ROUNDS[limit] else most["exchange"] == 0
    assert 0 < most["build"] <= min(5, 2 * limit)
    assert corpus.contents(folder / f"opened-{limit}") == undisturbed


def test_kills_in_every_round(folder, undisturbed, monkeypatch):
    """While a part of a round is written, and while those that it was made of are removed: what was there is kept."""
    kept: dict[Path, int] = {}
    for place in [
        ("write", "task-"),
        ("write", "round-1-"),
        ("remove", "task-"),
        ("write", "round-2-"),
        ("remove", "round-1-"),
        ("write", "shard-"),
    ]:
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), *place], cwd=ROOT, capture_output=True)
        assert done.returncode == -signal.SIGKILL, (place, done.stderr)
        reports = {path: path.stat().st_ino for path in (folder / "killed/.work").glob("task-*.json")}
        assert kept.items() <= reports.items()  # no task of stage 1 was done again
        kept = reports
    monkeypatch.setattr(preparing, "FILES_AT_ONCE", 2)
    prepare(config(folder, "killed", workers=2))
    assert corpus.contents(folder / "killed") == undisturbed


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("limit", "stage", "name", "damage"),
    [
        (512, "build", "task-*.part", "a byte"),
        (512, "build", "task-*.part", "the end"),
        (512, "build", "task-*.part", "the file"),
        (2, "exchange", "task-*.part", "a byte"),
        (2, "build", "round-2-*.part", "a byte"),
        (2, "build", "round-2-*.part", "the file"),
    ],
)
def test_a_damaged_part_of_an_interrupted_run_is_made_again(
    folder, undisturbed, monkeypatch, tmp_path, limit, stage, name, damage
):
    """Of a round too, though what it was made of has been removed: that is made again first."""
    monkeypatch.setattr(preparing, "FILES_AT_ONCE", limit)
    where = f"damaged-{tmp_path.name}"
    work = interrupted(folder, where, monkeypatch, stage)
    path = sorted(work.glob(name))[-1]
    if damage == "a byte":
        flip(path, path.stat().st_size // 2)
    elif damage == "the file":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    progress = Notes()
    prepare(config(folder, where), progress)
    assert corpus.contents(folder / where) == undisturbed
    notes = [note for note in progress.notes if note == f"{path}: differs from what was written; it is rebuilt"]
    assert len(notes) == (damage != "the file")  # which is seen before anything is done


def test_a_part_that_is_damaged_again_and_again_ends_in_one_line(folder, monkeypatch, tmp_path):
    real = parts.write

    def write(path, table):
        found = real(path, table)
        flip(path, 0)
        return found

    monkeypatch.setattr(parts, "write", write)
    with pytest.raises(UserError, match=r"task-000000-0000\.part: damaged again .*, expected a disk that keeps"):
        prepare(corpus.config(tmp_path, [folder / "in"]))


@pytest.mark.parametrize("name", ["task-000001.json", "64-*.json", "shard-*.arrow"])
def test_damaged_reports_and_shards_of_an_interrupted_run_are_made_again(
    folder, undisturbed, monkeypatch, tmp_path, name
):
    """JSON with another digit is as valid as before, and a shard of the same size looks as whole."""
    where = f"reports-{tmp_path.name}"
    interrupted(folder, where, monkeypatch, "build")
    path = next((folder / where).rglob(name))
    content = path.read_bytes()
    place = max(content.rfind(digit) for digit in b"02468")
    flip(path, place if name.endswith("json") else len(content) // 2)
    prepare(config(folder, where))
    assert corpus.contents(folder / where) == undisturbed


def table(rng: random.Random, count: int) -> parts.Table:
    """Documents of random lengths, a third of them copies, some of no sentence."""
    made = parts.empty(np.dtype(np.uint16))
    hashes = np.array([rng.getrandbits(64) for _ in range(count)], np.uint64)
    hashes[: count // 3] = hashes[-(count // 3) :] if count > 2 else hashes[: count // 3]
    sentences = [[rng.randint(1, 9) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    made["hash"], made["hash_rest"] = hashes, hashes ^ np.uint64(5)
    made["document"] = hashes ^ np.uint64(9)
    made["order"] = np.array(rng.sample(range(10 * count), count), np.uint64)
    made["source"] = np.array([rng.randint(0, 3) for _ in range(count)], np.uint16)
    made["num_sentences"] = np.array([len(lengths) for lengths in sentences], np.uint32)
    made["num_tokens"] = np.array([sum(lengths) for lengths in sentences], np.uint32)
    made["duplicates"], made["duplicate_tokens"] = np.zeros(count, np.uint32), np.zeros(count, np.uint64)
    made["sentences"] = np.array([length for lengths in sentences for length in lengths], np.uint32)
    made["tokens"] = np.array([rng.randint(0, 999) for _ in range(made["num_tokens"].sum())], np.uint16)
    return made


def test_layouts():
    """Against sets: every part of stage 1 reaches every range once, through tasks of at most so many sources."""
    rng = random.Random(0)
    for _ in range(60):
        counts = np.array([rng.randint(0, 3) for _ in range(rng.randint(1, 25))])
        limit = rng.randint(2, 7)
        layout, total = ExchangeLayout(counts, limit), int(counts.sum())
        if not total:
            assert layout.rounds == 0 and layout.covering(0, END) == []
            continue
        names = [f"task-{task:06d}-{part:04d}.part" for task, count in enumerate(counts) for part in range(count)]
        assert layout.names[0] == names
        assert layout.tasks([0, total - 1]) == sorted({int(name[5:11]) for name in (names[0], names[-1])})
        held = [{name} for name in names]
        for level in range(1, layout.rounds + 1):
            before, held, used = held, [], set()
            for part in range(len(layout.names[level])):
                sources = layout.sources(level, part)
                low, high = layout.bounds(level, part)
                assert 0 < len(sources) <= limit
                for source in sources:
                    assert layout.bounds(level - 1, source)[0] <= low < high <= layout.bounds(level - 1, source)[1]
                held.append(set().union(*(before[source] for source in sources)))
                used |= set(sources)
            assert used == set(range(len(before)))
        assert len({name for level in layout.names for name in level}) == sum(map(len, layout.names))
        ranges, files = layout.levels[-1]
        assert files <= limit and len(held) == len(layout.names[-1]) == ranges * files
        bounds = [layout.bounds(layout.rounds, part) for part in range(len(held))]
        assert min(low for low, _ in bounds) == 0 and max(high for _, high in bounds) == END
        for low in [0, END - 1, *(rng.getrandbits(64) for _ in range(5)), *(low for low, _ in bounds)]:
            found = [layout.names[-1].index(name) for name in layout.covering(low, low + 1)]
            assert len(found) == files and all(bounds[part][0] <= low < bounds[part][1] for part in found)
            assert set().union(*(held[part] for part in found)) == set(names)
            assert sum(len(held[part]) for part in found) == total
        assert layout.covering(0, END) == layout.names[-1]


@pytest.mark.parametrize(
    ("tokens", "rounds", "files"),
    [
        (10**9, 0, 33),
        (15 * 10**9, 0, 492),
        (10**12, 1, 65),
        (2 * 10**12, 1, 129),
        (79 * 10**11, 1, 506),
    ],
)
def test_rounds_of_corpora(tokens, rounds, files):
    """Of 64 MiB a part and 2.2 bytes a token."""
    layout = ExchangeLayout(np.ones(-(-int(tokens * 2.2) // (64 << 20)), np.int64))
    assert (layout.rounds, layout.levels[-1][1]) == (rounds, files)
