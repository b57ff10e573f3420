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


@pytest.fixture(scope="module", autouse=True)
def no_certificates(tmp_path_factory):
    """Nothing is encrypted here, and httpx would read all authorities' certificates for each client: 22 of the 25 ms
    of a request.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield
