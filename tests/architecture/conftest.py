"""What the tests that read all sources begin with."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_collection_of_garbage():
    """The trees of the sources have millions of objects and no garbage: looking for it takes three quarters of their
    time.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
