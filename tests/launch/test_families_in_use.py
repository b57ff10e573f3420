"""Each family of encoders in `cloze evaluate` and `cloze serve`, against transformers' own classes."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import transformers

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.serve.app import build_app
from cloze.launch.serve.config import ServeConfig
from cloze.model.families import BY_TYPE
from cloze.model.tasks import BertForMaskedLM
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.launch.evaluate.plain_scores import BAD, GOOD, plain_score
from tests.launch.tiny_models import PIECES, WORDS
from tests.model.model_batches import scramble
from tests.model.tiny_families import tiny
from tests.synthetic import NAMES

TEXTS = ("the sky is [MASK] .", "[MASK] cat sat on the mat and ate an apple")


@pytest.fixture(scope="module", params=BY_TYPE)
def folder(request, tmp_path_factory):
    """A masked LM of a family with random weights, as its class of transformers reads it."""
    place, shape = tmp_path_factory.mktemp("family"), tiny(request.param)
    padding, *special = NAMES.values()
    special.insert(shape.pad_token_id, padding)
    tokens = [*special, *WORDS, *PIECES]
    tokenizer = Tokenizer(wordpiece_backend({token: n for n, token in enumerate(tokens)}, NAMES, True, None), NAMES)
    tokenizer.save(place / "tokenizer")
    model = scramble(BertForMaskedLM(tiny(request.param, vocab_size=len(tokens))))
    model.save(place / "model", place / "tokenizer")
    assert json.loads((place / "model/config.json").read_text())["model_type"] == request.param
    return place / "model"


def test_lines_and_pairs_have_the_likelihoods_of_transformers(folder, tmp_path):
    lines, pairs = tmp_path / "lines.txt", tmp_path / "pairs"
    lines.write_text("\n".join((*GOOD[:2], "newyork walkings")) + "\n")
    pairs.mkdir()
    rows = [{"sentence_good": good, "sentence_bad": bad} for good, bad in zip(GOOD[:4], BAD[:4], strict=True)]
    (pairs / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for suite, data in (("lines", lines), ("blimp", pairs)):
        words = ["evaluate", str(folder), "--suite", suite, "--data", str(data), "--precision", "fp32"]
        assert main([*words, "--masked", "token", "--json", str(tmp_path / f"{suite}.json")]) == 0
        found[suite] = json.loads((tmp_path / f"{suite}.json").read_text())
    score = plain_score(folder)
    assert found["lines"]["log_likelihood"] == pytest.approx(sum(map(score, lines.read_text().splitlines())), abs=1e-3)
    right = [score(good) > score(bad) for good, bad in zip(GOOD[:4], BAD[:4], strict=True)]
    assert found["blimp"]["mean_of_paradigms"] == pytest.approx(25 * sum(right))


def test_requests_are_answered_as_transformers_answers_them(folder):
    app = build_app(Predictor.from_folder(folder), ServeConfig(str(folder)))

    async def ask() -> list[dict]:
        transport = httpx.ASGITransport(app)  # which starts no worker
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            given = {"fill-mask": {"inputs": TEXTS, "top_k": 4}, "embed": {"inputs": GOOD[:2], "pooling": "cls"}}
            answers = [await client.post(f"/{name}", json=body) for name, body in given.items()]
        return [answer.raise_for_status().json()["results"] for answer in answers]

    guesses, vectors = asyncio.run(ask())
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    for text, guess in zip(TEXTS, guesses, strict=True):
        ids = reader(text, return_tensors="pt")["input_ids"]
        place = (ids[0] == reader.mask_token_id).nonzero().item()
        expected = theirs(ids).logits[0, place].softmax(-1).topk(4)
        (blank,) = guess["blanks"]
        assert [each["probability"] for each in blank] == pytest.approx(expected.values.tolist(), abs=1e-4)
    for text, vector in zip(GOOD, vectors, strict=False):
        hidden = theirs.base_model(reader(text, return_tensors="pt")["input_ids"]).last_hidden_state[0, 0]
        assert vector["vector"] == pytest.approx(hidden.tolist(), abs=1e-4)
