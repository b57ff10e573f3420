"""The whole chain by its commands: raw text to a word in a blank, and the same answers from transformers."""

import json
import os
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer, FillMaskPipeline

from launch.environment import child_variables
from launch.predict import Predictor
from pipeline.tokenizer import Tokenizer
from tests.launching import ROOT

SENTENCE = "The value of an [MASK] is an object."


def cloze(*arguments, launcher=()) -> str:
    """Run a command in the repository's root as a user does; returns what it printed."""
    result = subprocess.run([sys.executable, *launcher, "-m", "launch", *map(str, arguments)], cwd=ROOT, text=True,
                            capture_output=True, env=child_variables(OMP_NUM_THREADS="1"))
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A third of Python's language reference, through every step, with the shipped configurations."""
    folder = tmp_path_factory.mktemp("chain")
    chosen = sorted(topics.items())[::3]
    (folder / "text.jsonl").write_text("".join(json.dumps({"id": k, "text": v}) + "\n" for k, v in chosen))
    books = ("--config", "configs/prepare/books.yaml", "--input", folder / "text.jsonl")
    printed = {
        "vocab": cloze("vocab", *books, "--output", folder / "vocab", "--vocab_size", 700),
        "prepare": cloze("prepare", *books, "--tokenizer", folder / "vocab", "--output", folder / "shards",
                         "--max_length", 48, "--mask_sets", 2, "--workers", 2),
        "inspect": cloze("inspect", folder / "shards"),
        "pretrain": cloze(
            "pretrain", "--config", "configs/pretrain/tiny.yaml", "--data", folder / "shards", "--output",
            folder / "run", "--train.max_steps", 30, "--schedule.warmup_steps", 5, "--zero.stage", 1,
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
    for fact in ("64 = 32 micro x 1 accumulation x 2 processes", "fp32 products", "ZeRO stage 1", "unigram entropy",
                 "eager", "FLOPs a token", "complete at step 30"):
        assert fact in printed["pretrain"], fact
    assert "exported step 30" in printed["export"] and SENTENCE in printed["predict"]


def test_the_curves_have_the_names_that_scripts_rely_on(chain):
    folder, _ = chain
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert names >= {
        "step", "train/loss", "train/mlm_loss", "train/next_sentence_loss", "train/mlm_accuracy",
        "train/next_sentence_accuracy", "train/learning_rate", "train/gradient_norm", "validation/loss",
        "validation/mlm_loss", "validation/mlm_accuracy", "validation/next_sentence_loss",
        "validation/next_sentence_accuracy", "speed/tokens_per_second", "speed/data_wait_share",
        "data/padding_share", "data/tokens", "data/samples",
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
    pipe = FillMaskPipeline(AutoModelForMaskedLM.from_pretrained(folder / "hf"),
                            AutoTokenizer.from_pretrained(folder / "hf"), top_k=5)
    for guess, expected in zip(guesses, pipe(SENTENCE), strict=True):
        assert guess.token == expected["token_str"].replace(" ", "")
        assert guess.probability == pytest.approx(expected["score"], abs=1e-5)


def test_export_refuses_a_folder_with_files_and_a_folder_without_a_run(chain):
    folder, _ = chain
    for arguments, expected in (((folder / "run", "--output", folder / "hf"), "expected a new or empty folder"),
                                ((folder / "shards",), "expected the folder of a run")):
        result = subprocess.run([sys.executable, "-m", "launch", "export", *map(str, arguments)], cwd=ROOT, text=True,
                                capture_output=True, env=child_variables())
        assert result.returncode == 2 and expected in result.stderr


@pytest.mark.slow
def test_the_deepspeed_launcher_trains_the_same_model(chain):
    folder, _ = chain
    run = folder / "by-deepspeed"
    arguments = ["--num_accelerators", "2", "--module", "launch", "pretrain", "--config",
                 "configs/pretrain/tiny.yaml", "--data", folder / "shards", "--output", run, "--train.max_steps", 30,
                 "--schedule.warmup_steps", 5, "--zero.stage", 1]
    code = "import sys; from deepspeed.launcher.runner import main; main(sys.argv[1:])"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, check=True, capture_output=True,
                   env=child_variables(OMP_NUM_THREADS="1", PATH=path))
    for left, right in zip(*((folder / name / "metrics.jsonl").read_text().splitlines()
                             for name in ("run", "by-deepspeed")), strict=True):
        left, right = json.loads(left), json.loads(right)
        for name in left:
            # A process's speed and memory are its own affair.
            assert name.startswith(("speed/", "memory/")) or left[name] == right[name], name


@pytest.mark.slow
def test_quickstart_runs_and_a_second_time_reuses_what_is_done(tmp_path):
    first = cloze("quickstart", "--output", tmp_path)
    assert "stopped with a checkpoint of step" in first and "resumed from step" in first and "│ 1 " in first
    second = cloze("quickstart", "--output", tmp_path)
    assert second.count("(done before)") == 4 and "resumed" not in second
