"""Fixtures that the tests of this folder share."""

import pytest

from cloze.launch.predict.predictor import Predictor
from tests.launch.tiny_models import TAGS, labels, save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    save_model(base / "pretrained")
    save_model(base / "classifier", "BertForSequenceClassification", **labels("bad", "good"))
    save_model(base / "tagger", "BertForTokenClassification", seed=3, **labels(*TAGS))
    save_model(base / "answerer", "BertForQuestionAnswering", seed=5)
    return base


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def model(pretrained):
    return Predictor.from_folder(pretrained)
