"""Numbers that a start reads from the files of an earlier one: as the run wrote them, or refused."""

import json
import os
import shutil
from functools import partial

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.run import runs
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import tokenizer


@pytest.mark.parametrize("value", ["x", "-1", "0", "true", "1.5", "[2]"])
def test_other_values_than_numbers_above_zero_are_refused(tmp_path, value):
    (tmp_path / runs.CONFIG).write_text(f"data_streams: {value}\ntrain: {{micro_batch_size: {value}}}\n")
    (tmp_path / runs.DATA).write_text(f'{{"max_length": {value if value != "x" else """ "x" """}}}')
    for name, read in (
        ("config.yaml: data_streams", lambda: runs.saved_data_streams(tmp_path, accept_changes=False)),
        ("config.yaml: train.micro_batch_size", lambda: runs.saved_micro_batch_size(tmp_path)),
        ("data.json: max_length", lambda: runs.trained_length(tmp_path)),
    ):
        with pytest.raises(UserError, match=f"{name}: found .*, expected a whole number above 0, as the run wrote it"):
            read()


def test_numbers_come_back_and_what_an_earlier_version_lacks_is_none(tmp_path):
    (tmp_path / runs.CONFIG).write_text("data_streams: 4\ntrain: {micro_batch_size: 8}\n")
    (tmp_path / runs.DATA).write_text("{}")
    assert runs.saved_data_streams(tmp_path, accept_changes=False) == 4 and runs.saved_micro_batch_size(tmp_path) == 8
    assert runs.trained_length(tmp_path) is None
    (tmp_path / runs.CONFIG).write_text("train: null\n")
    assert runs.saved_micro_batch_size(tmp_path) is None


def test_a_field_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"metric": "f1", "metric": "accuracy"}')
    with pytest.raises(UserError, match="results.json: found what is no JSON"):
        runs.read_fields(tmp_path / "results.json")


@pytest.mark.parametrize("line", ["1: 2", "null: 3", "2026-01-01: x", "train: {true: 1}"])
def test_names_of_fields_are_texts(tmp_path, line):
    (tmp_path / runs.CONFIG).write_text(f"seed: 1\n{line}\n")
    with pytest.raises(UserError, match="config.yaml: found no fields, expected those of a run"):
        runs.read_fields(tmp_path / runs.CONFIG)


@pytest.mark.parametrize("lost", [runs.CONFIG, runs.DATA])
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_a_description_that_was_lost_is_to_be_restored(tmp_path, lost, how):
    (tmp_path / runs.STATUS).write_text("{}")
    if how == "emptied":
        (tmp_path / lost).touch()
    with pytest.raises(UserError, match=f"restore {lost} from a copy, or give another --output"):
        runs.read_fields(tmp_path / lost)
    (tmp_path / runs.STATUS).unlink()
    with pytest.raises(UserError) as error:
        runs.read_fields(tmp_path / lost)
    assert "restore" not in str(error.value), "any other folder"


def test_a_length_above_the_models_positions_is_refused(tmp_path):
    (tmp_path / runs.CONFIG).write_text("model: {max_position_embeddings: 64}\n")
    for length in (64, 10**9):
        (tmp_path / runs.DATA).write_text(f'{{"max_length": {length}}}')
        if length == 64:
            assert runs.trained_length(tmp_path) == 64
    with pytest.raises(UserError, match="data.json: max_length: found 1000000000, expected at most 64"):
        runs.trained_length(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"])
def test_what_goes_out_with_a_model_is_as_the_run_has_written_it(tmp_path, name):
    """Other padding, another class, other names of special tokens: transformers would read other texts."""
    ours = tokenizer()
    config, facts = PretrainConfig(data="d", output=str(tmp_path)), {"tokenizer_fingerprint": ours.fingerprint}
    runs.write_description(tmp_path, config, facts, {runs.TOKENIZER: ours.save}, {})
    path = runs.own_tokenizer(tmp_path) / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"{}") + b"\n")
    with pytest.raises(UserError, match=f"{name}: found another file, expected it as the run has written it; restore"):
        runs.own_tokenizer(tmp_path)
    if before is not None:
        path.unlink()
        with pytest.raises(UserError, match="found no (such file|tokenizer.json), expected it as the run has written"):
            runs.own_tokenizer(tmp_path)
        path.write_bytes(before)
        assert runs.own_tokenizer(tmp_path) == path.parent


def test_a_resume_refuses_a_tokenizer_that_is_not_the_runs_any_more(tmp_path):
    """Before, the run was complete and its exports were refused."""
    ours = tokenizer()
    config = PretrainConfig(data="d", output=str(tmp_path))
    facts = {"tokenizer_fingerprint": ours.fingerprint}
    describe = partial(runs.write_description, tmp_path, config, facts, {runs.TOKENIZER: ours.save}, {})
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


@pytest.mark.parametrize("name", [runs.DATA, runs.CONFIG, runs.SOFTWARE, "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("change", ["removed", "emptied"])
def test_what_a_run_has_lost_is_written_again_or_said(tmp_path, name, change):
    ours, said = tokenizer(), []
    facts = {"tokenizer_fingerprint": ours.fingerprint}
    runs.write_description(
        tmp_path, PretrainConfig("d", str(tmp_path)), facts, {runs.TOKENIZER: ours.save}, {"stage": 0}
    )
    description = runs.description_of(tmp_path)

    def look():
        runs.describe_again(tmp_path, description, said.append)
        runs.check_there(tmp_path)

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


def test_what_is_refused_at_a_resume_changes_nothing(tmp_path):
    """Before, the run's own command was refused too afterwards, since config.yaml had the other one's steps."""
    ours = tokenizer()
    facts, saves = {"tokenizer_fingerprint": ours.fingerprint}, {runs.ORIGIN: ours.save, runs.TOKENIZER: ours.save}
    runs.write_description(tmp_path, PretrainConfig("d", str(tmp_path)), facts, saves, {}, "1")
    shutil.rmtree(tmp_path / runs.ORIGIN)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    saves[runs.ORIGIN] = lambda folder: None
    with pytest.raises(UserError, match="origin/sha256.json: found no such file"):
        runs.write_description(tmp_path, PretrainConfig("d", str(tmp_path), seed=2), facts, saves, {}, "1")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_start_with_other_weights_before_the_first_checkpoint_keeps_their_origin(tmp_path):
    def save(text: str):
        return {runs.ORIGIN: lambda folder: (folder.mkdir(), (folder / "config.json").write_text(text))}

    for run, text in (("1", "first"), ("1", "edited"), ("2", "second")):
        runs.write_description(
            tmp_path, PretrainConfig("d", str(tmp_path)), {}, save(text), {}, run, f"weights {run}", True
        )
        runs.check_sealed(tmp_path / runs.ORIGIN)
        assert (tmp_path / runs.ORIGIN / "config.json").read_text() == text
    runs.write_description(tmp_path, PretrainConfig("d", str(tmp_path)), {}, save("third"), {}, "2")
    assert json.loads((tmp_path / runs.SOFTWARE).read_text())["first_weights"] == "weights 2"
    os.truncate(tmp_path / runs.ORIGIN / "config.json", 1 << 40)  # holes, whose hash would take an hour
    with pytest.raises(UserError, match="origin/config.json: found 1,099,511,627,776 bytes, expected at most"):
        runs.check_sealed(tmp_path / runs.ORIGIN)


def test_a_run_is_known_by_its_start_and_its_data(tmp_path):
    """The same configuration of other data at the same path is another model."""
    config = PretrainConfig(data="d", output=str(tmp_path))
    found = []
    for data, run in (("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")):
        runs.write_description(tmp_path, config, {"manifest_hash": data}, {}, {}, run)
        found.append(runs.identity_of(tmp_path))
    assert found[0] == found[3] and len(set(found)) == 3 and None not in found
    runs.write_description(tmp_path, config, {"manifest_hash": "a"}, {}, {})
    assert runs.identity_of(tmp_path) is None, "an earlier version began it"
