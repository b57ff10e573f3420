"""configs/model/tutorial.yaml, which transformers lacks, on all floors: its segments are 1 and 2, 0 is padding's."""

import json

import pytest
import torch

from cloze.launch.cli import main
from cloze.launch.predict.predictor import Predictor
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.run.runs import model_config
from cloze.launch.tools.onnx import write_onnx
from cloze.model.bert import BertForPreTraining
from cloze.model.initialization import init_weights
from cloze.pipeline.loading.batches import evaluation_batches
from cloze.pipeline.shards.reader import ShardReader
from tests.launch.finetune.running import finetune, lines
from tests.launch.finetune.small import write_tsv
from tests.launching import train, weights
from tests.synthetic import make_shards

SEGMENTS = "bert.embeddings.segment.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    data = make_shards(folder / "data", max_length=20)
    train(
        data,
        folder / "run",
        "--model",
        "configs/model/tutorial.yaml",
        "--train.max_steps",
        "3",
        "--evaluation.every_steps",
        "3",
    )
    return folder / "run"


def test_pretraining_trains_both_segments_and_evaluates_as_it_trains(run):
    config = model_config(run)
    model = BertForPreTraining(config)
    init_weights(model, 0)
    before, state = model.state_dict()[SEGMENTS].clone(), weights(run, 3)
    assert [torch.equal(*rows) for rows in zip(before, state[SEGMENTS], strict=True)] == [True, False, False]
    assert not before[0].any()
    model.load_state_dict(state)
    measured = []
    for segments in ((1, 2), (0, 1)):
        (batch,) = evaluation_batches(
            ShardReader(run.parent / "data", "validation"), micro_batch_size=24, rank=0, world_size=1, segments=segments
        )
        measured.append(model.eval()(**batch).loss.item())
    assert measured[0] == pytest.approx(read_metrics(run)[-1]["validation/loss"], rel=1e-5)
    assert measured[0] != pytest.approx(measured[1], rel=1e-5)


def test_predictions_of_the_run_its_fine_tuning_and_its_graph_agree(run, tmp_path):
    predictor = Predictor.from_folder(run)
    found = predictor.features("w1 w2", "w3", layer=0)
    types = predictor.tokenize("w1 w2", "w3").token_type_ids
    assert types == [1, 1, 1, 1, 2, 2]
    embeddings = predictor.model.bert.embeddings
    ids = torch.tensor(predictor.loaded.encoder.encode("w1 w2", "w3").ids)
    with torch.no_grad():
        by_hand = embeddings(ids, torch.tensor(types), torch.arange(6), None, None)
    torch.testing.assert_close(torch.as_tensor(found.vectors), by_hand)

    rows = [(f"w{n} w{n + 1}", f"w{n + 2}", "xy"[n % 2]) for n in range(16)]
    files = [write_tsv(tmp_path / f"{name}.tsv", ("text_a", "text_b", "label"), rows) for name in ("train", "dev")]
    _, said = finetune("pair-classification", run, *files, tmp_path / "tuned", "--epochs", 2, "--max_length", 16)
    assert f"{tmp_path}/tuned/model: transformers lacks this shape or head" in said
    model = Predictor.from_folder(tmp_path / "tuned")
    expected = [line["probabilities"] for line in lines(tmp_path / "tuned/predictions/validation.jsonl")]
    for (text, pair, _), chances in zip(rows, expected, strict=True):
        assert {label.label: label.score for label in model.classify(text, pair)} == pytest.approx(chances, abs=1e-5)

    write_onnx(tmp_path / "tuned/model")
    described = json.loads((tmp_path / "tuned/model/onnx.json").read_text())
    assert described["inputs"]["token_type_ids"]["meaning"] == "1 up to the first [SEP], then 2"


def test_predictions_of_the_export_are_those_of_the_run(run, tmp_path, capsys):
    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    assert "transformers loads it with trust_remote_code=True" in capsys.readouterr().err
    answers = []
    for folder in (run, tmp_path / "exported"):
        assert main(["predict", "fill-mask", str(folder), "w1 [MASK] w3", "--format", "json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
