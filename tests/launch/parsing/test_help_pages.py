"""What `--help` says, and what is said of words that are wrong: plain words, none of the parser's library."""

import re

import pytest

from cloze.launch.cli import main
from cloze.launch.commands import COMMANDS, explain
from cloze.launch.finetune.tasks import TASKS
from cloze.launch.parsing import shipped
from cloze.launch.parsing.fields import describe

# Words of jsonargparse, argparse, PyYAML and of Python's types.
LIBRARY = re.compile(
    r"Parser key|typing|Literal|Union|Optional\[|<class|Got value|Given value|Namespace|NestedArg|ubtypes"
    r"|Unable to|Problem|NoneType|argument |Action|jsonargparse|Expected|unicode string|invalid|Unexpected"
    r"|block mapping|partial\("
)


def config_of(name):
    module, config = COMMANDS[name].config.split(":")
    return getattr(__import__(module, fromlist=[config]), config)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_matters(name):
    first, everything = explain(name), explain(name, "all")
    known = describe(config_of(name))
    for field in known.values():
        last = f"{field.name.upper()} "
        for page, holds in ((everything, True), (first, field.name in COMMANDS[name].main)):
            if holds and (name, field.name) != ("finetune", "train_file"):  # --train, for short
                assert f"  --{field.name}" in page or f"  {last}" in page, field.name
        assert field.sentence, f"{field.name} has no sentence under it"
        assert field.sentence.rstrip(".").split(";")[0][:40] in one_line(everything)
    assert len(first.splitlines()) <= 85 and not LIBRARY.search(everything)
    assert max(map(len, everything.splitlines())) <= 120
    assert "null:" not in first, "a field that is not given is not called null"


def test_help_of_a_section_a_field_and_a_slip(capsys):
    assert main(["pretrain", "--help", "optimizer"]) == 0
    shown = capsys.readouterr().out
    assert "--optimizer.weight_decay" in shown and "--train.max_steps" not in shown
    assert main(["pretrain", "--data", "d", "--help=train.learning_rate"]) == 0
    assert "Peak learning rate" in capsys.readouterr().out
    assert main(["pretrain", "--help", "learning_rat"]) == 2
    assert "did you mean learning_rate?" in capsys.readouterr().err
    assert main(["finetune", "--help", "train"]) == 0
    shown = capsys.readouterr().out
    assert "--train.max_steps" in shown and "\n  --train " not in f"\n{shown}", "that flag is for examples"
    assert main(["help"]) == main(["help", "serve"]) == main(["help", "predict"]) == 0
    assert "usage: cloze serve MODEL" in capsys.readouterr().out
    assert main(["prepare", "--mixture.help"]) == 0 and "Weighted sources" in capsys.readouterr().out
    assert main(["predict", "--help", "all"]) == 0 and "predict score" in capsys.readouterr().out


def test_help_names_every_task_and_every_shipped_configuration():
    shown = one_line(explain("finetune"))
    for task in TASKS:
        assert re.search(rf"[ :]{re.escape(task)}[,; .]", shown), task
    assert all(name in explain("pretrain") for kind in ("pretrain", "model") for name in shipped(kind))


def test_help_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, explain("doctor").split("examples:")[0].splitlines())) <= 60
