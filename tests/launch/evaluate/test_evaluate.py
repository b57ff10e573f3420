"""`cloze evaluate` against plain loops over transformers' own models, and over the checkpoints of a real run."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cloze.launch.cli import main
from cloze.launch.evaluate import likelihood
from cloze.launch.evaluate.pairs import Pair, accuracies
from cloze.launch.predict.predictor import Predictor
from tests.launch.tiny_models import save_model
from tests.launching import train, weights
from tests.synthetic import make_shards

GOOD = (
    "the man went to the store",
    "a cat sat on the mat .",
    "who ate an apple ?",
    "the sky is blue",
    "milk is good",
    "paris is the capital of france",
    "the man walked to the mat",
    "an apple is blue",
)
BAD = (
    "the man went to store the",
    "a cat sat the on mat .",
    "who an ate apple ?",
    "the sky are blue",
    "milk is good",
    "paris the is capital of france",
    "the man walking to the mat and a cat",
    "a apple is blue",
)
TERMS = {"first": "s-selection", "second": "argument_structure", "third": "binding"}


def write_pairs(folder):
    """Three paradigms of two phenomena. The fifth pair is a tie; some sentences occur twice."""
    folder.mkdir()
    for number, (uid, term) in enumerate(TERMS.items()):
        rows = [
            {"sentence_good": good, "sentence_bad": bad, "UID": uid, "linguistics_term": term}
            for good, bad in zip(GOOD[number:], BAD[number:], strict=True)
        ]
        (folder / f"file-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module", params=["BertForMaskedLM", "BertForPreTraining"])
def model(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "hf", request.param)


def plain_score(folder):
    """text -> pseudo-log-likelihood, by transformers alone, a masked sequence at a time."""
    reference = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def score(text: str, pieces: int | None = None, rest_of_word: bool = False) -> float:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        total = 0.0
        for start in range(0, len(ids), pieces or len(ids)):
            whole = [tokenizer.cls_token_id, *ids[start : start + (pieces or len(ids))], tokenizer.sep_token_id]
            for place in range(1, len(whole) - 1):
                end = place + 1
                while rest_of_word and tokenizer.convert_ids_to_tokens(whole[end]).startswith("##"):
                    end += 1
                hidden = [tokenizer.mask_token_id] * (end - place)
                masked = torch.tensor([[*whole[:place], *hidden, *whole[end:]]])
                with torch.no_grad():
                    logits = reference(input_ids=masked).logits[0, place]
                total += float(logits.double().log_softmax(-1)[whole[place]])
        return total

    return score


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cloze.launch.system.pictures.find_spec", lambda name: None)
    data, found = write_pairs(tmp_path / "pairs"), tmp_path / "found.json"
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "blimp",
                "--data",
                str(data),
                "--json",
                str(found),
                "--picture",
                str(tmp_path / "found.svg"),
            ]
        )
        == 2
    )
    assert "error: picture: found no matplotlib, expected it for pictures; pip install" in capsys.readouterr().err
    assert not found.exists()


@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_pairs_are_decided_as_by_a_plain_loop(model, tmp_path, capsys, precision):
    data, found = write_pairs(tmp_path / "pairs"), tmp_path / "new" / "found.json"
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "blimp",
                "--data",
                str(data),
                "--json",
                str(found),
                "--precision",
                precision,
                "--picture",
                str(tmp_path / "found.svg"),
            ]
        )
        == 0
    )
    score = plain_score(model)
    right = {
        uid: [score(good) > score(bad) for good, bad in zip(GOOD[number:], BAD[number:], strict=True)]
        for number, uid in enumerate(TERMS)
    }
    assert not right["first"][4], "a tie is wrong"
    expected = {uid: 100 * sum(values) / len(values) for uid, values in right.items()}
    phenomena = {"argument_structure": (expected["first"] + expected["second"]) / 2, "binding": expected["third"]}
    result = json.loads(found.read_text())
    assert result.keys() == {"paradigms", "phenomena", "mean_of_paradigms", "mean_of_phenomena"}
    assert result["paradigms"] == pytest.approx(expected) and result["phenomena"] == pytest.approx(phenomena)
    assert result["mean_of_paradigms"] == pytest.approx(sum(expected.values()) / 3)
    assert result["mean_of_phenomena"] == pytest.approx(sum(phenomena.values()) / 2)
    assert f"{result['mean_of_phenomena']:.2f}" in capsys.readouterr().out
    assert "binding" in (tmp_path / "found.svg").read_text()


def test_only_a_more_probable_good_sentence_is_right():
    pairs = [Pair("a", "b", "p", "q", "here")] * 4
    assert accuracies(pairs, [1e-9, 0.0, -1e-9, float("nan")])["paradigms"] == {"p": 25.0}


@pytest.mark.parametrize("masked", [None, "token", "rest_of_word"])
def test_a_line_counts_by_its_characters_and_is_cut_where_it_is_long(model, tmp_path, capsys, masked):
    """By default a word's pieces are predicted from left to right, so that none tells those before it."""
    lines = [*GOOD[:3], "the man went to the store and bought a gallon of milk", GOOD[0], "newyork walkings playedab"]
    with gzip.open(tmp_path / "held-out.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "\n".join(lines[:2]) + "\n\n"}) + "\n")
        file.write(json.dumps({"text": " \n" + "\n".join(lines[2:])}) + "\n")
    assert (
        main(
            [
                "evaluate",
                str(model),
                "--suite",
                "lines",
                "--data",
                str(tmp_path / "held-out.jsonl.gz"),
                "--max_length",
                "8",
                "--json",
                str(tmp_path / "found.json"),
                *(["--masked", masked] if masked else []),
            ]
        )
        == 0
    )
    score = plain_score(model)
    expected = sum(score(line, pieces=6, rest_of_word=masked != "token") for line in lines)
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["lines"] == 6 and result["characters"] == sum(map(len, lines))
    assert result["log_likelihood"] == pytest.approx(expected, abs=1e-3)
    assert result["log_likelihood_per_character"] == pytest.approx(expected / result["characters"], abs=1e-5)
    assert "log likelihood per character" in capsys.readouterr().out


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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with three checkpoints whose masking rate falls, and a folder of pairs of its words."""
    folder = tmp_path_factory.mktemp("run")
    data = make_shards(folder / "data", mask_sets=0, pairs=False)
    output = train(
        data,
        folder / "run",
        "--train.max_steps",
        "6",
        "--checkpoint.every_steps",
        "2",
        "--checkpoint.keep_last",
        "3",
        "--masking.rate",
        "0.5",
        "--masking.final_rate",
        "0.1",
    )
    assert "complete" in (folder / "run" / "status.json").read_text(), output
    (folder / "pairs").mkdir()
    rows = [
        {"sentence_good": f"w{n} w{n + 1} w{n + 2} w{n + 3}", "sentence_bad": f"w{n} w{n + 9} w{n + 2} w{n + 3}"}
        for n in range(40)
    ]
    (folder / "pairs" / "cycle.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def found(run, *arguments) -> dict:
    path = run / "found.json"
    assert main(["evaluate", *arguments, "--data", str(run / "pairs"), "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_every_checkpoint_once_and_as_curves(run, capsys, tmp_path):
    each = {step: found(run, str(run / "run"), "--step", str(step)) for step in (2, 4, 6)}
    assert found(run, str(run / "run")) == each[6]
    assert found(run, str(run / "run" / "checkpoints" / "step-00000004")) == each[4]
    assert each[6]["phenomena"] == each[6]["paradigms"] == {"cycle": each[6]["mean_of_paradigms"]}
    shutil.rmtree(run / "run" / "evaluate-blimp", ignore_errors=True)
    arguments = ["evaluate", str(run / "run"), "--data", str(run / "pairs"), "--every_checkpoint", "true"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "6"]
    assert main(arguments) == 0 and capsys.readouterr().out == "", "what has a result is not measured again"
    result = run / "run" / "evaluate-blimp" / "step-00000004.json"
    for content in (None, b"", result.read_bytes()[:40], b"[]", b"[" * 100_000):
        result.unlink()
        if content is not None:
            result.write_bytes(content)
        assert main(arguments) == 0 and capsys.readouterr().out.startswith("step 4 "), content
    moved = shutil.copytree(run / "pairs", tmp_path / "pairs")
    arguments[3] = str(moved)
    assert main(arguments) == 0 and capsys.readouterr().out == "", "the same data, elsewhere"
    board = EventAccumulator(str(run / "run" / "evaluate-blimp")).Reload()
    curve = [(event.step, event.value) for event in board.Scalars("blimp/mean_of_phenomena")]
    assert curve == [(step, pytest.approx(result["mean_of_phenomena"])) for step, result in each.items()]
    (path,) = moved.glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert main(arguments) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "4", "6"], "other data"
    shutil.rmtree(run / "run" / "evaluate-blimp")


def test_a_run_goes_on_beside_its_results(run, capsys):
    """A folder evaluate-SUITE in a run is nothing that a resume would refuse."""
    (run / "run" / "evaluate-blimp").mkdir(exist_ok=True)
    shutil.copytree(run / "run", run / "again")
    output = train(
        run / "data",
        run / "again",
        "--train.max_steps",
        "6",
        "--checkpoint.every_steps",
        "2",
        "--checkpoint.keep_last",
        "3",
        "--masking.rate",
        "0.5",
        "--masking.final_rate",
        "0.1",
    )
    assert "another run" not in output


def test_the_mean_of_the_last_checkpoints(run, tmp_path, capsys):
    assert main(["export", str(run / "run"), "--output", str(tmp_path / "hf"), "--average", "2"]) == 0
    assert "the mean of steps 4, 6 of" in capsys.readouterr().out
    names = {"bert.embeddings.word_embeddings.weight": "bert.embeddings.word.weight"}
    exported, parts = load_file(tmp_path / "hf" / "model.safetensors"), [weights(run / "run", step) for step in (4, 6)]
    for theirs, ours in names.items():
        expected = (parts[0][ours].double() + parts[1][ours].double()) / 2
        vocabulary = exported[theirs].shape[0]  # our rows are padded
        assert torch.equal(exported[theirs], expected.float()[:vocabulary])
    assert Predictor.from_folder(tmp_path / "hf").score("w1 w2").log_probability < 0
    assert main(["export", str(run / "run"), "--output", str(tmp_path / "more"), "--average", "4"]) == 2
    assert "found 3 checkpoints up to step 6, expected the 4" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "hf"), "--output", str(tmp_path / "more"), "--average", "2"]) == 2
    assert "average: found 2 with" in capsys.readouterr().err


def test_a_masking_rate_needs_masks_that_are_not_drawn_yet(run, tmp_path, capsys):
    data = make_shards(tmp_path / "data")
    output = train(data, tmp_path / "run", "--train.max_steps", "2", "--masking.rate", "0.5", status=2)
    assert "masking.rate: found 0.5 with shards" in output
    sections = ["pretrain", "--data", str(data), "--output", str(tmp_path / "run")]
    for arguments, message in (
        (["--masking.final_rate", "0.1"], "masking.final_rate: found 0.1 without masking.rate"),
        (["--masking.rate", "1.5"], "masking.rate: found 1.5, expected above 0, up to 1"),
        (
            ["--masking.rate", "0.3", "--masking.final_rate", "0.1", "--train.time_budget_hours", "1"],
            "how many samples it has is not known",
        ),
    ):
        assert main([*sections, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_what_cannot_be_measured_is_said_in_one_line(model, run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jsonl").write_text('{"sentence_good": "the cat"}\n')
    for arguments, message in (
        ([str(model), "--suite", "blimp"], "data: found none"),
        ([str(model), "--data", str(tmp_path / "empty")], "data: found no *.jsonl file in"),
        ([str(model), "--data", str(tmp_path / "broken")], "a.jsonl:1: found no pair (KeyError: 'sentence_bad')"),
        ([str(model), "--suite", "lines", "--data", str(tmp_path / "none")], "error: data: found nothing at"),
        ([str(model), "--data", str(run / "pairs"), "--step", "3"], "step: found 3 with"),
        ([str(run / "run"), "--data", str(run / "pairs"), "--step", "3"], "no good checkpoint of step 3"),
        ([str(model), "--data", str(run / "pairs"), "--every_checkpoint", "true"], "which is no run of pretraining"),
        ([str(model), "--data", str(run / "pairs"), "--random_weights", "true"], "random_weights: found true with"),
    ):
        assert main(["evaluate", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
