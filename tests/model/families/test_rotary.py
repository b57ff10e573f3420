"""EuroBERT, Nomic BERT and GTE against transformers' own classes with random weights, in both directions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from cloze.model.config import BertConfig, ModelError
from cloze.model.huggingface import load_architecture, load_head, load_pretrained
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM, BertForSequenceClassification, saved_class
from tests.model.model_batches import add_strange_fields, batch, concatenate

SIZES = {
    "vocab_size": 211,
    "hidden_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 53,
    "max_position_embeddings": 37,
    "pad_token_id": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 777.0},
}
DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_attention_heads": 6, "hidden_size": 60, "num_key_value_heads": 2, "mask_token_id": 4}
# Name of a case -> model_type, beginning of the names of its classes, its own fields.
CASES = {
    "eurobert": ("eurobert", "EuroBert", GROUPED),
    "eurobert with biases, tied": (
        "eurobert",
        "EuroBert",
        GROUPED | {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "nomic_bert": ("nomic_bert", "NomicBert", DROPLESS),
    "nomic_bert, untied": ("nomic_bert", "NomicBert", DROPLESS | {"tie_word_embeddings": False}),
    "gte": ("gte", "Gte", DROPLESS | {"layer_norm_eps": 1e-5}),
    "gte without segments, untied": ("gte", "Gte", DROPLESS | {"type_vocab_size": 0, "tie_word_embeddings": False}),
}
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
LENGTHS = (3, 37, 17, 9)


def theirs_of(case: str, ending: str, spread: float = 0.1, **changes) -> transformers.PreTrainedModel:
    """A model as transformers draws it, with biases and norms that are not 0 and 1."""
    _, beginning, fields = CASES[case]
    kind = getattr(transformers, beginning + ending)
    labels = {"id2label": {0: "no", 1: "yes", 2: "unsure"}} if "Classification" in ending else {}
    torch.manual_seed(5)
    config = kind.config_class(**SIZES | fields | labels | changes)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spread * torch.randn(parameter.shape)
    return model.eval()


def inputs() -> dict[str, torch.Tensor]:
    padded = batch(BertConfig(vocab_size=211, pad_token_id=3), LENGTHS)
    del padded["token_type_ids"], padded["next_sentence_label"]
    return padded


def flat_inputs(padded: dict[str, torch.Tensor]) -> dict:
    flat = concatenate(padded | {"token_type_ids": padded["labels"] * 0, "next_sentence_label": None})
    return {name: each for name, each in flat.items() if name not in ("next_sentence_label", "token_type_ids")}


POOLED = [("eurobert", "ForSequenceClassification", {"classifier_pooling": kind}) for kind in ("bos", "mean", "late")]


@pytest.mark.parametrize(
    "case, ending, changes", [*((case, ending, {}) for case in CASES for ending in ENDINGS), *POOLED]
)
def test_every_class_comes_in_and_goes_out_whole(case, ending, changes, tmp_path):
    theirs = theirs_of(case, ending, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    described = add_strange_fields(tmp_path / "theirs")
    ours = saved_class(tmp_path / "theirs").from_folder(tmp_path / "theirs")
    assert type(ours) is ARCHITECTURES[f"Bert{ending}"] and not ours.new_parameters
    given = {name: inputs()[name] for name in ("input_ids", "attention_mask")}
    ours.save(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert json.loads((tmp_path / "ours/config.json").read_text()) == described
    with torch.no_grad():
        expected, found, back = theirs(**given)[0], ours(**given), again(**given)[0]
        flat = ours(
            **{name: each for name, each in flat_inputs(inputs()).items() if "masked" not in name and name != "labels"}
        )
    found, flat = (each.prediction_logits if ending == "ForMaskedLM" else each[0] for each in (found, flat))
    real = given["attention_mask"].bool()
    of_tokens = expected.shape[:2] == real.shape
    rows = real if of_tokens else slice(None)
    near = dict(atol=1e-5 * max(1.0, expected.abs().max().item()), rtol=0)
    torch.testing.assert_close(found[rows], expected[rows], **near)
    torch.testing.assert_close(flat, expected[rows], **near)
    assert torch.equal(back[rows], expected[rows])
    weights = theirs.state_dict()
    if not theirs.config.tie_word_embeddings:
        weights.pop("cls.predictions.bias", None)  # which its own class does not read then
    for name, weight in weights.items():
        assert torch.equal(again.state_dict()[name], weight), name
    if "Classification" in ending:
        assert load_head(tmp_path / "ours").labels == ("no", "yes", "unsure")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_loss_logits_hidden_states_and_gradients_are_those_of_transformers(case, dtype, tolerance, tmp_path):
    """Gradients are read as the weights of a folder are: all names, and parts of matrices, are accounted for."""
    scale = {} if dtype == torch.float32 else {"spread": 0.03, "initializer_range": 0.05}  # as a released model's
    theirs = theirs_of(case, "ForMaskedLM", **scale)
    theirs.save_pretrained(tmp_path / "weights")
    ours = BertForMaskedLM.from_folder(tmp_path / "weights").to(dtype)
    padded = inputs()
    expected = theirs(**padded, output_hidden_states=True)
    expected.loss.backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = load_pretrained(tmp_path / "gradients")[1]
    real = padded["attention_mask"].bool()
    for given in (padded, flat_inputs(padded)):
        ours.zero_grad()
        found = ours(**given)
        found.loss.backward()
        torch.testing.assert_close(found.loss.float(), expected.loss, atol=tolerance, rtol=tolerance)
        for name, parameter in ours.named_parameters():
            near = tolerance * max(1.0, wanted[name].abs().max().item())
            gradient = torch.zeros_like(wanted[name]) if parameter.grad is None else parameter.grad.float()
            torch.testing.assert_close(
                gradient, wanted[name], atol=near, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
    with torch.no_grad():
        states = ours(**padded | {"labels": None}, output_hidden_states=True)
    for mine, other in zip(states.hidden_states, expected.hidden_states, strict=True):
        near = tolerance * max(1.0, other.abs().max().item())
        torch.testing.assert_close(mine[real].float(), other[real], atol=near, rtol=tolerance)
    near = 3 * tolerance * max(1.0, expected.logits.abs().max().item())
    torch.testing.assert_close(states.prediction_logits[real].float(), expected.logits[real], atol=near, rtol=tolerance)


@pytest.mark.parametrize("case", ["eurobert", "nomic_bert", "gte"])
def test_what_is_pretrained_goes_out_as_a_masked_lm_and_what_they_lack_in_our_format(case, tmp_path):
    theirs_of(case, "ForMaskedLM").save_pretrained(tmp_path / "theirs")
    config, _ = load_pretrained(tmp_path / "theirs")
    for kind in ("PreTraining", "NextSentencePrediction", "QuestionAnswering", "MultipleChoice"):
        ARCHITECTURES[f"BertFor{kind}"](config).save(tmp_path / kind)
        expected = CASES[case][0] if kind == "PreTraining" else "cloze"
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == expected
        assert load_pretrained(tmp_path / kind)[0] == config
    assert load_architecture(tmp_path / "PreTraining") == "BertForMaskedLM"


BAD = [
    ("eurobert", {"attention_bias": True}, "found attention_bias and mlp_bias unequal, expected them equal"),
    ("eurobert", {"head_dim": 16}, "found head_dim 16 with num_attention_heads 6, expected hidden_size 60 / 6"),
    ("eurobert", {"num_key_value_heads": 4}, "model.num_key_value_heads: found 4, expected a divisor of"),
    ("eurobert", {"num_key_value_heads": 3}, "k_proj.weight: found shape (20, 60), expected (30, 60)"),
    ("eurobert", {"classifier_pooling": "eos"}, "found classifier_pooling 'eos', expected one of bos, mean, late"),
    ("eurobert", {"model_type": "nomic_bert"}, "found weights of modernbert, eurobert, expected those of nomic_bert"),
    ("nomic_bert", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "found rope_type 'dynamic'"),
    (
        "gte",
        {"rope_scaling": {"factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        "found rope_scaling beside other rope_parameters",
    ),
    ("nomic_bert", {"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ("nomic_bert", {"intermediate_size": 54}, "mlp.fc12.weight: found shape (53, 42), expected (54, 42)"),
    ("nomic_bert", {"model_type": "neobert"}, "found model_type 'neobert', expected bert,"),
    ("gte", {"hidden_act": "relu"}, "found hidden_act 'relu' with model_type gte, expected 'gelu'"),
    ("gte", {"num_hidden_layers": 4}, "found num_hidden_layers 4, expected 3, the layers among the weights"),
]


@pytest.mark.parametrize("case, values, message", BAD, ids=[f"{case[0]} {next(iter(case[1]))}" for case in BAD])
def test_what_does_not_fit_is_refused_in_one_line(case, values, message, tmp_path):
    theirs_of(case, "ForSequenceClassification").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError) as caught:
        BertForSequenceClassification.from_folder(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
