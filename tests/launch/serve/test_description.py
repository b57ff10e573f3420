"""What a server says of its model."""

import json

import pytest

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.launch.serve.description import describe
from tests.launch.tiny_models import TAGS, labels, save_model


def test_a_model_without_labels(offline):
    found = describe(offline, "us/small")
    assert found == {
        "model": "us/small",
        "class": "BertForPreTraining",
        "revision": None,
        "labels": [],
        "operations": offline.abilities(),
        "pairs": "maybe",
        "columns": [],
        "examples": [],
    }


@pytest.mark.parametrize("kind, named", [("BertForTokenClassification", TAGS), ("BertForQuestionAnswering", ())])
def test_the_labels_are_those_of_heads_that_have_some(tmp_path, kind, named):
    found = describe(Predictor.from_folder(save_model(tmp_path, kind, **labels(*(named or ("a", "b"))))), "m")
    assert found["labels"] == list(named)


def test_pairs_are_read_by_models_that_were_trained_on_them(tmp_path):
    folder = save_model(tmp_path / "snapshots" / "abc123", "BertForSequenceClassification")
    note = json.loads((folder / "config.json").read_text())
    for texts, expected in ((["a"], "never"), (["a", "b"], "always")):
        (folder / "config.json").write_text(json.dumps(note | {"cloze_columns": {"texts": texts}}))
        predictor = Predictor.from_folder(folder)
        assert predictor.loaded.revision == "abc123", "the commit of a hub model"
        assert (found := describe(predictor, "m"))["pairs"] == expected and found["columns"] == texts
    loaded = predictor.loaded
    loaded.encoder.pieces = (8, 4)  # of a long text, of which there is one
    assert describe(predictor, "m")["pairs"] == "never"
    assert LoadedModel(loaded.model, loaded.tokenizer).revision is None
