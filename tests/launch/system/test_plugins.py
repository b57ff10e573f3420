"""An objective and callbacks of the user's own, from a file in the current folder: trained, resumed, refused."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from cloze.launch.cli import main
from cloze.launch.pretrained.loading import load_model
from cloze.launch.run.metrics_file import read_metrics
from tests.launching import NO_DROPOUT, assert_same_weights, pretrain_arguments, train, weights
from tests.synthetic import make_shards

OWN = '''
"""What a user would write."""
import torch

from cloze.launch.pretrain.objectives import Objective, Term
from cloze.launch.training.callbacks import Callback
from cloze.launch.training.objective import WholeBatchObjective
from cloze.model.bert import BertForPreTraining
from cloze.pipeline.records import NO_LABEL


class WithLengths(BertForPreTraining):
    """Also tells the length of a sequence from its first token."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.length = torch.nn.Linear(config.hidden_size, 1)

    def forward(self, *arguments, **inputs):
        output = super().forward(*arguments, **inputs, output_hidden_states=True)
        firsts = output.hidden_states[-1].index_select(0, inputs["sequence_offsets"][:-1])
        output_lengths = self.length(firsts)[:, 0]
        return output._replace(attentions=(output_lengths,))


class Lengths(Objective):
    TERMS = ("mlm", "length")

    def __init__(self, config, share=0.5):
        super().__init__(config)
        self.weights = {"length": share}

    def build_model(self):
        return WithLengths(self.config.model, attention_kernel=self.config.train.attention_kernel)

    def divisors(self, micro_batch):
        return {"mlm": (micro_batch["labels"] != NO_LABEL).sum(), "length": len(micro_batch["sequence_offsets"]) - 1}

    def terms(self, output, micro_batch):
        wanted = micro_batch["sequence_offsets"].diff() / 32
        return {"length": Term((output.attentions[0] - wanted).square()),
                "mlm": Term(output.mlm_losses, output.mlm_correct)}

    def observe(self):
        raise AssertionError("a name that any class may have")


class Shown(Lengths, WholeBatchObjective):
    """Is shown the whole batch, of which its loss needs nothing."""

    def observe(self, outputs, totals):
        with open("shown.txt", "a") as file:  # what two processes print may be mixed
            print(len(outputs), outputs[-1].mlm_losses.requires_grad, len(totals), file=file)


class Notes(Callback):
    def on_start(self, run):
        self.told, self.steps = ["start"], 0
        assert run.world_size == 1 or run.rank in (0, 1)

    def on_step(self, run):
        self.steps += 1

    def on_log(self, run, scalars):
        self.told.append(f"log {run.state.step} {scalars['train/length_loss'] > 0}")
        return {"own/steps": self.steps}

    def on_evaluation(self, run, scalars):
        with torch.no_grad():
            return {"validation/size": sum(each.square().sum() for each in run.model.parameters()).item()}

    def on_end(self, run, complete):
        if run.rank == 0:
            print("NOTES", self.told, complete, self.config.objective)
'''
# What each process measures for itself, and not alike.
APART = """
from cloze.launch.training.callbacks import Callback


class Apart(Callback):
    def on_evaluation(self, run, scalars):
        return {"validation/own": run.state.step * (1 if run.rank else -1)}
"""
RUN = (*NO_DROPOUT, "--objective", "own_of_mine.Lengths", "--schedule.warmup_steps", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("data"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with the user's file in it."""
    (tmp_path / "own_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_own_objective_takes_the_same_step_for_any_split_and_is_watched(data, here):
    """On 1 process in micro-batches of 16, and on 2 of 2; with weights, a model and options of its own."""
    whole = train(
        data,
        here / "whole",
        *RUN,
        "--train.max_steps",
        "2",
        "--train.micro_batch_size",
        "16",
        "--objective_options.share",
        "3.0",
        "--callbacks",
        "own_of_mine.Notes",
        "--evaluation.metric",
        "size",
        "--evaluation.every_steps",
        "2",
    )
    assert "NOTES ['start', 'log 1 True', 'log 2 True'] True own_of_mine.Lengths" in whole
    train(
        data,
        here / "split",
        *RUN,
        "--objective",
        "own_of_mine.Shown",
        "--train.max_steps",
        "2",
        "--train.micro_batch_size",
        "2",
        "--objective_options.share",
        "3.0",
        processes=2,
    )
    shown = (here / "shown.txt").read_text().splitlines()
    assert shown == ["4 False 2"] * 4, "the four micro-batches of each process, in each of two steps"
    assert_same_weights(weights(here / "whole"), weights(here / "split"), 1e-5)
    assert "length.weight" in weights(here / "whole")
    lines = read_metrics(here / "whole")
    assert [line["own/steps"] for line in lines if "own/steps" in line] == [1.0, 2.0]
    last = [line for line in lines if "validation/loss" in line][-1]
    assert last["validation/size"] > 0 and "validation/length_accuracy" not in last
    assert last["validation/loss"] == pytest.approx(last["validation/mlm_loss"] + 3 * last["validation/length_loss"])
    described = yaml.safe_load((here / "whole/config.yaml").read_text())
    assert described["objective"] == "own_of_mine.Lengths" and described["objective_options"] == {"share": 3.0}
    # Its own parameters stay in checkpoints: what is used and exported is BERT.
    assert main(["export", str(here / "whole"), "--output", str(here / "exported")]) == 0
    ours, exported = (load_model(here / name).model.state_dict() for name in ("whole", "exported"))
    assert "length.weight" not in ours and torch.equal(ours["masked_lm.dense.bias"], exported["masked_lm.dense.bias"])


def test_processes_that_measure_differently_decide_alike(data, here):
    """By rank 0's number: with their own, one would save where the other goes on, and wait for it for ever."""
    (here / "measures.py").write_text(APART)
    train(
        data,
        here / "run",
        *NO_DROPOUT,
        "--callbacks",
        "measures.Apart",
        "--evaluation.metric",
        "own",
        "--evaluation.every_steps",
        "1",
        "--evaluation.keep_best",
        "true",
        "--train.max_steps",
        "3",
        "--checkpoint.every_steps",
        "0",
        processes=2,
    )
    state = json.loads((here / "run/checkpoints/step-00000003/state.json").read_text())
    assert (state["best_step"], state["best_value"]) == (0, 0.0)


def test_a_resume_is_exact_and_compares_the_objective(data, here, capsys):
    straight, parts = here / "straight", here / "parts"
    train(data, straight, *RUN, "--train.max_steps", "4", "--schedule.name", "constant")
    train(data, parts, *RUN, "--train.max_steps", "2", "--schedule.name", "constant")
    again = (*RUN, "--schedule.name", "constant")
    for changed, field in ((("--objective", "masked"), "objective"), (("--objective_options.share", "0.9"), "share")):
        assert main(pretrain_arguments(data, parts, *again, *changed)) == 2
        assert field in capsys.readouterr().err
    own = here / "own_of_mine.py"
    own.write_text(OWN.replace("square()", "abs()"))
    said = train(data, parts, *again, "--train.max_steps", "4", "--checkpoint.accept_changes", "false", status=2)
    assert "whose objective_source is" in said
    own.write_text(OWN)
    train(
        data,
        parts,
        *again,
        "--train.max_steps",
        "4",
        "--callbacks",
        "own_of_mine.Notes",
        "--checkpoint.accept_changes",
        "true",
    )
    assert_same_weights(weights(straight), weights(parts))


MODULE = """
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.training.callbacks import Callback

number = 5

class Other:
    pass

class Half(Objective):
    def divisors(self, micro_batch):
        return {}

class Strict(Objective):
    TERMS = ("mlm",)
    def divisors(self, micro_batch): return {}
    def terms(self, output, micro_batch): return {}

class Bare(Strict):
    def terms(self, output, micro_batch): return {"mlm": output.mlm_losses}
    def divisors(self, micro_batch): return {"mlm": len(micro_batch["labels"])}

class Misnamed(Bare):
    TERMS = ("mlm", "recall_of_rare")

class Says(Callback):
    def on_log(self, run, scalars): return "text"

class Foreign(Strict):
    def build_model(self):
        import torch
        return torch.nn.Linear(2, 2)
"""
REFUSALS = {
    "nothing": "objective: found 'nothing', expected masked",
    "no_such_file.Mine": "objective: found 'no_such_file.Mine', but no module no_such_file in ",
    "faulty_mine.Absent": "but no Absent in ",
    "faulty_mine.number": "found 'faulty_mine.number' of type int in ",
    "faulty_mine.Other": "a class that is no Objective, expected a subclass of cloze.launch.pretrain.objectives.",
    "faulty_mine.Half": "without terms, TERMS, expected what every Objective has",
    "faulty_mine.Misnamed": "found the term 'recall_of_rare' in Misnamed.TERMS, expected a name that does not begin",
    "breaks_mine.Any": "whose module fails at ",
    "needs_mine.Any": "whose module needs_mine needs no_library_of_this_name, which is not installed",
    "slips_mine.Any": "slips_mine.py:1: SyntaxError: ",
    ".Any": "objective: found '.Any', expected the dotted name of a class with its module, as my_module.MyClass",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_with_a_class_is_one_line(data, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file, text in {
        "faulty_mine": MODULE,
        "breaks_mine": "1 / 0",
        "needs_mine": "import no_library_of_this_name",
        "slips_mine": "class Any(",
    }.items():
        (tmp_path / f"{file}.py").write_text(text)
    assert main(pretrain_arguments(data, tmp_path / "run", "--train.max_steps", "1", "--objective", name)) == 2
    said = capsys.readouterr().err
    assert REFUSALS[name] in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--objective", "faulty_mine.Foreign"),
            "found a Linear made by Foreign.build_model, expected a subclass of cloze.model.bert.BertPreTrained",
        ),
        (("--objective", "faulty_mine.Strict"), "found nothing in what Strict.terms has returned, expected its TERMS"),
        (("--objective", "faulty_mine.Bare"), "found Tensor for mlm in what Bare.terms has returned, expected a Term"),
        (
            ("--callbacks", "faulty_mine.Says"),
            "callbacks: found 'text' returned by Says.on_log, expected None or a dict",
        ),
    ],
)
def test_what_a_class_does_wrong_in_the_run_is_one_line(data, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty_mine.py").write_text(MODULE)
    said = train(data, tmp_path / "run", "--train.max_steps", "1", "--schedule.warmup_steps", "0", *words, status=2)
    assert expected in said and "Traceback" not in said


def test_options_and_callbacks_that_do_not_fit_are_one_line(data, here, capsys):
    for words, expected in (
        (
            ("--objective", "own_of_mine.Lengths", "--objective_options.shares", "1"),
            "an unexpected keyword argument 'shares'",
        ),
        (("--objective_options", json.dumps({"share": 1})), "objective: found 'masked' with objective_options"),
        (("--callbacks", "own_of_mine"), "callbacks: found 'own_of_mine', expected the dotted name of a class"),
        (("--callbacks", "own_of_mine.Lengths"), "callbacks: found 'own_of_mine.Lengths', a class that is no Callback"),
    ):
        assert main(pretrain_arguments(data, here / "run", *words)) == 2
        said = capsys.readouterr().err
        assert expected in said and len(said.splitlines()) == 1, said
    assert not (here / "run").exists()
