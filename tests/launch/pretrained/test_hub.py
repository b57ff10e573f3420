"""Models by hub name: the real client, a server on this machine, real processes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.launch.finetune.running import command
from tests.launch.finetune.small import make_model, sst2
from tests.launch.pretrained.model_hub import commit_of, serve
from tests.launching import ROOT

NAME = "someone/small-bert"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """main; other, with other weights; old, without safetensors; empty, without any."""
    base = tmp_path_factory.mktemp("hub")
    revisions = {name: make_model(base / name) for name in ("main", "other", "old", "empty")}
    weights = {name: 2 * tensor for name, tensor in load_file(base / "other" / "model.safetensors").items()}
    save_file(weights, base / "other" / "model.safetensors", metadata={"format": "pt"})
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, base / "main" / "pytorch_model.bin")
    for name in ("old", "empty"):
        (base / name / "model.safetensors").unlink()
    torch.save(weights, base / "old" / "pytorch_model.bin")
    with serve(NAME, revisions) as (address, asked):
        yield address, asked


@pytest.fixture
def python(hub, tmp_path):
    """A Python process with that server for the hub and an empty cache."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": hub[0],
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, env=environment | variables, text=True, capture_output=True
        )

    return run


FETCH = """
import sys
from cloze.launch.commands import parse
from cloze.launch.pretrained.source import find_source
from cloze.pipeline.errors import UserError
for words in sys.argv[1].split(";"):
    config = parse("finetune", ["sst2", "--train", "t", "--validation", "v", "--output", "o", *words.split()])
    try:
        source = find_source(config)
        print(len(source.weights), float(source.weights["bert.embeddings.word.weight"].sum()))
    except UserError as error:
        print(error)
"""


def test_a_model_is_fine_tuned_by_its_name_and_then_found_offline(hub, python, tmp_path):
    address, asked = hub
    files = sst2(tmp_path, train=16, validation=4)
    words = command("sst2", NAME, *files, tmp_path / "run", "--epochs", "1", "--cache_dir", tmp_path / "cache")
    done = python(*words[1:])
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["model"] == NAME and results["validation"]["examples"] == 4
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    assert snapshot.name == commit_of("main") and not (snapshot / "pytorch_model.bin").exists()

    before = len(asked)
    done = python(
        "-c", FETCH, f"--offline true --model {NAME} --cache_dir {tmp_path / 'cache'}", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert done.returncode == 0 and len(done.stdout.split()) == 2, done.stdout + done.stderr
    assert len(asked) == before


USE = """
import sys
from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.predict import Predictor
from cloze.launch.pretrained.finding import model_path
name, cache = sys.argv[1:]
main(["predict", "embed", name, "w1 w2", "--cache_dir", cache])
main(["predict", "embed", "someone/else", "w1 w2", "--cache_dir", cache, "--offline", "true"])
main(["tokenize", name, "w1 w2", "--cache_dir", cache])
print(model_path(parse("serve", [name, "--cache_dir", cache])))
for revision in (None, "other"):
    model = Predictor.from_hub(name, revision=revision, cache_dir=cache, offline=revision is None)
    print(model.embed(["w1 w2"])[0].tolist())
"""


def test_a_model_is_used_by_its_name(hub, python, tmp_path):
    done = python("-c", USE, NAME, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    embedded, tokenized, served, main, other = done.stdout.splitlines()
    assert json.loads(embedded)["vector"] == json.loads(main) != json.loads(other)
    assert json.loads(tokenized)["tokens"] == ["[CLS]", "w1", "w2", "[SEP]"]
    assert served.startswith(str(tmp_path / "cache")) and served.endswith(commit_of("main"))
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "found no folder and no hub model 'someone/else'" in error and "leave --offline true out to fetch" in error


def test_revisions_weights_and_what_is_not_there(python, tmp_path):
    online = f"--cache_dir {tmp_path / 'cache'} --model"
    asked = [
        f"{online} {NAME}",
        f"{online} {NAME} --revision other",
        f"{online} {NAME} --revision old",
        f"{online} {NAME} --revision old --pickled_weights true",
        f"{online} {NAME} --pickled_weights true",
        f"{online} {NAME} --revision empty --pickled_weights true",
        f"{online} {NAME} --revision never",
        f"{online} {NAME} --revision old",  # its pytorch_model.bin lies there now, and is taken by nobody else
        f"{online} someone/else",
        f"--offline true --cache_dir {tmp_path / 'none'} --model {NAME}",
        f"{online} no/such/folder",
    ]
    done = python("-c", FETCH, ";".join(asked))
    assert done.returncode == 0, done.stderr
    main, other, old, pickled, again, empty, revision, kept, name, offline, folder = done.stdout.splitlines()
    assert main == again != other == pickled  # main's pytorch_model.bin, which holds others, is not looked at
    assert "model.safetensors" in old and "--pickled_weights true" in old and kept == old
    assert "expected its weights" in empty and "--pickled_weights" not in empty
    assert "at revision 'never': it has no such revision; check name and revision" in revision
    assert "'someone/else': the hub has none of this name, or none that you may read; check name" in name
    assert "looked up offline; leave --offline true out" in offline
    assert "expected a Cloze run, a Hugging Face folder or hub name" in folder
