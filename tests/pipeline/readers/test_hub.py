"""The hub: its real client streams from a server on this machine, also BERT's own mixture at a small size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from cloze.pipeline.config import PrepareConfig, SourceConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.inspecting import tokens_lost
from cloze.pipeline.readers import plan
from cloze.pipeline.shards.manifest import Manifest
from tests.pipeline import corpus
from tests.pipeline.readers import dataset_hub

pytest.importorskip("datasets")
ROOT = Path(__file__).resolve().parents[3]
NAME = "wikimedia/wikipedia"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Articles in three stream shards, and another language beside them that isn't asked for."""
    folder = tmp_path_factory.mktemp("hub")
    configs, articles = [], corpus.documents(120)
    for language in ("de", "en"):
        name = f"20231101.{language}"
        files = {"split": "train", "path": f"{name}/train-*"}
        configs.append({"config_name": name, "data_files": [files]})
        (folder / name).mkdir()
        for shard in range(3):
            texts = articles[shard::3]
            table = pa.table(
                {
                    "id": [f"{language}-{shard}-{n}" for n in range(len(texts))],
                    "title": [""] * len(texts),
                    "text": texts if language == "en" else ["nein"] * len(texts),
                }
            )
            parquet.write_table(table, folder / name / f"train-{shard:05d}-of-00003.parquet")
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    with dataset_hub.serve(NAME, folder) as address:
        yield address, articles


def commands(folder: Path, address: str):
    """The command line in a folder, with the server at an address for the hub."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": address, "HF_HOME": str(folder / "cache")}

    def run(*arguments: str, program=("-m", "cloze")) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *program, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )

    return run


@pytest.fixture
def cloze(server, tmp_path):
    return commands(tmp_path, server[0])


def test_bert_s_own_mixture_at_a_small_size(server, cloze, tmp_path):
    books = corpus.documents(40, seed=9)
    for number, text in enumerate(books):
        (tmp_path / "books").mkdir(exist_ok=True)
        (tmp_path / f"books/{number}.txt").write_text(text)
    corpus.config(tmp_path, [])  # writes the tokenizer
    done = cloze(
        "prepare",
        "--config",
        str(ROOT / "configs/prepare/wiki_books.yaml"),
        "--tokenizer",
        "tokenizer",
        "--output",
        "data",
        "--workers",
        "2",
    )
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "data")
    assert tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == len(server[1]) + len(books)
    assert [source["name"] for source in manifest.sources[:1]] == [f"{NAME}@{dataset_hub.COMMIT}"]
    assert Manifest.load(tmp_path / "data/length-512").max_length == 512


BOTH = "import sys; from cloze.launch.cli import main; print(*(main(words.split()) for words in sys.argv[1:]))"


def test_what_the_hub_does_not_have_is_one_line(cloze, tmp_path):
    corpus.config(tmp_path, [])
    missing = (("nobody/nothing", "null"), (NAME, "20231101.fr"))
    words = (
        "prepare --source.format dataset --input ['{}'] --source.dataset_config {} --tokenizer tokenizer --output out"
    )
    done = cloze(*(words.format(*each) for each in missing), program=("-c", BOTH))
    assert done.stdout == "2 2\n", done.stderr
    said = [line for line in done.stderr.splitlines() if line]
    for line, message in zip(said, ("nobody/nothing", "20231101.fr"), strict=True):
        assert "can't be read" in line and message in line and "run the same command again" in line


@pytest.mark.slow
def test_a_stream_that_breaks_off_in_the_middle_is_one_line_and_a_rerun_finishes(tmp_path):
    """After rows have come: the pages of the second half are no pages."""
    path = tmp_path / "served/train.parquet"
    path.parent.mkdir()
    configs = [{"config_name": "default", "data_files": path.name}]
    (path.parent / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    texts = corpus.documents(60)
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=30)
    intact = path.read_bytes()
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    broken = bytearray(intact)
    broken[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(broken)
    corpus.config(tmp_path, [])
    with dataset_hub.serve("some/texts", path.parent) as address:
        cloze = commands(tmp_path, address)
        command = (
            "prepare",
            "--source.format",
            "dataset",
            "--input",
            "[some/texts]",
            "--tokenizer",
            "tokenizer",
            "--output",
            "out",
        )
        done = cloze(*command)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith(f"error: input: the data set 'some/texts@{dataset_hub.COMMIT}' can't be read: ")
        assert "run the same command again" in line and not (tmp_path / "out/manifest.json").exists()
        path.write_bytes(intact)
        done = cloze(*command)
        assert done.returncode == 0, done.stderr
    assert Manifest.load(tmp_path / "out").counts["documents"] == len(texts)


def test_a_saved_data_set_that_may_not_be_looked_at_is_no_name_on_the_hub(folder_of_nobody, as_nobody):
    secret = folder_of_nobody / "secret"
    secret.mkdir(mode=0)
    with as_nobody(), pytest.raises(UserError, match="secret/saved: permission denied"):
        plan(PrepareConfig(input=[str(secret / "saved")], source=SourceConfig(format="dataset")))
    secret.chmod(0o700)
