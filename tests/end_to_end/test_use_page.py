"""Every example of docs/use.md runs, on tiny models under the names that it uses."""

import re

import pytest

from cloze.launch.cli import main
from tests.launch.tiny_models import TAGS, labels, save_model
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in PAGE.splitlines() if re.match(r"    cloze (predict|tokenize) ", line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("page")
    save_model(base / "runs" / "small-hf")
    save_model(base / "runs" / "sst2" / "model", "BertForSequenceClassification", **labels("negative", "positive"))
    save_model(base / "runs" / "rte" / "model", "BertForSequenceClassification", **labels("entailment", "not"))
    save_model(base / "runs" / "ner" / "model", "BertForTokenClassification", **labels(*TAGS))
    save_model(base / "runs" / "swag" / "model", "BertForMultipleChoice")
    save_model(base / "runs" / "squad" / "model", "BertForQuestionAnswering")
    (base / "sentences.txt").write_text("the sky is blue\nthe sea is blue\n")
    (base / "sentences.csv").write_text("text,topic\nthe sky is blue,air\nthe sea is blue,water\nthe cat sat,cats\n")
    (base / "reviews.csv").write_text('number,review\n1,"a good film, and\na bad one"\n')
    return base


def test_every_operation_has_an_example():
    from cloze.launch.commands import COMMANDS as KNOWN

    shown = {" ".join(command.split()[1 : 3 if "predict" in command else 2]) for command in COMMANDS}
    assert shown - {"predict runs/sst2"} == {name for name in KNOWN if name.startswith(("predict", "tokenize"))}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, folder, monkeypatch, capsys):
    import shlex

    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_python(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example, "docs/use.md", "exec"), {})
