"""What is not there is refused before torch is imported, which takes seconds; and those seconds are announced."""

import io
import json
import os
import subprocess
import sys

import pytest

from cloze.launch import cli
from cloze.launch.cli import main
from cloze.launch.commands import explain
from cloze.launch.system.data_sheets import DATA_SHEETS
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import ROOT, finish, pretrain_arguments
from tests.synthetic import make_shards

FINETUNE = ("--train", "FILE", "--validation", "FILE", "--output", "o")
REFUSED = [
    ("plan --device h300 --train.sequence_length 128", "plan.device: found 'h300', expected this, cpu, gb300"),
    ("plan --device a100-40 --train.sequence_length 128", "did you mean a100-40gb?"),
    ("plan --device h100", "plan: found neither data nor train.sequence_length"),
    ("plan --device h100 --data nowhere", "nowhere: found no manifest.json"),
    ("pretrain --config bert-base-phase2 --data SHARDS --output o", "init_from: found no folder runs/bert-base-phase1"),
    (
        "pretrain --config bert-base-phase2 --data SHARDS --output o --init_from null",
        "give --init_from RUN, or for random weights --init_from null --init_optimizer false",
    ),
    ("pretrain --data SHARDS --output o --init_from MODEL", "init_from: found neither config.yaml nor config.json in"),
    (
        "pretrain --config adapt --model base --data SHARDS --output o --init_from TINY",
        "model.hidden_size: found 768, expected 128; model.num_hidden_layers: found 12, expected 2; model.num",
    ),
    ("pretrain --data SHARDS --output o --init_word_vectors v.txt", "init_word_vectors: found no file v.txt"),
    ("plan --config nosuch", "--config: found no file 'nosuch'"),
    ("pretrain --data nowhere --output o --processes 2", "nowhere: found no manifest.json"),
    ("finetune --config tiny", "; tiny is the name of one in configs/model and configs/pretrain"),
    ("finetune clasification --model MODEL FINETUNE", "did you mean classification?"),
    ("finetune sst2 --model runs/none FINETUNE", "model: found no runs/none, expected a Cloze run"),
    ("finetune sst2 --model MODEL/none FINETUNE", "/none, expected a Cloze run"),
    ("finetune sst2 --model none.yaml FINETUNE --tokenizer MODEL", "model: found no none.yaml"),
    ("finetune sst2 --model MODEL FINETUNE", "model: found no model in the folder"),
    ("finetune sst2 --model mini FINETUNE", "tokenizer: found none, expected the folder of one: mini is a shape"),
    ("finetune sst2 --model mini --tokenizer nowhere FINETUNE", "tokenizer: found no folder nowhere"),
    ("finetune sst2 --model org/name FINETUNE --test x.tsv", "--test: found no file x.tsv, expected examples"),
    ("predict runs/none text", "model: found no folder runs/none, expected a Cloze run or a Hugging Face folder"),
    ("predict --offline true", "cloze predict: found no model, expected its folder or name"),
    ("predict embed REAL text --output s3://b/v.npy", "output: found s3://b/v.npy, expected a path on a disk"),
    ("predict embed REAL text --picture s3://b/v.png", "picture: found s3://b/v.png, expected a path on a disk"),
    ("evaluate REAL --suite lines --data FILE --json s3://b/r.json", "json: found s3://b/r.json, expected a path on"),
    ("evaluate REAL --suite glue --data SHARDS --output s3://b/g", "output: found s3://b/g, expected a path on a disk"),
    ("predict embed runs/none text", "model: found no folder runs/none"),
    ("predict embed MODEL text", "model: found no model in the folder"),
    ("finetune ner --model org/name --train none.conll --validation FILE --output o", "expected examples: CoNLL"),
    ("finetune squad --model org/name --train x --validation FILE --output o", "expected examples: SQuAD's JSON"),
    ("predict tag REAL --file x.conll", "x.conll, CoNLL by its name, which is for training, expected a text a line"),
    (
        "predict answer REAL --file list.json",
        "found a JSON list in list.json, expected JSON lines: on each an object with question and context",
    ),
    ("predict answer REAL --file squad.json", "found SQuAD's JSON in squad.json, which is for training"),
    ("predict classify REAL --file none.csv", "file: found no none.csv, expected a file of texts"),
    ("serve runs/none", "model: found no folder runs/none"),
    ("tokenize runs/none text", "model: found no folder runs/none"),
    ("evaluate runs/none --data FILE", "model: found no folder runs/none"),
    ("finetune sst2 --model org/name --train x.tsv --validation FILE --output o", "--train: found no file x.tsv"),
]
CODE = """
import contextlib, io, json, sys
from cloze.launch.cli import main
said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        assert main(words) == 2
    said.append(errors.getvalue())
print(json.dumps([said, "torch" in sys.modules]))
"""


def test_what_is_not_there_is_refused_without_torch(tmp_path):
    (tmp_path / "file.tsv").write_text("sentence\tlabel\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "shards").mkdir()
    (tmp_path / "tiny").mkdir()
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    (tmp_path / "tiny" / "config.json").write_text(json.dumps({"model_type": "bert", **shape}))
    (tmp_path / "shards" / "manifest.json").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text("{}")
    (tmp_path / "x.conll").write_text("Rain O\n")
    (tmp_path / "list.json").write_text('[\n{"question": "?", "context": "Rain."}]')
    (tmp_path / "squad.json").write_text('{"version": "1.1", "data": []}')
    places = {"FILE": [str(tmp_path / "file.tsv")], "MODEL": [str(tmp_path / "model")]}
    places["TINY"] = [str(tmp_path / "tiny")]
    places["SHARDS"] = [str(tmp_path / "shards")]
    places["REAL"] = [str(tmp_path / "real")]
    places["MODEL/none"] = [str(tmp_path / "model" / "none")]
    places["FINETUNE"] = [word for each in FINETUNE for word in places.get(each, [each])]
    commands = [[each for word in line.split() for each in places.get(word, [word])] for line, _ in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    for (line, expected), error in zip(REFUSED, said, strict=True):
        assert expected in error and error.startswith("error: ") and error.count("\n") == 1, (line, error)
    assert not imported


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_that_torch_is_loaded(monkeypatch, terminal):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    def refuse():
        raise UserError("here")

    monkeypatch.setattr(cli, "prepare_process", refuse)  # what imports it first
    monkeypatch.setattr(sys, "stderr", shown := Stream())
    assert main(["plan", "--device", "h100", "--train.sequence_length", "128"]) == 2
    assert shown.getvalue() == ("cloze plan: loading PyTorch\n" if terminal else "") + "error: here\n"


def test_help_names_every_device_of_a_plan():
    shown = explain("plan")
    assert "a100-40gb" in shown and all(sheet.key in shown for sheet in DATA_SHEETS)


STOPPED = """
import os, signal, time
from cloze.launch.pretrain.objectives.masked import MaskedTokens


class Stopped(MaskedTokens):
    def build_model(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(120)
"""


def test_a_run_that_is_stopped_before_its_first_step_says_so(tmp_path, monkeypatch):
    (tmp_path / "stopped_of_mine.py").write_text(STOPPED)
    monkeypatch.chdir(tmp_path)
    data = make_shards(tmp_path / "data")
    command = pretrain_arguments(data, tmp_path / "run", "--objective", "stopped_of_mine.Stopped")
    said = finish(ForkedRun(command), status=75)
    assert "SIGTERM: stopped before the first step of this start, with nothing to save; the same command" in said
    assert "Traceback" not in said
