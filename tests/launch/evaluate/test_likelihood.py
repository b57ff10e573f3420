"""Likelihoods of texts on several cores."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cloze.launch.evaluate import likelihood
from cloze.launch.predict.predictor import Predictor
from cloze.model.bert import BertForPreTraining
from cloze.model.tasks import BertForMaskedLM
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


def test_causal_likelihoods_are_those_of_a_decoder(model, monkeypatch, three_threads):
    """In batches of unequal lengths, in fp32 and, close to it, in bf16."""
    monkeypatch.setattr(likelihood, "CAUSAL_TOKENS", 24)
    loaded, tokens = Predictor.from_folder(model).loaded, []
    encodings = [loaded.encoder.encode(text, place="here") for text in GOOD + BAD]
    found = likelihood.log_likelihoods(loaded, encodings, "later", progress=tokens.append)
    expected = [plain_score(model, causal=True)(text) for text in GOOD + BAD]
    assert found == pytest.approx(expected, abs=1e-4) and len(tokens) > 4
    assert sum(tokens) == likelihood.num_tokens(encodings, "later")
    assert likelihood.log_likelihoods(loaded, encodings, "later", bf16=True) == pytest.approx(expected, abs=1)
    assert likelihood.log_likelihoods(loaded, [], "later").size == 0


def test_shifted_predictions_are_read_before_the_mask(model, tmp_path):
    whole = BertForPreTraining if "next_sentence" in dir(Predictor.from_folder(model).model) else BertForMaskedLM
    ours = whole.from_folder(model)
    ours.config = dataclasses.replace(ours.config, shifted_predictions=True)
    ours.save(tmp_path / "shifted", model)
    predictor, score = Predictor.from_folder(tmp_path / "shifted"), plain_score(model, shift=1)
    expected = [score(text) for text in GOOD]
    encodings = [predictor.loaded.encoder.encode(text, place="here") for text in GOOD]
    found = likelihood.log_likelihoods(predictor.loaded, encodings, "token")
    assert found == pytest.approx(expected, abs=1e-4)
    assert likelihood.log_likelihoods(predictor.loaded, encodings, "token", bf16=True) == pytest.approx(expected, abs=1)
    assert predictor.score(GOOD[0]).log_probability == pytest.approx(expected[0], abs=1e-4)
