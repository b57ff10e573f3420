"""The whole chain by its commands: raw text to a word in a blank, and the same answers from transformers.

The commands are those of an installed wheel, started where the user has a model.py, a pipeline.py and a launch/ too.
"""

import json
import os
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, FillMaskPipeline

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.system.environment.launchers import child_variables
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.architecture.test_package import build, copy_of_repository

SENTENCE = "The value of an [MASK] is an object."


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A user's folder, and the variables with which Python finds the wheel and not the repository."""
    folder = tmp_path_factory.mktemp("user")
    wheel = build("wheel", copy_of_repository(folder / "source"), folder / "wheel")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(pip, check=True)
    (folder / "own" / "launch").mkdir(parents=True)
    for name in ("model.py", "pipeline.py", "launch/__init__.py"):
        (folder / "own" / name).write_text("raise AssertionError('the user's own file was imported')\n")
    return folder / "own", {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def cloze(home):
    """Runs a command as a user does; returns what it printed."""

    def run(*arguments, launcher=()) -> str:
        command = [sys.executable, *launcher, "-m", "cloze", *map(str, arguments)]
        result = subprocess.run(command, cwd=home[0], text=True, capture_output=True, env=child_variables(**home[1]))
        assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-2000:]
        return result.stdout

    return run


@pytest.fixture(scope="module")
def chain(cloze, tmp_path_factory):
    """A third of Python's language reference, through every step, with the shipped configurations."""
    folder = tmp_path_factory.mktemp("chain")
    chosen = sorted(topics.items())[::3]
    (folder / "text.jsonl").write_text("".join(json.dumps({"id": k, "text": v}) + "\n" for k, v in chosen))
    books = ("--config", "books", "--input", folder / "text.jsonl")
    printed = {
        "vocab": cloze("vocab", *books, "--output", folder / "vocab", "--vocab_size", 700),
        "prepare": cloze(
            "prepare",
            *books,
            "--tokenizer",
            folder / "vocab",
            "--output",
            folder / "shards",
            "--max_length",
            48,
            "--mask_sets",
            2,
            "--workers",
            2,
        ),
        "inspect": cloze("inspect", folder / "shards"),
        "pretrain": cloze(
            "pretrain",
            "--config",
            "tiny",
            "--data",
            folder / "shards",
            "--output",
            folder / "run",
            "--train.max_steps",
            12,
            "--schedule.warmup_steps",
            3,
            "--zero.stage",
            1,
            launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        ),
        "export": cloze("export", folder / "run", "--output", folder / "hf"),
        "predict": cloze("predict", "fill-mask", folder / "hf", SENTENCE, "--top_k", 3),
    }
    return folder, printed


def test_every_step_says_what_it_did(chain):
    _, printed = chain
    assert "700 entries" in printed["vocab"]
    assert "tokens lost" in printed["prepare"] and "[MASK]" in printed["inspect"]
    assert "in braces the token to predict: behind the mask token, behind a random token" in printed["inspect"]
    for fact in (
        "64 = 32 micro x 1 accumulation x 2 processes",
        "fp32 products",
        "ZeRO stage 1",
        "unigram entropy",
        "eager",
        "FLOPs a token",
        "complete at step 12",
    ):
        assert fact in printed["pretrain"], fact
    assert "exported step 12" in printed["export"] and SENTENCE in printed["predict"]


def test_the_curves_have_the_names_that_scripts_rely_on(chain):
    folder, _ = chain
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert names >= {
        "step",
        "train/loss",
        "train/mlm_loss",
        "train/next_sentence_loss",
        "train/mlm_accuracy",
        "train/next_sentence_accuracy",
        "train/learning_rate",
        "train/gradient_norm",
        "validation/loss",
        "validation/mlm_loss",
        "validation/mlm_accuracy",
        "validation/next_sentence_loss",
        "validation/next_sentence_accuracy",
        "speed/tokens_per_second",
        "speed/data_wait_share",
        "data/padding_share",
        "data/tokens",
        "data/samples",
    }
    first, last = (line["validation/mlm_loss"] for line in (lines[0], lines[-1]))
    assert last < first - 0.5, "the model has learned something"
    assert all(line["train/gradient_norm"] > 0 for line in lines if "train/gradient_norm" in line)


def test_transformers_loads_the_export_whole_and_gives_the_same_logits(chain):
    folder, _ = chain
    reference, report = AutoModelForPreTraining.from_pretrained(folder / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    predictor = Predictor.from_folder(folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    texts = ["An object's type is accessible via type().", "a", "Names refer to objects. " * 3]
    batch = tokenizer(texts, ["Every object has a type."] * 3, padding=True, return_tensors="pt")
    assert batch["token_type_ids"].max() == 1
    with torch.no_grad():
        theirs = reference.eval()(**batch)
        ours = predictor.model(batch["input_ids"], batch["token_type_ids"], attention_mask=batch["attention_mask"])
    real = batch["attention_mask"].bool()
    assert torch.allclose(ours.prediction_logits[real], theirs.prediction_logits[real], atol=1e-5)
    assert torch.allclose(ours.next_sentence_logits, theirs.seq_relationship_logits, atol=1e-5)


def test_the_exported_tokenizer_gives_the_ids_of_the_shards(chain):
    folder, _ = chain
    ours, theirs = Tokenizer.from_folder(folder / "vocab"), AutoTokenizer.from_pretrained(folder / "hf")
    text = "Café naïve 日本語 don't __init__ " + "x" * 120
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert theirs.mask_token == "[MASK]" and theirs.convert_tokens_to_ids("[MASK]") == 4


def test_blanks_are_filled_as_by_the_pipeline_of_transformers(chain):
    folder, _ = chain
    guesses = Predictor.from_folder(folder / "hf").fill_mask(SENTENCE, 5)[0]
    # From the run itself, without an export.
    assert guesses == Predictor.from_folder(folder / "run").fill_mask(SENTENCE, 5)[0]
    pipe = FillMaskPipeline(
        AutoModelForMaskedLM.from_pretrained(folder / "hf"), AutoTokenizer.from_pretrained(folder / "hf"), top_k=5
    )
    for guess, expected in zip(guesses, pipe(SENTENCE), strict=True):
        assert guess.token == expected["token_str"].replace(" ", "")
        assert guess.probability == pytest.approx(expected["score"], abs=1e-5)


def test_export_refuses_a_folder_with_files_and_a_folder_without_a_run(chain, capsys):
    folder, _ = chain
    for arguments, expected in (
        ((folder / "run", "--output", folder / "hf"), "expected a new or empty folder"),
        ((folder / "shards",), "expected the folder of a run"),
    ):
        assert main(["export", *map(str, arguments)]) == 2 and expected in capsys.readouterr().err


@pytest.mark.slow
def test_the_deepspeed_launcher_trains_the_same_model(chain, home):
    folder, _ = chain
    run = folder / "by-deepspeed"
    arguments = [
        "--num_accelerators",
        "2",
        "--module",
        "cloze",
        "pretrain",
        "--config",
        "tiny",
        "--data",
        folder / "shards",
        "--output",
        run,
        "--train.max_steps",
        12,
        "--schedule.warmup_steps",
        3,
        "--zero.stage",
        1,
    ]
    code = "import sys; from deepspeed.launcher.runner import main; main(sys.argv[1:])"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=home[0],
        check=True,
        capture_output=True,
        env=child_variables(**home[1], PATH=path),
    )
    for left, right in zip(
        *((folder / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "by-deepspeed")), strict=True
    ):
        left, right = json.loads(left), json.loads(right)
        for name in left:
            # A process's speed and memory are its own affair.
            assert name.startswith(("speed/", "memory/")) or left[name] == right[name], name


# The command with a sixth of its steps: they are the same step again, and take most of its minutes.
SHORT = """
import runpy, sys
from cloze.launch.tools import quickstart
quickstart.MAX_STEPS = 200
del sys.argv[1:3]  # -m cloze
runpy.run_module("cloze", run_name="__main__")
"""


@pytest.mark.slow
def test_quickstart_runs_and_a_second_time_reuses_what_is_done(cloze, tmp_path):
    first = cloze("quickstart", "--output", tmp_path, launcher=("-c", SHORT))
    assert "stopped with a checkpoint of step 1" in first and "resumed from step 1" in first and "│ 1 " in first
    assert "complete at step 200" in first
    second = cloze("quickstart", "--output", tmp_path, launcher=("-c", SHORT))
    assert second.count("(done before)") == 4 and "resumed" not in second
