"""The whole job: the same bytes for any workers and after any interruption, and clear words when it can't be done."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from pipeline.config import MixtureSource, PrepareConfig, SamplesConfig, ShardsConfig, SourceConfig, SplitConfig
from pipeline.errors import UserError
from pipeline.inspecting import tokens_lost
from pipeline.manifest import Manifest
from pipeline.planning import plan_shards
from pipeline.prepare import prepare
from pipeline.shards import ShardReader
from pipeline.tokenizing import PARTITIONS, Report
from tests.pipeline import corpus

# A script as a user would write one: only a real process can be killed.
SCRIPT = """
import sys
from pathlib import Path
from pipeline import readers
from pipeline.prepare import prepare
from tests.pipeline import corpus
if __name__ == "__main__":
    readers._GROUP_BYTES = 1  # a task for each file
    folder = Path(sys.argv[1])
    prepare(corpus.config(folder, [folder / "in"], output=str(folder / sys.argv[2]), workers=int(sys.argv[3])))
"""


@pytest.fixture(autouse=True)
def a_task_for_each_file(monkeypatch):
    monkeypatch.setattr("pipeline.readers._GROUP_BYTES", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare")
    for number in range(5):
        corpus.write_jsonl(folder / "in" / f"part-{number}.jsonl.gz", corpus.documents(200, seed=number))
    corpus.config(folder, [folder / "in"])  # writes the tokenizer
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    prepare(corpus.config(folder, [folder / "in"], output=str(folder / "undisturbed")))
    return corpus.contents(folder / "undisturbed")


def test_workers_and_listing_do_not_change_a_byte(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    assert len(manifest.splits["train"].shards) >= 4
    inputs = [folder / "in" / f"part-{number}.jsonl.gz" for number in (3, 0, 4, 1, 2)]
    for workers in (2, 3):
        config = corpus.config(folder, inputs, output=str(folder / f"workers-{workers}"), workers=workers)
        prepare(config)
        assert corpus.contents(folder / f"workers-{workers}") == undisturbed


def start(folder, name: str, workers: int) -> subprocess.Popen:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), name, str(workers)], cwd=root, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_kill_at_any_moment_and_run_again(folder, undisturbed, workers):
    """Killed when so and so many files exist, again and again, until it is through: the bytes are the same."""
    name = f"killed-{workers}"
    work = folder / name / ".work"
    interrupted = 0
    for wanted in (3, 8, 14, 20):
        process = start(folder, name, workers)
        while process.poll() is None:
            files = len(list(work.glob("*"))) if work.is_dir() else 0
            if files >= wanted:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        process.wait()
        interrupted += process.returncode != 0
        assert (folder / name / "manifest.json").is_file() == (process.returncode == 0)
    assert interrupted >= 2
    assert start(folder, name, workers).wait() == 0
    assert corpus.contents(folder / name) == undisturbed


def test_a_killed_worker_ends_the_job_with_one_line(folder, undisturbed, monkeypatch):
    config = corpus.config(folder, [folder / "in"], output=str(folder / "worker"), workers=2)
    monkeypatch.setattr("pipeline.prepare.tokenize", _die)
    with pytest.raises(UserError, match="a worker process died.*run the same command again"):
        prepare(config)
    monkeypatch.undo()
    prepare(config)
    assert corpus.contents(folder / "worker") == undisturbed


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_without_memory_ends_the_job_with_one_line(folder, tmp_path, monkeypatch, workers):
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"), workers=workers)
    monkeypatch.setattr("pipeline.prepare.build", _exhaust)
    with pytest.raises(UserError, match="too little memory.*fewer --workers"):
        prepare(config)
    assert not (tmp_path / "data/manifest.json").exists()


def _exhaust(task):
    raise MemoryError


def _die(task):
    os.kill(os.getpid(), signal.SIGKILL)


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


def test_an_interrupted_run_of_another_command_is_refused(folder):
    process = start(folder, "mixed", 1)
    while not list((folder / "mixed").glob(".work/task-*.json")):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(UserError, match="interrupted run with another preparation.seed"):
        prepare(corpus.config(folder, [folder / "in"], output=str(folder / "mixed"), seed=9))


def test_a_folder_with_other_files_is_refused(folder, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="other files"):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_no_token_is_lost_and_splits_share_no_document(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    assert tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == 1000 and manifest.counts["documents_duplicate"] == 0
    documents = {}
    for split in ("train", "validation", "test"):
        reader = ShardReader(folder / "undisturbed", split)
        documents[split] = set(reader.take(np.arange(reader.num_samples), 0)[0].document.tolist())
    assert not documents["train"] & documents["validation"] and not documents["validation"] & documents["test"]
    assert sum(map(len, documents.values())) == 1000
    assert 50 < len(documents["validation"]) < 150
    assert all(shard.samples for split in manifest.splits.values() for shard in split.shards)


def test_counts_agree_with_the_shards(folder, undisturbed):
    manifest = Manifest.load(folder / "undisturbed")
    for name, split in manifest.splits.items():
        reader = ShardReader(folder / "undisturbed", name)
        samples, masks = reader.take(np.arange(reader.num_samples), 0)
        assert split.counts["samples"] == len(samples) == sum(split.length_histogram)
        assert split.counts["tokens"] == len(samples.input_ids)
        assert split.counts["masked"] == len(masks.ids)
        assert split.counts["pairs_random"] == int((samples.next_sentence_label == 1).sum())
        assert np.array_equal(np.bincount(samples.lengths, minlength=65), split.length_histogram)
    train = ShardReader(folder / "undisturbed")
    ids = train.take(np.arange(train.num_samples), 0)[0].input_ids
    shares = np.bincount(ids[ids >= 5]) / (ids >= 5).sum()
    shares = shares[shares > 0]
    assert manifest.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)


def test_random_partners_come_from_the_same_shard_and_another_document(folder, undisturbed):
    """Found again by content: the tokens of B stand in another document of the shard."""
    reader = ShardReader(folder / "undisturbed", "validation")
    samples, _ = reader.take(np.arange(reader.num_samples), 0)
    assert 0.4 < (samples.next_sentence_label == 1).mean() < 0.6


def test_duplicates_are_dropped_wherever_they_lie(tmp_path):
    texts = corpus.documents(80)
    corpus.write_jsonl(tmp_path / "in/a.jsonl", texts)
    corpus.write_jsonl(tmp_path / "in/b.jsonl", [text.replace(" ", "  \n") for text in texts[:30]] + texts[:5])
    source = SourceConfig(id_field="id")
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "in"], source=source))
    assert manifest.counts["documents"] == 80 and manifest.counts["documents_duplicate"] == 35
    assert manifest.counts["documents_read"] == 115 and tokens_lost(manifest) == 0
    alone = prepare(corpus.config(tmp_path, [tmp_path / "in/a.jsonl"], source=source, output=str(tmp_path / "alone")))
    # The first in the order of the source stays, so that nothing of b is there.
    assert [s.sha256 for s in alone.splits["train"].shards] == [s.sha256 for s in manifest.splits["train"].shards]


def test_weights_repeat_documents(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        corpus.write_jsonl(tmp_path / f"in/{name}.jsonl", corpus.documents(200, seed=seed))
    mixture = [MixtureSource([str(tmp_path / "in/a.jsonl")], 2.0), MixtureSource([str(tmp_path / "in/b.jsonl")], 0.5)]
    manifest = prepare(corpus.config(tmp_path, [], input=[], mixture=mixture, split=SplitConfig(0.0, 0.0)))
    counts = manifest.splits["train"].counts
    assert counts["documents"] == 400 and 470 < counts["documents_with_copies"] < 530


def test_sources_of_several_forms_are_each_read_as_such(tmp_path):
    """Small files share tasks, but not with files of another form."""
    for name, text in (("lines.txt", "ka lo. mi\nren tas\n\nu vor\ne"), ("prose.txt", "ka lo. Mi\nren. Tas")):
        (tmp_path / name).write_text(text)
    mixture = [
        MixtureSource([str(tmp_path / "lines.txt")], 1.0, SourceConfig(format="lines")),
        MixtureSource([str(tmp_path / "prose.txt")]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.readers._GROUP_BYTES", 1 << 20)
        alone = SamplesConfig(objective="single_sentences")
        manifest = prepare(
            corpus.config(tmp_path, [], input=[], mixture=mixture, samples=alone, split=SplitConfig(0, 0))
        )
    assert manifest.counts["sentences"] == 4 + 3 == manifest.splits["train"].counts["samples"]


def test_pairs_serve_other_objectives_too(tmp_path):
    (tmp_path / "pairs.txt").write_text("".join(f"ka lo {word}\t{'' if n % 3 else word}\n" for n, word in
                                                enumerate(corpus.words())))  # fmt: skip
    source = SourceConfig(format="pairs")
    manifest = prepare(corpus.config(tmp_path, [tmp_path / "pairs.txt"], source=source))
    reader = ShardReader(tmp_path / "data")
    samples, _ = reader.take(np.arange(reader.num_samples), 0)
    assert tokens_lost(manifest) == 0
    assert (samples.lengths - samples.segment_b_start >= 2).all()  # B and its separator: no label without a B


def test_two_processes_on_one_folder(folder, tmp_path):
    import fcntl

    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    (tmp_path / "data/.work").mkdir(parents=True)
    with open(tmp_path / "data/.work/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            prepare(config)
    prepare(config)


def test_a_kill_between_publishing_and_cleaning_leaves_nothing(folder, undisturbed, tmp_path, monkeypatch):
    config = corpus.config(folder, [folder / "in"], output=str(tmp_path / "data"))
    monkeypatch.setattr("pipeline.prepare.shutil.rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert (tmp_path / "data/.work").is_dir() and (tmp_path / "data/manifest.json").is_file()
    monkeypatch.undo()
    prepare(config)
    assert corpus.contents(tmp_path / "data") == undisturbed


def test_several_lengths_from_one_tokenization(tmp_path):
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(200))
    config = corpus.config(tmp_path, [path], more_lengths=[128])
    manifest = prepare(config)
    longer = Manifest.load(tmp_path / "data/length-128")
    assert (manifest.max_length, longer.max_length) == (64, 128)
    prepare(corpus.config(tmp_path, [path], max_length=128, output=str(tmp_path / "alone")))
    assert corpus.contents(tmp_path / "alone") == corpus.contents(tmp_path / "data/length-128")
    prepare(config)  # complete: nothing to do
    assert ShardReader(tmp_path / "data/length-128").take(np.arange(50), 0)[0].lengths.max() > 64


@pytest.mark.parametrize("objective", ["sentence_order", "full_sentences", "single_sentences"])
def test_objectives_lose_nothing(tmp_path, objective):
    path = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(100))
    manifest = prepare(corpus.config(tmp_path, [path], samples=SamplesConfig(objective=objective)))
    assert tokens_lost(manifest) == 0 and manifest.objective == objective
    assert manifest.splits["train"].counts["tokens_borrowed"] == 0


def test_small_corpora(tmp_path):
    two = corpus.write_jsonl(tmp_path / "two.jsonl", corpus.documents(2))
    manifest = prepare(corpus.config(tmp_path, [two], output=str(tmp_path / "two")))
    assert not manifest.splits["validation"].shards and manifest.splits["train"].counts["documents"] == 2
    some = corpus.write_jsonl(tmp_path / "some.jsonl", corpus.documents(12))
    manifest = prepare(corpus.config(tmp_path, [some], output=str(tmp_path / "some"), split=SplitConfig(0.001, 0.0)))
    assert manifest.splits["validation"].counts["documents"] == 2
    six = corpus.write_jsonl(tmp_path / "six.jsonl", corpus.documents(6))
    for share in (0.01, 0.25):
        output = str(tmp_path / f"six-{share}")
        manifest = prepare(corpus.config(tmp_path, [six], output=output, split=SplitConfig(share, share)))
        assert all(split.counts["documents"] >= 2 for split in manifest.splits.values())
    one = corpus.write_jsonl(tmp_path / "one.jsonl", corpus.documents(1) * 3)
    with pytest.raises(UserError, match="found 1 document, expected at least 2"):
        prepare(corpus.config(tmp_path, [one], output=str(tmp_path / "one")))
    alone = SamplesConfig(objective="full_sentences")
    assert (
        prepare(corpus.config(tmp_path, [one], output=str(tmp_path / "alone"), samples=alone)).counts["documents"] == 1
    )


def test_min_document_tokens(tmp_path):
    path = corpus.write_jsonl(tmp_path / "a.jsonl", ["ka.", "", "   ", *corpus.documents(50, sentences=(5, 9))])
    manifest = prepare(corpus.config(tmp_path, [path], samples=SamplesConfig(min_document_tokens=10)))
    assert (manifest.counts["documents"], manifest.counts["documents_short"]) == (50, 1)
    assert manifest.counts["documents_empty"] == 2 and tokens_lost(manifest) == 0


def test_a_document_in_pieces_stays_in_train(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.readers.lines.LONGEST_PIECE", 2000)
    long = " ".join(corpus.documents(100))
    path = corpus.write_jsonl(tmp_path / "a.jsonl", [long, *corpus.documents(60, seed=3, sentences=(1, 4))])
    split = SplitConfig(validation=0.25, test=0.25)
    manifest = prepare(corpus.config(tmp_path, [path], split=split))
    assert manifest.counts["documents_in_pieces"] == 1 and tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == manifest.counts["documents_read"] - 1 + -(-len(long) // 1990)


@pytest.mark.slow
def test_an_enormous_line_stays_within_memory(tmp_path):
    """64 MB in one line; a worker may take 1.5 GB for any input, and takes much less for this one."""
    words = " ".join(corpus.documents(2000))
    with open(tmp_path / "a.txt", "w") as file:
        for _ in range(64 * 10**6 // len(words)):
            file.write(words.replace("\n", " ") + " ")
        file.write("\n\n" + "\n\n".join(text.replace("\n", " ") for text in corpus.documents(70, seed=1)))
    script = (
        "import resource, sys; from pathlib import Path; from pipeline.prepare import prepare;"
        "from tests.pipeline import corpus; folder = Path(sys.argv[1]);"
        "prepare(corpus.config(folder, [folder / 'a.txt'], shards=corpus.ShardsConfig()));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # MB
    assert Manifest.load(tmp_path / "data").counts["documents_in_pieces"] == 1


def test_shards_have_64_documents_and_like_sizes():
    report = Report()
    rng = random.Random(0)
    report.documents += np.array([rng.randint(0, 40) for _ in range(PARTITIONS)])
    report.tokens += report.documents * 1000
    end = 1 << 64
    ranges = plan_shards(report, 0, end, 100_000)
    assert [r.low for r in ranges] == [0, *(r.high for r in ranges[:-1])] and ranges[-1].high == end
    assert min(r.tokens for r in ranges) >= 64_000 and max(r.tokens for r in ranges) < 250_000
    crowded = Report(documents=np.full(PARTITIONS, 4000), tokens=np.full(PARTITIONS, 4_000_000))
    ranges = plan_shards(crowded, 0, end, 1_000_000)
    assert max(r.tokens for r in ranges) <= 1_000_000 and len(ranges) >= 4 * PARTITIONS


def test_vanished_and_changed_inputs(folder, tmp_path):
    inputs = tmp_path / "in"
    for number in range(2):
        corpus.write_jsonl(inputs / f"{number}.jsonl", corpus.documents(20, seed=number))
    config = corpus.config(tmp_path, [inputs])
    from pipeline import readers

    files, tasks = readers.plan(config)
    (inputs / "1.jsonl").unlink()
    with pytest.raises(UserError, match=r"1\.jsonl: not found"):
        [list(readers.read(task)) for task in tasks]


@pytest.mark.parametrize(("number", "message"), [(errno.EROFS, "read-only"), (errno.EACCES, "permission denied")])
def test_a_folder_that_may_not_be_written(folder, tmp_path, monkeypatch, number, message):
    """Simulated: the superuser, as whom tests may run, may write anywhere."""

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match=message):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "data")))


def test_a_file_in_the_way_of_the_output(folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file"):
        prepare(corpus.config(folder, [folder / "in"], output=str(tmp_path / "file" / "data")))


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from pipeline.errors import UserError
from pipeline.prepare import prepare
from tests.pipeline import corpus
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
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
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 4}, "max_length: found 4, expected 8"),
        ({"workers": 0}, "workers: found 0"),
        ({"executor": "dask"}, "scheduler"),
        ({"scheduler": "tcp://x"}, "scheduler"),
        ({"more_lengths": [128]}, "each length once"),
        ({"samples": SamplesConfig(objective="given_pairs"), "input": ["x"]}, "pairs, with objective given_pairs"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(UserError, match=message):
        PrepareConfig(**{"input": ["x"], "max_length": 128, **changes})


def test_missing_fields_are_named(tmp_path):
    with pytest.raises(UserError, match="--output"):
        prepare(PrepareConfig(input=["x"], tokenizer="x"))
    with pytest.raises(UserError, match="--tokenizer"):
        prepare(PrepareConfig(input=["x"], output=str(tmp_path / "o")))


def test_the_manifest_names_no_place(folder, undisturbed):
    text = (folder / "undisturbed/manifest.json").read_text()
    assert str(folder) not in text and "workers" not in text
    content = json.loads(text)
    assert [source["name"] for source in content["sources"]] == [f"part-{n}.jsonl.gz" for n in range(5)]
    assert all(len(source["sha256"]) == 64 for source in content["sources"])


def test_shards_config_bounds():
    with pytest.raises(UserError, match="target_tokens"):
        ShardsConfig(target_tokens=1)


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
