"""From a corpus in a store to a resumed training, by commands of two machines that share nothing but the store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloze.launch.system.environment.launchers import child_variables
from cloze.pipeline.stores.places import to_place
from tests.pipeline import corpus

pytestmark = pytest.mark.slow


class Machine:
    """A home, a scratch disk and a working folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("home", "scratch", "work"):
            (folder / name).mkdir(parents=True)

    def start(self, *arguments: object) -> subprocess.Popen:
        own = {"HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "scratch"), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "cloze", *map(str, arguments)],
            cwd=self.folder / "work",
            env=child_variables(**own),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: object) -> str:
        with self.start(*arguments) as process:
            told, _ = process.communicate(timeout=600)
        assert process.returncode == 0, told[-3000:]
        assert "a-very-secret-key" not in told
        return told


def losses(run: Path) -> dict[int, float]:
    """The last line of each step: a resumed run writes some again."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_corpus_vocab_prepare_pretrain_kill_resume(bucket, tmp_path):
    first, second = Machine(tmp_path / "first"), Machine(tmp_path / "second")
    for number in range(3):
        source = corpus.write_jsonl(tmp_path / f"{number}.jsonl.gz", corpus.documents(150, seed=number))
        (to_place(bucket) / "corpus" / source.name).write(source)
    texts = ("--input", f"{bucket}/corpus/*.jsonl.gz")
    first.run("vocab", *texts, "--output", f"{bucket}/vocab", "--vocab_size", 500)
    preparing = (
        "prepare",
        *texts,
        "--tokenizer",
        f"{bucket}/vocab",
        "--output",
        f"{bucket}/data",
        "--max_length",
        64,
        "--mask_sets",
        2,
        "--shards.target_tokens",
        16384,
    )
    with first.start(*preparing) as process:  # it is killed when a first shard is there, and the second goes on
        while not (to_place(bucket) / "data/train").is_dir():
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    second.run(*preparing)
    assert "all as they were written" in first.run("verify", f"{bucket}/data")
    data = to_place(bucket) / "data"
    for each in data.objects():
        path = tmp_path / "local" / each.key.removeprefix("data/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.at(each.key).read_bytes())
    training = (
        "pretrain",
        "--config",
        "tiny",
        "--train.max_steps",
        40,
        "--train.global_batch_size",
        16,
        "--train.micro_batch_size",
        8,
        "--checkpoint.every_steps",
        10,
        "--train.log_every_steps",
        5,
        "--evaluation.every_steps",
        20,
        "--model.max_position_embeddings",
        64,
        "--processes",
        2,
    )
    first.run(*training, "--data", tmp_path / "local", "--output", "undisturbed")
    run = second.folder / "work/run"
    stored = (*training, "--data", f"{bucket}/data", "--output", "run", "--data_cache.gigabytes", 0.1)
    with second.start(*stored) as process:
        while not (run / "checkpoints/step-00000010/checksums.json").exists():
            assert process.poll() is None, process.stdout.read()[-3000:]
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert list((second.folder / "home/.cache/cloze/data").iterdir())
    told = second.run(*stored, "--data_cache.folder", second.folder / "another")  # as on a machine that has nothing yet
    assert "another" in told and "data cache" in told
    assert losses(run) == losses(first.folder / "work/undisturbed")
    assert "a-very-secret-key" not in "".join(path.read_text() for path in run.glob("*.*") if "events" not in path.name)
