"""A small model to serve."""

import pytest

from cloze.launch.predict.predictor import Predictor
from tests.launch.tiny_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def offline(folder):
    return Predictor.from_folder(folder)
