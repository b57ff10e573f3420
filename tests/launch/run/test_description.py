"""The description of a run is written once, and again where it was lost; another one is refused."""

import json
import os
import shutil
from functools import partial

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.run import integrity, runs
from cloze.launch.run.description import describe_again, description_of, write_description
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import tokenizer


def test_a_resume_refuses_a_tokenizer_that_is_not_the_runs_any_more(tmp_path):
    """Before, the run was complete and its exports were refused."""
    ours = tokenizer()
    config = PretrainConfig(data="d", output=str(tmp_path))
    facts = {"tokenizer_fingerprint": ours.fingerprint}
    describe = partial(write_description, tmp_path, config, facts, {runs.TOKENIZER: ours.save}, {})
    describe()
    describe()
    path = tmp_path / runs.TOKENIZER / "tokenizer.json"
    path.write_text(path.read_text().replace('"cat"', '"cot"'))
    with pytest.raises(UserError, match="tokenizer.json: found another file, expected it as the run has written it"):
        describe()
    for name in (runs.SOFTWARE, f"{runs.TOKENIZER}/sha256.json"):  # as in a run of an earlier version
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match="tokenizer: found a tokenizer with fingerprint .*; remove the folder"):
        describe()
    path.write_text("")
    with pytest.raises(UserError, match="can't be read as a tokenizer"):
        describe()


def test_what_is_refused_at_a_resume_changes_nothing(tmp_path):
    """Before, the run's own command was refused too afterwards, since config.yaml had the other one's steps."""
    ours = tokenizer()
    facts, saves = {"tokenizer_fingerprint": ours.fingerprint}, {runs.ORIGIN: ours.save, runs.TOKENIZER: ours.save}
    write_description(tmp_path, PretrainConfig("d", str(tmp_path)), facts, saves, {}, "1")
    shutil.rmtree(tmp_path / runs.ORIGIN)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    saves[runs.ORIGIN] = lambda folder: None
    with pytest.raises(UserError, match="origin/sha256.json: found no such file"):
        write_description(tmp_path, PretrainConfig("d", str(tmp_path), seed=2), facts, saves, {}, "1")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_start_with_other_weights_before_the_first_checkpoint_keeps_their_origin(tmp_path):
    def save(text: str):
        return {runs.ORIGIN: lambda folder: (folder.mkdir(), (folder / "config.json").write_text(text))}

    for run, text in (("1", "first"), ("1", "edited"), ("2", "second")):
        write_description(tmp_path, PretrainConfig("d", str(tmp_path)), {}, save(text), {}, run, f"weights {run}", True)
        integrity.check_sealed(tmp_path / runs.ORIGIN)
        assert (tmp_path / runs.ORIGIN / "config.json").read_text() == text
    write_description(tmp_path, PretrainConfig("d", str(tmp_path)), {}, save("third"), {}, "2")
    assert json.loads((tmp_path / runs.SOFTWARE).read_text())["first_weights"] == "weights 2"
    os.truncate(tmp_path / runs.ORIGIN / "config.json", 1 << 40)  # holes, whose hash would take an hour
    with pytest.raises(UserError, match="origin/config.json: found 1,099,511,627,776 bytes, expected at most"):
        integrity.check_sealed(tmp_path / runs.ORIGIN)


@pytest.mark.parametrize("name", [runs.DATA, runs.CONFIG, runs.SOFTWARE, "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("change", ["removed", "emptied"])
def test_what_a_run_has_lost_is_written_again_or_said(tmp_path, name, change):
    ours, said = tokenizer(), []
    facts = {"tokenizer_fingerprint": ours.fingerprint}
    write_description(tmp_path, PretrainConfig("d", str(tmp_path)), facts, {runs.TOKENIZER: ours.save}, {"stage": 0})
    description = description_of(tmp_path)

    def look():
        describe_again(tmp_path, description, said.append)
        integrity.check_there(tmp_path)

    look()
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink() if change == "removed" else (tmp_path / name).write_text("")
    if name.startswith(runs.TOKENIZER):
        with pytest.raises(UserError, match=f"{name}.*expected it as the run has written it"):
            look()
        shutil.rmtree(tmp_path / runs.TOKENIZER)
        with pytest.raises(UserError, match="found no tokenizer, expected it as the run has written it"):
            look()
        assert not said
    else:
        look()
        assert said == [f"{tmp_path}: {name} was removed or emptied while the run used the folder; it is written again"]
        assert (tmp_path / name).read_bytes() == before
