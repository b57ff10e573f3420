"""DeBERTa-v2 and -v3 in more shapes than the one of test_families.py, against transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import transformers

from cloze.model.config import BertConfig, ModelError
from cloze.model.huggingface import load_head, load_pretrained
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM, saved_class
from cloze.model.weight_names import to_huggingface
from tests.model.model_batches import batch, concatenate

V3 = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
}
# Fields of their configuration; every value of each field is somewhere.
SHAPES = {
    "v3": V3,
    "v3, other head": V3 | {"legacy": False},
    "v2": V3 | {"share_att_key": False, "position_buckets": -1, "max_relative_positions": 20, "norm_rel_ebd": "none"},
    "c2p": V3 | {"pos_att_type": ["c2p"], "type_vocab_size": 2, "position_biased_input": True},
    "p2c": V3 | {"pos_att_type": "p2c", "share_att_key": False, "tie_word_embeddings": False, "embedding_size": 26},
    "convolution": V3 | {"conv_kernel_size": 3, "conv_act": "gelu"},
    "wide convolution": V3 | {"legacy": False, "conv_kernel_size": 5},
    "no distances": {"type_vocab_size": 1, "pooler_hidden_act": "tanh", "hidden_act": "relu"},
}
POOLED = "no distances", "ForSequenceClassification"  # tanh in its pooler


def theirs_of(shape: str, ending: str = "ForMaskedLM", **changes) -> transformers.PreTrainedModel:
    """A model as transformers draws it, with biases and norms that are not 0 and 1."""
    values = {
        "vocab_size": 211,
        "hidden_size": 39,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 53,
        "max_position_embeddings": 37,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if "Classification" in ending:
        values["id2label"] = {0: "no", 1: "yes", 2: "unsure"}
    torch.manual_seed(5)
    kind = getattr(transformers, f"DebertaV2{ending}")
    model = kind(kind.config_class(**values | SHAPES[shape] | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def inputs(config: BertConfig) -> dict[str, torch.Tensor]:
    padded = batch(BertConfig(vocab_size=211), (3, 37, 17, 9))
    padded["token_type_ids"] *= config.type_vocab_size > 1
    del padded["next_sentence_label"]
    return padded


@pytest.mark.parametrize("shape, ending", [*((shape, "ForMaskedLM") for shape in SHAPES), POOLED])
def test_every_shape_comes_in_and_goes_out_whole_with_its_configuration(shape, ending, tmp_path):
    theirs = theirs_of(shape, ending)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = saved_class(tmp_path / "theirs").from_folder(tmp_path / "theirs")
    assert type(ours) is ARCHITECTURES[f"Bert{ending}"] and not ours.new_parameters
    names = ("input_ids", "attention_mask", "token_type_ids")
    given = {name: inputs(ours.config)[name] for name in names}
    ours.save(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        expected, found, back = theirs(**given)[0], ours(**given), again(**given)[0]
    found = found.prediction_logits if ending == "ForMaskedLM" else found[0]
    real = given["attention_mask"].bool()
    rows = real if expected.shape[:2] == real.shape else slice(None)
    torch.testing.assert_close(found[rows], expected[rows], atol=2e-5, rtol=0)
    assert torch.equal(back[rows], expected[rows])
    unread = () if theirs.config.tie_word_embeddings else ("cls.predictions.bias",)  # by their class
    for name, weight in theirs.state_dict().items():
        assert name in unread or torch.equal(again.state_dict()[name], weight), name
    if "Classification" in ending:
        assert load_head(tmp_path / "ours").labels == ("no", "yes", "unsure")
    changed = ("_name_or_path", "problem_type", "label2id")  # ours says what theirs assumes
    fields = theirs.config.to_dict()
    different = {name: (each, again.config.to_dict().get(name)) for name, each in fields.items() if name not in changed
                 and again.config.to_dict().get(name) != each}  # fmt: skip
    assert not different


def results(model, given: dict, names: Callable) -> dict[str, torch.Tensor]:
    """Loss, hidden states, logits of real tokens, and gradients under their names, in fp32."""
    model.zero_grad()
    output = model(**given, output_hidden_states=True)
    output.loss.backward()
    real = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    found = {"loss": output.loss} | {f"state {n}": each[real] for n, each in enumerate(output.hidden_states)}
    with torch.no_grad():
        logits = model(**given | {"labels": None})
    found["logits"] = logits.prediction_logits if hasattr(logits, "prediction_logits") else logits.logits
    found["logits"] = found["logits"][real]
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.float() for name, each in (found | names(model, gradients)).items()}


def our_names(model, gradients: dict) -> dict:
    if not model.config.tie_word_embeddings:
        gradients["masked_lm.decoder.weight"] = model.masked_lm.decoder.weight.grad
    return to_huggingface(gradients, model.config, type(model).__name__)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "v3"])
def test_loss_logits_hidden_states_and_gradients_are_those_of_transformers(shape, tmp_path):
    """In fp32 in absolute terms; in bf16 they lie as near to those in fp32 as theirs in bf16 do."""
    theirs = theirs_of(shape)
    theirs.save_pretrained(tmp_path)
    ours = BertForMaskedLM.from_folder(tmp_path)
    padded = inputs(ours.config)
    expected = results(theirs, padded, lambda _, gradients: gradients)
    flat = concatenate(padded | {"next_sentence_label": None})
    del flat["next_sentence_label"], flat["masked_positions"]
    flat["labels"] = padded["labels"][padded["attention_mask"].bool()]
    unread = "cls.predictions.bias" if not ours.config.tie_word_embeddings else "cls.predictions.decoder.bias"
    for given in (padded, flat):
        found = results(ours, given, our_names)
        assert found.keys() - {unread} == expected.keys()
        for name, wanted in expected.items():
            near = (3e-5 if name == "logits" else 1e-5) * max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(
                found[name], wanted, atol=near, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
    halved = results(theirs.to(torch.bfloat16), padded, lambda _, gradients: gradients)
    ours.to(torch.bfloat16)
    for found in (results(ours, padded, our_names), results(ours, flat, our_names)):
        for kind in ("loss", "state", "logits", "deberta."):
            names = [name for name in expected if name.startswith(kind)]
            mine, other = (
                torch.cat([(each[name] - expected[name]).flatten() for name in names]).norm()
                for each in (found, halved)
            )
            assert mine < 1.3 * other + (0.02 if kind == "loss" else 0), kind


def test_a_folder_as_v3_is_released_is_read_with_its_masked_lm_head(tmp_path):
    """Pickled; nothing of the class or of `legacy`, names of the other head, a detector and unused positions."""
    theirs = theirs_of("v3, other head")
    theirs.save_pretrained(tmp_path)
    weights = theirs.state_dict() | {
        "mask_predictions.dense.weight": torch.ones(39, 39),
        "mask_predictions.LayerNorm.bias": torch.ones(39),
        "deberta.embeddings.position_embeddings.weight": torch.ones(37, 39),
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for name in ("architectures", "legacy"):
        del values[name]
    path.write_text(json.dumps(values | {"pos_att_type": "p2c|c2p", "max_relative_positions": -1}))
    ours = BertForMaskedLM.from_folder(tmp_path)
    given = {name: inputs(ours.config)[name] for name in ("input_ids", "attention_mask")}
    real = given["attention_mask"].bool()
    expected = theirs(**given).logits[real]
    torch.testing.assert_close(ours(**given).prediction_logits[real], expected, atol=3e-5, rtol=0)
    ours.save(tmp_path / "ours")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(**given).logits[real], expected, atol=3e-5, rtol=0)


def test_what_is_pretrained_goes_out_as_a_masked_lm_and_what_has_no_class_in_our_format(tmp_path):
    config = BertConfig.preset("deberta-v3", vocab_size=31, num_hidden_layers=1, hidden_size=24, intermediate_size=8)
    for kind, expected in (("BertForPreTraining", "deberta-v2"), ("BertForReplacedTokenDetection", "cloze")):
        ARCHITECTURES[kind](config).save(tmp_path / kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == expected
        assert load_pretrained(tmp_path / kind)[0] == config


@pytest.mark.parametrize(
    "values, message",
    [
        ({"conv_kernel_size": 3}, "found no bert.encoder.layers.0.convolution"),
        ({"conv_kernel_size": 4}, "model.convolution_size: must be 0 or odd"),
        ({"conv_kernel_size": 3, "conv_groups": 3}, "found conv_groups 3 with model_type deberta-v2, expected 1"),
        ({"pooler_dropout": 0.1}, "found pooler_dropout 0.1 with model_type deberta-v2, expected 0"),
        ({"pooler_hidden_size": 40}, "found pooler_hidden_size 40 with hidden_size 39, expected 39"),
        ({"attention_head_size": 8}, "found attention_head_size 8 with hidden_size 39, expected 13"),
        ({"pos_att_type": "c2p|p2p"}, "found 'p2p' in pos_att_type, expected c2p, p2c or both"),
        ({"pos_att_type": None}, "found relative_attention True with pos_att_type [], expected true with"),
        ({"relative_attention": False}, "found relative_attention False with pos_att_type"),
        ({"pos_att_type": ["c2p"], "share_att_key": False}, "found no bert.encoder.layers.0.attention.relative"),
        ({"position_buckets": 9}, "found bert.relative.table.weight of shape (16, 39), expected shape (18, 39)"),
        ({"position_buckets": 80}, "model.relative_buckets: must be at least 2, and half of them less than"),
        ({"max_relative_positions": "far"}, "found a value of another kind than its field's"),
        ({"legacy": False}, "cls.predictions.bias: found in the checkpoint, not part of the architecture"),
        ({"model_type": "deberta"}, "found model_type 'deberta', expected bert"),
        ({"model_type": "roberta"}, "found weights of deberta-v2, expected those of roberta"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(values, message, tmp_path):
    theirs_of("v3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError) as caught:
        BertForMaskedLM.from_folder(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
