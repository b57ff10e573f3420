"""Numbers that a start reads from the files of an earlier one: as the run wrote them, or refused."""

import pytest

from cloze.launch.config import PretrainConfig
from cloze.launch.run import runs
from cloze.launch.run.description import write_description
from cloze.pipeline.errors import UserError


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


def test_a_run_is_known_by_its_start_and_its_data(tmp_path):
    """The same configuration of other data at the same path is another model."""
    config = PretrainConfig(data="d", output=str(tmp_path))
    found = []
    for data, run in (("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")):
        write_description(tmp_path, config, {"manifest_hash": data}, {}, {}, run)
        found.append(runs.identity_of(tmp_path))
    assert found[0] == found[3] and len(set(found)) == 3 and None not in found
    write_description(tmp_path, config, {"manifest_hash": "a"}, {}, {})
    assert runs.identity_of(tmp_path) is None, "an earlier version began it"
