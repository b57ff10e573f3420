"""How long a run waits for its store."""

import threading
import time

import pytest

from cloze.launch.config import CheckpointConfig
from cloze.launch.run import store_retries
from cloze.launch.run.store_retries import Patience, StoreAway
from cloze.pipeline.errors import UserError


def failing(answers):
    """Asks, each of which takes so many seconds, and fails but for the last."""
    times = iter(answers)

    def ask():
        time.sleep(next(times))
        if times.__length_hint__():
            raise UserError("s3://bucket/x: no answer")
        return "sent"

    return ask


def test_the_time_is_counted_from_the_first_failure(monkeypatch):
    """A slow upload that fails is tried again; a store that is silent for so long is given up."""
    monkeypatch.setattr(store_retries, "_REST_SECONDS", 0.01)
    warned = []
    wait = Patience(0.2, warned.append, threading.Event())
    assert wait(failing([0.4, 0.0, 0.0])) == "sent"
    assert len(warned) == 2 and "the upload is retried for 0 s" in warned[0] and warned[1] == "the store answers again"
    assert wait.failures == 1
    with pytest.raises(StoreAway, match="no answer; expected an answer within checkpoint.store_patience_seconds = 0.2"):
        wait(failing([0.0, 0.3, 0.0]))


def test_rank_0_waits_no_longer_than_others_wait_for_it():
    with pytest.raises(UserError, match="store_patience_seconds: found 1201, expected 1 to 1200"):
        CheckpointConfig(store_patience_seconds=1201)
