"""ONNX graphs in onnxruntime against torch: every head, unequal lengths, padding, sizes that the export never saw."""

import contextlib
import copy
import functools
import io
import json
import sys

import numpy as np
import pytest
import torch

from cloze.launch.cli import main
from cloze.launch.tools.onnx import write_onnx
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.model.problems import HeadConfig
from cloze.model.tasks import ARCHITECTURES
from cloze.pipeline.extras import how_to_install
from tests.launch.tiny_models import labels, save_model, tokenizer

ort = pytest.importorskip("onnxruntime")
SHAPE = dict(
    vocab_size=tokenizer().vocab_size,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
    initializer_range=0.3,
)
ONE_LAYER = SHAPE | dict(num_hidden_layers=1)  # beside those of two it is a head that is looked at
MODERN = SHAPE | dict(
    position_embedding="rotary",
    type_vocab_size=0,
    norm_position="pre",
    first_attention_norm=False,
    gated_feed_forward=True,
    classifier_transform=True,
    pooler=False,
    linear_bias=False,
    norm_bias=False,
    local_attention_window=4,
    global_attention_every=2,
)
THREE = HeadConfig(("a", "b", "c"))
CASES = {
    **{name: (name, ONE_LAYER, THREE if cls.takes_head else None) for name, cls in ARCHITECTURES.items()},
    "BertForPreTraining": ("BertForPreTraining", SHAPE, None),
    "mean of label columns": (
        "BertForSequenceClassification",
        ONE_LAYER,
        HeadConfig(("x: 0", "x: 1", "y: 0", "y: 1"), "columns", (("x", ("0", "1")), ("y", ("0", "1"))), "mean"),
    ),
    "max": ("BertForSequenceClassification", ONE_LAYER, HeadConfig(("a", "b"), pooling="max")),
    "alibi": ("BertForTokenClassification", SHAPE | {"position_embedding": "alibi"}, THREE),
    "ModernBERT": ("BertForQuestionAnswering", MODERN, None),
}
# What a fine-tuning has noted of some of these models; their graphs are made by `cloze export`.
NOTES = {
    "mean of label columns": {"cloze_truncation": {"max_length": 20, "keep": "tail", "head_tokens": 128}},
    "ModernBERT": {
        "cloze_answering": {"max_length": 16, "window_step": 8, "max_answer_tokens": 5, "allow_no_answer": True}
    },
}


def alone(model, ids, segments, choice):
    """Outputs of one sequence (or of the choices of one example) as training computes them, without any padding."""
    inputs = {"input_ids": torch.cat(ids), "sequence_offsets": torch.tensor(np.cumsum([0, *map(len, ids)])).int()}
    if model.config.type_vocab_size:
        inputs["token_type_ids"] = torch.cat(segments)
    output = model(**inputs, **({"num_choices": len(ids)} if choice else {}))
    names = (
        "last_hidden_state",
        "pooled_output",
        "prediction_logits",
        "next_sentence_logits",
        "logits",
        "start_logits",
        "end_logits",
    )
    return [
        getattr(output, name)[None] if getattr(output, name).dim() == 1 and not choice else getattr(output, name)
        for name in names
        if getattr(output, name, None) is not None
    ]


OFTEN = "BertForPreTraining", "BertForMultipleChoice", "mean of label columns", "ModernBERT"  # an export takes seconds


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A case's model, the folder with its graph and what the command has said; made once, since it takes seconds."""

    @functools.cache
    def export(case):
        name, shape, head = CASES[case]
        model = ARCHITECTURES[name](BertConfig(**shape), **({"head": head} if head else {})).eval()
        init_weights(model, 1)
        folder, said = tmp_path_factory.mktemp("case") / "model", io.StringIO()
        model.save(folder)
        if case not in NOTES:
            write_onnx(folder)
            return model, folder, ""
        tokenizer().save(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | NOTES[case]))
        with contextlib.redirect_stdout(said):
            assert main(["export", str(folder), "--onnx", "true"]) == 0
        return model, folder.with_name("model-hf"), said.getvalue()

    return export


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in OFTEN else pytest.mark.slow) for case in CASES]
)
@torch.inference_mode()
def test_outputs_are_torch_s(case, exported):
    name = CASES[case][0]
    model, folder, _ = exported(case)
    model = copy.deepcopy(model).double()  # processors round a sum otherwise; all are near what is exact
    session = ort.InferenceSession(folder / "model.onnx")
    described = json.loads((folder / "onnx.json").read_text())
    assert list(described["inputs"]) == [each.name for each in session.get_inputs()]
    assert list(described["outputs"]) == [each.name for each in session.get_outputs()]
    assert described["max_length"] == (16 if case == "ModernBERT" else 24) and described["architecture"] == name
    rng, choice = np.random.default_rng(2), name == "BertForMultipleChoice"
    for lengths in ([24, 3, 11, 1, 17, 8], [5]):
        longest = max(lengths)
        ids = rng.integers(0, SHAPE["vocab_size"], (len(lengths), longest))  # whatever stands in the padding is nothing
        segments = rng.integers(0, 2, ids.shape)
        mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
        if choice:  # those of one example
            feed = {key: value[None] for key, value in feed.items()}
        found = session.run(None, {key: feed[key] for key in described["inputs"]})
        rows = [
            (torch.from_numpy(ids[row, :length]), torch.from_numpy(segments[row, :length]))
            for row, length in enumerate(lengths)
        ]
        if choice:
            (expected,) = alone(model, *zip(*rows, strict=True), True)
            np.testing.assert_allclose(found[0], expected, atol=1e-5)
            continue
        for row, (tokens, parts) in enumerate(rows):
            for ours, theirs in zip(found, alone(model, [tokens], [parts], False), strict=True):
                ours = ours[row, : len(tokens)] if ours.shape[:2] == ids.shape else ours[row]
                np.testing.assert_allclose(ours, theirs.reshape(ours.shape), atol=1e-5)


def test_the_command_adds_a_graph_to_a_fine_tuned_model(exported):
    _, folder, said = exported("mean of label columns")
    assert "with an ONNX graph" in said
    made = {path.name for path in folder.iterdir()}
    assert {"model.onnx", "onnx.json", "model.safetensors", "config.json", "tokenizer.json"} <= made
    described = json.loads((folder / "onnx.json").read_text())
    assert described["outputs"]["logits"]["shape"][-1] == 4
    assert described["truncation"] == NOTES["mean of label columns"]["cloze_truncation"]
    assert "words" not in described, "it was trained on texts"


def test_a_tagger_s_graph_names_the_length_that_it_has_learned(tmp_path):
    """It cuts nothing: longer texts are split between words; and what words are, where each character is one."""
    save_model(
        tmp_path / "model",
        "BertForTokenClassification",
        num_hidden_layers=1,
        **labels("O", "B-X"),
        cloze_truncation={"max_length": 16, "keep": "head", "head_tokens": 128, "words": "characters"},
    )
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--onnx", "true"]) == 0
    described = json.loads((tmp_path / "out" / "onnx.json").read_text())
    assert described["max_length"] == 16 and "truncation" not in described
    assert described["words"] == "characters"


def test_a_question_answerer_s_graph_names_the_windows_that_it_has_learned(exported):
    described = json.loads((exported("ModernBERT")[1] / "onnx.json").read_text())
    assert described["max_length"] == 16 and described["answering"] == NOTES["ModernBERT"]["cloze_answering"]


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys, monkeypatch):
    save_model(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--step", "3"]) == 2
    assert "leave --step out" in capsys.readouterr().err
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["BertLMHeadModel"]}))
    assert main(["export", str(tmp_path / "model"), "--onnx", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "found architecture BertLMHeadModel, expected one of" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(tmp_path / "model"), "--onnx", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert how_to_install("onnx") in line and "onnxscript" in line
    assert not (tmp_path / "model-hf").exists()
