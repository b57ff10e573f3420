"""What most of these tests begin with; made anew for each file of tests."""

import pytest

from tests.launch.finetune.small import make_model, sst2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return sst2(tmp_path_factory.mktemp("sst2"))
