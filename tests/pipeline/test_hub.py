"""The hub: its real client streams from a server on this machine, also BERT's own mixture at a small size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from pipeline.inspecting import tokens_lost
from pipeline.manifest import Manifest
from tests.pipeline import corpus, hub

pytest.importorskip("datasets")
ROOT = Path(__file__).resolve().parents[2]
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
            table = pa.table({"id": [f"{language}-{shard}-{n}" for n in range(len(texts))], "title": [""] * len(texts),
                              "text": texts if language == "en" else ["nein"] * len(texts)})
            parquet.write_table(table, folder / name / f"train-{shard:05d}-of-00003.parquet")
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    with hub.serve(NAME, folder) as address:
        yield address, articles


@pytest.fixture
def cloze(server, tmp_path):
    """The command line in a folder of its own, with that server for the hub."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": server[0], "HF_HOME": str(tmp_path / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "launch", *arguments], cwd=tmp_path, env=environment,
                              capture_output=True, text=True)

    return run


def test_bert_s_own_mixture_at_a_small_size(server, cloze, tmp_path):
    books = corpus.documents(40, seed=9)
    for number, text in enumerate(books):
        (tmp_path / "books").mkdir(exist_ok=True)
        (tmp_path / f"books/{number}.txt").write_text(text)
    corpus.config(tmp_path, [])  # writes the tokenizer
    done = cloze("prepare", "--config", str(ROOT / "configs/prepare/wiki_books.yaml"), "--tokenizer", "tokenizer",
                 "--output", "data", "--workers", "2")
    assert done.returncode == 0, done.stderr
    manifest = Manifest.load(tmp_path / "data")
    assert tokens_lost(manifest) == 0
    assert manifest.counts["documents"] == len(server[1]) + len(books)
    assert [source["name"] for source in manifest.sources[:1]] == [f"{NAME}@{hub.COMMIT}"]
    assert Manifest.load(tmp_path / "data/length-512").max_length == 512


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [("nobody/nothing", "null", "nobody/nothing"), (NAME, "20231101.fr", "20231101.fr")],
)
def test_what_the_hub_does_not_have_is_one_line(cloze, tmp_path, name, config, message):
    corpus.config(tmp_path, [])
    done = cloze("prepare", "--source.format", "dataset", "--input", f"['{name}']", "--source.dataset_config", config,
                 "--tokenizer", "tokenizer", "--output", "out")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert "can't be read" in line and message in line and "run the same command again" in line
