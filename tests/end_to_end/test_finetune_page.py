"""Every example of docs/finetune.md reads its files, which are tiny ones here, and makes its model and examples."""

import json
import random
import re
import shlex

import pytest

from cloze.launch.commands import parse
from cloze.launch.finetune.job import read_job
from cloze.launch.finetune.tasks import TASKS
from tests.launch.finetune.examples.test_answering import squad
from tests.launch.finetune.examples.test_classification import GLUE
from tests.launch.finetune.small import write_tsv
from tests.launch.tiny_models import save_model
from tests.launching import ROOT
from tests.tables import assert_same_names

PAGE = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[2:] for line in re.findall(r"^    (cloze finetune .*)", PAGE.replace("\\\n", ""), re.M)]
SWAG = ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3", "label")
STORY = (
    *(f"InputSentence{n}" for n in range(1, 5)),
    *(f"RandomFifthSentenceQuiz{n}" for n in (1, 2)),
    "AnswerRightEnding",
)
OTHER_LABEL = {"sst2": "1", "sick-entailment": "ENTAILMENT", "sick-relatedness": "ENTAILMENT"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's own names, and what it makes of some of the files."""
    base = tmp_path_factory.mktemp("page")
    for name in ("small", "small-zh", "mnli"):
        save_model(base / "runs" / name, "BertModel", max_position_embeddings=512)
    for task in GLUE:
        header, row, _ = GLUE[task]
        for command in (command for command in COMMANDS if command[0] == task):
            for path in read_by(command):
                (base / path).parent.mkdir(exist_ok=True)
                if "diagnostic" in path:
                    write_tsv(base / path, ("Premise", "Hypothesis", "Label"), [("w1", "w2", "neutral")])
                else:
                    others = [(*row[:-1], OTHER_LABEL[task])] if task in OTHER_LABEL else []
                    write_tsv(base / path, header, [row] * 20 + others)
    for name in ("swag", "wnut17", "xquad", "rocstories"):
        (base / name).mkdir()
    for name in ("train", "dev", "test"):
        (base / "wnut17" / f"{name}.conll").write_text("the\tO\nman\tB-x\n\n")
    for name in ("en-train", "en-dev", "zh-all"):
        squad(base / "xquad" / f"{name}.json", random.Random(0), 4)
        content = json.loads((base / "xquad" / f"{name}.json").read_text())
        (base / "xquad" / f"{name}.json").write_text(json.dumps({"data": content["data"] * 40}))
    for name, header in (("swag", SWAG), ("rocstories", STORY)):
        for part in ("train", "val"):
            (base / name / f"{part}.csv").write_text(f"{','.join(header)}\n{'the man,' * (len(header) - 1)}1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        (made,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        exec(compile(made, "docs/finetune.md", "exec"), {})
    return base


def read_by(command: list[str]) -> list[str]:
    config = parse("finetune", command)
    return [config.train_file, config.validation, *config.test]


def test_every_task_has_an_example():
    assert_same_names(TASKS, {command[0] for command in COMMANDS}, "docs/finetune.md, a command that trains each task")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    job = read_job(parse("finetune", command))
    assert job.train.labelled and job.validation.labelled and all(examples.labelled for examples in job.test)
