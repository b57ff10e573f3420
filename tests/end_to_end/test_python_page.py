"""docs/python.md runs from its first line to its last, on tiny models under the names that it uses."""

import re
import shlex

import numpy as np
import pytest

import cloze
from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.run.metrics_file import read_metrics
from cloze.pipeline.errors import UserError
from tests.launch.tiny_models import TAGS, labels, save_model
from tests.launching import ROOT, TINY
from tests.synthetic import make_shards

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("page")
    save_model(base / "runs" / "small-hf")
    save_model(base / "runs" / "sst2" / "model", "BertForSequenceClassification", **labels("negative", "positive"))
    save_model(base / "runs" / "ner" / "model", "BertForTokenClassification", seed=3, **labels(*TAGS))
    save_model(base / "runs" / "squad" / "model", "BertForQuestionAnswering", seed=5)
    make_shards(base / "runs" / "data")
    return base


def test_the_page_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    known: dict = {}
    for language, example in re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL):
        if language == "bash":
            _, *words = shlex.split(example.replace("\\\n", " "))
            assert main([*words, *TINY, "--train.max_steps", "2", "--schedule.warmup_steps", "0"]) == 0
        elif named := re.match(r"# (\w+\.py)\n", example):
            (folder / named[1]).write_text(example)
        else:
            exec(compile(example, "docs/python.md", "exec"), known)
    assert known["losses"][-1] < known["losses"][0]
    said = capsys.readouterr().out
    assert "'fill-mask'" in said and re.search(r"^step 2: loss \d", said, re.MULTILINE)
    assert read_metrics(folder / "runs" / "focal")[-1]["validation/spread"] > 0


def test_lists_give_what_single_texts_give(folder):
    texts = ["the cat sat", "a good film , and a bad one", "the sky"]
    model = cloze.load(folder / "runs" / "sst2")
    assert isinstance(model, Predictor)
    scores = [[label.score for label in each] for each in model.classify(texts)]
    np.testing.assert_allclose(scores, [[label.score for label in model.classify(text)] for text in texts], atol=1e-6)
    pairs = [model.classify(text, "the sea")[0].score for text in texts]
    for given in ((texts, "the sea"), (texts, ["the sea"] * 3), ([(text, "the sea") for text in texts],)):
        np.testing.assert_allclose([each[0].score for each in model.classify(*given)], pairs, atol=1e-6)
    tagger, answerer = cloze.load(folder / "runs" / "ner"), cloze.load(folder / "runs" / "squad")
    assert [[tag.text for tag in tags] for tags in tagger.tag(texts)] == [
        [tag.text for tag in tagger.tag(text)] for text in texts
    ]
    answers = answerer.answer(["who ?", "where ?"], [texts[0], texts[1]])
    assert [spans[0].text for spans in answers] == [
        answerer.answer(*each)[0].text for each in (("who ?", texts[0]), ("where ?", texts[1]))
    ]
    assert model.classify([]) == []
    with pytest.raises(UserError, match="found 3 texts with 1 second ones"):
        model.classify(texts, ["the sea"])
    with pytest.raises(UserError, match="found one text with a list"):
        answerer.answer("who ?", texts)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="found no folder"):
        cloze.load(tmp_path / "nowhere")
