"""Files of the Hugging Face hub as input, by URL, from a server on this machine that speaks for it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from cloze.launch.system.environment.launchers import child_variables
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.stores.clients import HubClient
from tests.pipeline import corpus
from tests.pipeline.readers import dataset_hub


def test_input_over_http_is_read_twice(monkeypatch):
    answers = [b"one", b"two", b"two", b"two"]
    files = SimpleNamespace(endpoint="http://127.0.0.1:1", cat_file=lambda *_, **__: answers.pop(0))
    monkeypatch.setattr("cloze.pipeline.stores.clients._FIRST_WAIT", 0.001)
    client = HubClient("hf://datasets/some/texts")
    client._files = files
    assert client.read("a.txt", 0, 3, checked=True) == b"two" and not answers
    answers += [b"one", b"two"] * 5
    with pytest.raises(UserError, match="hf://datasets/some/texts/a.txt: can't be read"):
        client.read("a.txt", 0, 3, checked=True)
    files.endpoint = "https://127.0.0.1:1"
    answers.append(b"one")
    assert client.read("a.txt", 0, 3, checked=True) == b"one"


def test_a_file_is_read_at_once_within_the_bound_of_files():
    files = SimpleNamespace(endpoint="https://x", info=lambda path: {"size": 7}, cat_file=lambda *_, **__: b"content")
    client = HubClient("hf://datasets/some/texts")
    client._files = files
    assert client.read("a.txt", most=7) == b"content"
    with pytest.raises(UserError, match="^hf://datasets/some/texts/a.txt: found 7 bytes, expected at most 6"):
        client.read("a.txt", most=6)


def test_the_same_bytes_as_of_files_on_disk(tmp_path):
    files = [
        corpus.write_jsonl(tmp_path / "hub/in" / name, corpus.documents(40, seed=number))
        for number, name in enumerate(("a.jsonl.gz", "b.jsonl"))
    ]
    local = corpus.config(tmp_path, files)
    prepare(local)
    with dataset_hub.serve("some/texts", tmp_path / "hub") as address:

        def run(url: str, output: str) -> subprocess.CompletedProcess:
            command = [
                sys.executable,
                "-m",
                "cloze",
                "prepare",
                "--input",
                url,
                "--output",
                output,
                "--tokenizer",
                "tokenizer",
                "--max_length",
                "64",
                "--mask_sets",
                "3",
                "--shards.target_tokens",
                "8192",
                "--split.validation",
                "0.1",
                "--split.test",
                "0.05",
            ]
            return subprocess.run(
                command,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                env=child_variables(HF_ENDPOINT=address, HF_HOME=str(tmp_path / "cache")),
            )

        done = run("hf://datasets/some/texts/in/*.jsonl*", "made")
        assert done.returncode == 0, done.stderr
        assert corpus.contents(tmp_path / "made") == corpus.contents(tmp_path / "data")
        missing = run("hf://datasets/some/texts/nothing", "more")
        assert missing.returncode == 2 and "found nothing at" in missing.stderr
        assert missing.stderr.count("\n") == 1
