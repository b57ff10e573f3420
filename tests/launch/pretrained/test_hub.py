"""Models by hub name: the real client, a server on this machine, processes of their own."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from cloze.launch import cli
from cloze.launch.pretrained.sentence_transformers import write_modules
from cloze.launch.texts.settings import Vectors
from tests.forked import ForkedRun
from tests.launch.finetune.running import arguments
from tests.launch.finetune.small import make_model, sst2
from tests.launch.pretrained.asked_of_hub import ANSWER, fetched, used
from tests.launch.pretrained.model_hub import commit_of, serve
from tests.launching import finish

NAME = "someone/small-bert"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """main; other, with other weights, as sentence-transformers writes one; old, without safetensors; empty, without
    any.
    """
    base = tmp_path_factory.mktemp("hub")
    revisions = {name: make_model(base / name) for name in ("main", "other", "old", "empty")}
    weights = {name: 2 * tensor for name, tensor in load_file(base / "other" / "model.safetensors").items()}
    save_file(weights, base / "other" / "model.safetensors", metadata={"format": "pt"})
    write_modules(base / "other", Vectors("max", normalize=True), 16, 32)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, base / "main" / "pytorch_model.bin")
    for name in ("old", "empty"):
        (base / name / "model.safetensors").unlink()
    torch.save(weights, base / "old" / "pytorch_model.bin")
    with serve(NAME, revisions) as (address, asked):
        yield address, asked


@pytest.fixture
def asking(hub, tmp_path):
    """A process with that server for the hub and an empty cache, which has not imported the hub's client yet."""

    def run(words: list[str], main=cli.main, **variables: str) -> list[str]:
        return finish(
            ForkedRun(words, 1, main, HF_ENDPOINT=hub[0], HF_HOME=str(tmp_path / "home"), **variables)
        ).splitlines()

    return run


def answers(said: list[str]) -> list[str]:
    return [line.removeprefix(ANSWER).strip() for line in said if line.startswith(ANSWER)]


def test_a_model_is_fine_tuned_by_its_name_and_then_found_offline(hub, asking, tmp_path):
    address, asked = hub
    files = sst2(tmp_path, train=16, validation=4)
    asking(arguments("sst2", NAME, *files, tmp_path / "run", "--epochs", "1", "--cache_dir", tmp_path / "cache"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["model"] == NAME and results["validation"]["examples"] == 4
    (snapshot,) = (tmp_path / "cache").glob("models--*/snapshots/*")
    assert snapshot.name == commit_of("main") and not (snapshot / "pytorch_model.bin").exists()

    before = len(asked)
    (found,) = answers(asking([f"--offline true --model {NAME} --cache_dir {tmp_path / 'cache'}"], fetched))
    assert len(found.split()) == 2 and len(asked) == before


def test_a_model_is_used_by_its_name(asking, tmp_path):
    said = asking([NAME, str(tmp_path / "cache")], used)
    embedded, tokenized, served, main, other = [line for line in said if line[:1] in ("{", "[", "/")]
    assert json.loads(embedded)["vector"] == json.loads(main) != json.loads(other)
    assert math.hypot(*json.loads(main)) != pytest.approx(1) and math.hypot(*json.loads(other)) == pytest.approx(1)
    assert json.loads(tokenized)["tokens"] == ["[CLS]", "w1", "w2", "[SEP]"]
    assert served.startswith(str(tmp_path / "cache")) and served.endswith(commit_of("main"))
    (error,) = [line for line in said if line.startswith("error: ")]
    assert "found no folder and no hub model 'someone/else'" in error and "leave --offline true out to fetch" in error


def test_revisions_weights_and_what_is_not_there(asking, tmp_path):
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
    main, other, old, pickled, again, empty, revision, kept, name, offline, folder = answers(asking(asked, fetched))
    assert main == again != other == pickled  # main's pytorch_model.bin, which holds others, is not looked at
    assert "model.safetensors" in old and "--pickled_weights true" in old and kept == old
    assert "expected its weights" in empty and "--pickled_weights" not in empty
    assert "at revision 'never': it has no such revision; check name and revision" in revision
    assert "'someone/else': the hub has none of this name, or none that you may read; check name" in name
    assert "looked up offline; leave --offline true out" in offline
    assert "expected a Cloze run, a Hugging Face folder or hub name" in folder
