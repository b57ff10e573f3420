"""Likelihoods of texts on several cores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cloze.launch.evaluate import likelihood
from cloze.launch.predict.predictor import Predictor
from tests.launch.evaluate.plain_scores import BAD, GOOD, plain_score


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_cores_that_score_batches_of_their_own_find_the_same(model, monkeypatch, three_threads):
    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 24)  # two or three variants a batch
    loaded = Predictor.from_folder(model).loaded
    encodings = [loaded.encoder.encode(text, place="here") for text in GOOD + BAD]
    threads, hidden, tokens = [], likelihood._hidden, []

    def watched(*arguments):
        threads.append((threading.get_ident(), torch.get_num_threads()))
        return hidden(*arguments)

    monkeypatch.setattr(likelihood, "_hidden", watched)
    found = likelihood.pseudo_log_likelihoods(loaded, encodings, progress=tokens.append)
    assert found == pytest.approx([plain_score(model)(text) for text in GOOD + BAD], abs=1e-4)
    assert sum(tokens) == likelihood.num_tokens(encodings)
    assert {count for _, count in threads} == {1} and threading.get_ident() not in {thread for thread, _ in threads}
    with ThreadPoolExecutor(1) as later:
        assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == three_threads


def test_a_batch_that_fails_ends_the_scoring(model, monkeypatch, three_threads):
    def failing(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 24)
    monkeypatch.setattr(likelihood, "_hidden", failing)
    loaded = Predictor.from_folder(model).loaded
    with pytest.raises(MemoryError, match="no room"):
        likelihood.pseudo_log_likelihoods(loaded, [loaded.encoder.encode(text, place="here") for text in GOOD])
    assert torch.get_num_threads() == three_threads
