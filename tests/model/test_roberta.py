"""RoBERTa, XLM-RoBERTa and CamemBERT against transformers' own classes with random weights, in both directions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from cloze.model.config import BertConfig, ModelError
from cloze.model.huggingface import load_architecture, load_head, load_pretrained, to_huggingface
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM, BertForSequenceClassification, saved_class
from tests.model.model_batches import batch, concatenate

FAMILIES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
ENDINGS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
PADDING = 3  # not 1, as released ones have: positions begin at 4
LENGTHS = (3, 37, 17, 9)


def theirs_of(family: str, ending: str, dtype: torch.dtype = torch.float32, **changes) -> transformers.PreTrainedModel:
    """A model as transformers draws it, with biases and norms that are not 0 and 1."""
    values = {
        "vocab_size": 211,
        "hidden_size": 39,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 53,
        "max_position_embeddings": 37 + PADDING + 1,
        "type_vocab_size": 1,
        "pad_token_id": PADDING,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if "Classification" in ending:
        values["id2label"] = {0: "no", 1: "yes", 2: "unsure"}
    torch.manual_seed(5)
    kind = getattr(transformers, FAMILIES[family] + ending)
    config = kind.config_class(**values | changes)
    model = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


def inputs() -> dict[str, torch.Tensor]:
    padded = batch(BertConfig(vocab_size=211, pad_token_id=PADDING), LENGTHS)
    del padded["token_type_ids"], padded["next_sentence_label"]
    return padded


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_comes_in_and_goes_out_whole(family, ending, tmp_path):
    theirs = theirs_of(family, ending)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = saved_class(tmp_path / "theirs").from_folder(tmp_path / "theirs")
    assert type(ours) is ARCHITECTURES[f"Bert{ending}"] and not ours.new_parameters
    assert (ours.config.family, ours.config.max_position_embeddings) == (family, 37)
    given = {name: inputs()[name] for name in ("input_ids", "attention_mask")}
    if ending == "ForMultipleChoice":
        given = {name: each.view(2, 2, -1) for name, each in given.items()}
    ours.save(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    with torch.no_grad():
        expected, found, back = theirs(**given)[0], ours(**given), again(**given)[0]
    found = found.prediction_logits if ending == "ForMaskedLM" else found[0]
    real = given["attention_mask"].bool()
    rows = real if expected.shape[:2] == real.shape else slice(None)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-5, rtol=0)
    assert torch.equal(back[rows], expected[rows])
    for name, weight in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    if "Classification" in ending:
        assert load_head(tmp_path / "ours").labels == ("no", "yes", "unsure")


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_loss_logits_hidden_states_and_gradients_are_those_of_transformers(tied, dtype, tolerance, tmp_path):
    theirs = theirs_of("roberta", "ForMaskedLM", tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    ours = BertForMaskedLM.from_folder(tmp_path)
    padded = inputs()
    expected = theirs(**padded, output_hidden_states=True)
    expected.loss.backward()
    wanted = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    flat = concatenate(padded | {"token_type_ids": padded["labels"] * 0, "next_sentence_label": None})
    del flat["next_sentence_label"], flat["token_type_ids"]
    ours.to(dtype)
    real = padded["attention_mask"].bool()
    for given in (padded, flat):
        ours.zero_grad()
        found = ours(**given)
        found.loss.backward()
        torch.testing.assert_close(found.loss.float(), expected.loss, atol=tolerance, rtol=tolerance)
        gradients = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
        if not tied:
            gradients["masked_lm.decoder.weight"] = ours.masked_lm.decoder.weight.grad
        gradients = to_huggingface(gradients, ours.config)
        gradients.pop("lm_head.decoder.bias" if tied else "lm_head.bias", None)
        assert set(gradients) == set(wanted)
        for name, gradient in wanted.items():
            near = tolerance * max(1.0, gradient.abs().max().item())
            torch.testing.assert_close(
                gradients[name].float(), gradient, atol=near, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
    with torch.no_grad():
        states = ours(**padded | {"labels": None}, output_hidden_states=True)
    for mine, other in zip(states.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real].float(), other[real], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        states.prediction_logits[real].float(), expected.logits[real], atol=tolerance * 3, rtol=tolerance
    )


def test_old_names_are_read_and_an_unread_pooler_is_left_out(tmp_path):
    theirs = theirs_of("roberta", "ForSequenceClassification")
    theirs.save_pretrained(tmp_path)
    weights = theirs.state_dict() | {f"roberta.pooler.dense.{kind}": torch.ones(39) for kind in ("weight", "bias")}
    weights["roberta.embeddings.position_ids"] = torch.arange(41)[None]
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    found = BertForSequenceClassification.from_folder(tmp_path)
    assert torch.equal(found.bert.pooler.dense.weight, theirs.classifier.dense.weight)


def test_what_is_pretrained_goes_out_as_a_masked_lm_and_next_sentences_alone_in_our_format(tmp_path):
    config = BertConfig.preset("roberta", vocab_size=31, num_hidden_layers=1, hidden_size=24, intermediate_size=8)
    for kind, expected in (("BertForPreTraining", "roberta"), ("BertForNextSentencePrediction", "cloze")):
        ARCHITECTURES[kind](config).save(tmp_path / kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["model_type"] == expected
    assert load_architecture(tmp_path / "BertForPreTraining") == "BertForMaskedLM"
    assert load_pretrained(tmp_path / "BertForPreTraining")[0] == config


@pytest.mark.parametrize(
    "values, message",
    [
        ({"hidden_act": "relu"}, "found hidden_act 'relu' with model_type roberta, expected 'gelu'"),
        ({"is_decoder": True}, "found is_decoder True with model_type roberta, expected False"),
        ({"pad_token_id": None}, "found pad_token_id null with model_type roberta, expected the id"),
        ({"max_position_embeddings": 4}, "model.max_position_embeddings: found 0, expected at least 1"),
        ({"model_type": "camembert", "max_position_embeddings": 42}, "expected shape"),
        ({"model_type": "deberta-v2"}, "found model_type 'deberta-v2', expected bert, electra, roberta"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(values, message, tmp_path):
    theirs_of("roberta", "ForMaskedLM").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError) as caught:
        BertForMaskedLM.from_folder(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="family: roberta needs position_embedding: learned"):
        BertConfig(family="roberta", position_embedding="rotary")
