"""Fixtures that the tests of this folder share."""

from __future__ import annotations

import pytest

from tests.launch.tiny_models import save_model


@pytest.fixture(scope="module", params=["BertForMaskedLM", "BertForPreTraining"])
def model(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "hf", request.param)
