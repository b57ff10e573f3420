"""Each family against transformers' own classes with random weights, in both directions; the table of families."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
import torch
import transformers

from cloze.model.config import BertConfig, ModelError
from cloze.model.families import BY_TYPE, FAMILIES, OUR_CLASSES, family_for, family_of
from cloze.model.families.family import HEADS
from cloze.model.huggingface import config_to_huggingface, load_architecture, load_head, load_pretrained
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM, BertForSequenceClassification, saved_class
from cloze.model.weight_names import to_huggingface
from tests.model.model_batches import add_strange_fields, batch, concatenate
from tests.tables import assert_same_names

PADDING = 3  # not 0 or 1, as released models have
LENGTHS = (3, 37, 17, 9)
SIZES = {
    "vocab_size": 211,
    "hidden_size": 39,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 53,
    "max_position_embeddings": 37,
    "pad_token_id": PADDING,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROBERTA = {**DROPOUT, "max_position_embeddings": 37 + PADDING + 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
# model_type -> values of its configuration in transformers, beside SIZES; a name that is not its own is left out there.
REFERENCES = {
    "bert": {**DROPOUT, "layer_norm_eps": 1e-5},
    "electra": {**DROPOUT, "embedding_size": 23},
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
    "modernbert": {
        "hidden_size": 42,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "mean",
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
    "distilbert": {
        **{"dim": 39, "n_layers": 3, "n_heads": 3, "hidden_dim": 53, "sinusoidal_pos_embds": True},
        **{"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0},
    },
    "albert": {**DROPOUT, "embedding_size": 23, "num_hidden_layers": 5, "num_hidden_groups": 2},
    "deberta-v2": {
        **{**DROPOUT, "layer_norm_eps": 1e-5, "type_vocab_size": 0, "position_biased_input": False},
        **{"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "share_att_key": True},
        "norm_rel_ebd": "layer_norm",
    },
    "mpnet": {**DROPOUT, "pad_token_id": 1, "max_position_embeddings": 39, "layer_norm_eps": 1e-5},
}
# Whose names of weights in folders are not those of transformers' parameters: tests/model/families/test_rotary.py.
ELSEWHERE = {"eurobert", "nomic_bert", "gte"}
CLASSES = [(kind, end) for kind in REFERENCES for end in dict.fromkeys(BY_TYPE[kind].class_suffixes.values())]


def theirs_of(kind: str, end: str, **changes) -> transformers.PreTrainedModel:
    """A model as transformers draws it, with biases and norms that are not 0 and 1."""
    values = SIZES | REFERENCES[kind] | changes
    if kind == "distilbert":
        values = {name: value for name, value in values.items() if name not in SIZES or "_size" not in name} | {
            "vocab_size": 211
        }
        values = {
            name: value for name, value in values.items() if name not in ("num_hidden_layers", "num_attention_heads")
        }
    if "Classification" in end:
        values["id2label"] = {0: "no", 1: "yes", 2: "unsure"}
    torch.manual_seed(5)
    own = getattr(transformers, BY_TYPE[kind].class_prefixes[kind] + end)
    model = own._from_config(own.config_class(**values), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def inputs(kind: str) -> dict[str, torch.Tensor]:
    padding = REFERENCES[kind].get("pad_token_id", PADDING)
    given = batch(BertConfig(vocab_size=211, pad_token_id=padding), LENGTHS)
    del given["next_sentence_label"]
    if "embeddings.segment" not in " ".join(BY_TYPE[kind].modules) or REFERENCES[kind].get("type_vocab_size") == 1:
        del given["token_type_ids"]
    return given


def results(output) -> list[torch.Tensor]:
    """What a model says, in an order that ours and theirs have in common."""
    found = output._asdict() if hasattr(output, "_asdict") else dict(output)
    names = ("prediction_logits", "logits", "next_sentence_logits", "seq_relationship_logits", "sop_logits")
    names += ("start_logits", "end_logits", "last_hidden_state", "pooled_output", "pooler_output")
    return [found[name] for name in names if found.get(name) is not None]


def test_every_family_has_a_reference():
    assert REFERENCES.keys() | ELSEWHERE == BY_TYPE.keys() and not REFERENCES.keys() & ELSEWHERE


@pytest.mark.parametrize("kind, end", CLASSES)
def test_every_class_comes_in_and_goes_out_whole(kind, end, tmp_path):
    theirs = theirs_of(kind, end)
    theirs.save_pretrained(tmp_path / "theirs")
    described = add_strange_fields(tmp_path / "theirs")
    ours = saved_class(tmp_path / "theirs").from_folder(tmp_path / "theirs")
    assert BY_TYPE[kind].class_suffixes[type(ours).__name__] == end and not ours.new_parameters
    given = {name: each for name, each in inputs(kind).items() if name != "labels"}
    if end == "ForMultipleChoice":
        given = {name: each.view(2, 2, -1) for name, each in given.items()}
    ours.save(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    with torch.no_grad():
        expected, found, back = (results(model(**given)) for model in (theirs, ours, again))
    assert json.loads((tmp_path / "ours/config.json").read_text()) == described
    real = given["attention_mask"].bool()
    for one, other, same in zip(expected, found, back, strict=True):
        rows = real if one.shape[:2] == real.shape else slice(None)
        torch.testing.assert_close(other[rows], one[rows], atol=1e-5, rtol=0)
        assert torch.equal(same[rows], one[rows])
    for name, weight in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    if "Classification" in end:
        assert load_head(tmp_path / "ours").labels == ("no", "yes", "unsure")


def trained(model: torch.nn.Module, given: dict[str, torch.Tensor], config: BertConfig) -> dict[str, torch.Tensor]:
    """Loss, gradients by the names of transformers, hidden states and logits of the real tokens."""
    model.zero_grad()
    output = model(**given, output_hidden_states=True)
    output.loss.backward()
    found = {name: each.grad for name, each in model.named_parameters(remove_duplicate=False) if each.grad is not None}
    family = BY_TYPE[family_of(config)]
    if isinstance(model, BertForMaskedLM):
        found = to_huggingface(found, config)
        if not config.type_vocab_size:
            found.pop(family.segment_weight, None)
    if config.tie_word_embeddings:
        for name in (family.decoder[0], family.second_bias):
            found.pop(name, None)
    elif family.second_bias:
        found.pop(family.decoder[1], None)  # is not used
    rows = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    found |= {f"state {number}": state[rows] for number, state in enumerate(output.hidden_states)}
    if not isinstance(model, BertForMaskedLM):
        found["logits"] = output.logits[rows]
    elif "attention_mask" in given:
        with torch.no_grad():
            found["logits"] = model(**given | {"labels": None}).prediction_logits[rows]
    return {name: each.detach().float() for name, each in (found | {"loss": output.loss}).items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_loss_logits_hidden_states_and_gradients_are_those_of_transformers(kind, tied, tmp_path):
    """In fp32 within 1e-5 (of the largest gradient, if that is above 1; logits three times that); in bf16 as far from
    that as transformers in bf16, or less, up to half as far again.
    """
    theirs = theirs_of(kind, "ForMaskedLM", tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    ours = BertForMaskedLM.from_folder(tmp_path)
    padded = inputs(kind)
    flat = concatenate({"token_type_ids": padded["labels"] * 0, **padded, "next_sentence_label": None})
    del flat["next_sentence_label"]
    expected = trained(theirs, padded, ours.config)
    for given in (padded, flat):
        found = trained(ours, given, ours.config)
        assert found.keys() >= expected.keys() - {"logits"} and found.keys() <= expected.keys()
        for name, value in found.items():
            near = 1e-5 * max(1.0, expected[name].abs().max().item()) * (3 if name == "logits" else 1)
            torch.testing.assert_close(
                value, expected[name], atol=near, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
    theirs, ours = theirs.to(torch.bfloat16), ours.to(torch.bfloat16)
    rounded = trained(theirs, padded, ours.config)
    for given in (padded, flat):
        errors = [
            {name: (value - expected[name]).square().mean().sqrt().item() for name, value in each.items()}
            for each in (trained(ours, given, ours.config), rounded)
        ]
        for part in ("state", "logits", "loss", ""):
            mine, other = ([error for name, error in each.items() if name.startswith(part)] for each in errors)
            assert sum(mine) <= 1.5 * sum(other) * len(mine) / len(other), part


def test_a_model_type_has_one_family_which_the_configuration_names_if_no_other_field_tells_it():
    kinds = [kind for family in FAMILIES for kind in family.class_prefixes]
    assert len(kinds) == len(set(kinds)) and list(BY_TYPE) == kinds
    named = {kind for family in FAMILIES if family.named_in_config for kind in family.class_prefixes}
    assert_same_names(named, get_args(get_type_hints(BertConfig)["family"]), "BertConfig.family in model/config.py")


@pytest.mark.parametrize("kind", BY_TYPE)
def test_what_a_folder_does_not_say_is_what_transformers_takes(kind):
    said = transformers.AutoConfig.for_model(kind).to_dict()
    whole = BY_TYPE[kind].read({**said, "model_type": kind})
    assert BY_TYPE[kind].read({"model_type": kind, "vocab_size": said["vocab_size"]}) == whole


@pytest.mark.parametrize(
    "kind, values",
    [
        ("distilbert", {"num_attention_heads": 3, "hidden_size": 48, "num_hidden_layers": 2}),
        ("distilbert", {"num_attention_heads": 3, "n_heads": 3, "dim": 48}),
        ("modernbert", {"sliding_window": 5}),
        ("modernbert", {"sliding_window": 5, "local_attention": 10}),
    ],
)
def test_fields_by_their_other_names_are_what_transformers_takes(kind, values):
    origin = {"model_type": kind, "vocab_size": 50368, **values}
    theirs = transformers.AutoConfig.for_model(**origin).to_dict()
    config = BY_TYPE[kind].read(origin)
    assert config == BY_TYPE[kind].read(theirs)
    # The other name is kept in a copy as long as it says the same.
    assert config_to_huggingface(config, "BertModel", torch.float32, origin=origin).items() >= origin.items()
    changed = {"num_attention_heads": 6} if kind == "distilbert" else {"local_attention_window": 4}
    changed = dataclasses.replace(config, **changed)
    values = config_to_huggingface(changed, "BertModel", torch.float32, origin=origin)
    assert (
        BY_TYPE[kind].read(values)
        == BY_TYPE[kind].read(transformers.AutoConfig.for_model(**values).to_dict())
        == changed
    )


def test_every_other_name_of_a_field_in_transformers_is_known():
    for kind, family in BY_TYPE.items():
        names = transformers.AutoConfig.for_model(kind).attribute_map
        assert {alias: name for alias, name in names.items() if name in family.fields.values()} == {
            alias: name for alias, (name, factor) in family.aliases.items() if factor == 1
        }, kind


def test_the_names_of_classes_are_those_of_ours_and_come_back():
    assert HEADS.keys() <= ARCHITECTURES.keys()
    for family in FAMILIES:
        for theirs in family.class_prefixes.values():
            assert family.class_suffixes.keys() <= ARCHITECTURES.keys()
            assert (
                family.classes_with_pooler is not None
                and set(family.classes_with_pooler) <= family.class_suffixes.keys()
            )
            assert {OUR_CLASSES[theirs + end] for end in family.class_suffixes.values()} <= family.class_suffixes.keys()


def test_a_field_that_no_family_says_makes_a_variant():
    assert family_of(BertConfig()) == "bert" and family_of(BertConfig(norm_position="pre")) is None
    with pytest.raises(ModelError, match="no counterpart"):
        family_for(BertConfig(normalization="rms_norm"))


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
    "kind, values, message",
    [
        ("roberta", {"hidden_act": "relu"}, "found hidden_act 'relu' with model_type roberta, expected 'gelu'"),
        ("roberta", {"is_decoder": True}, "found is_decoder True with model_type roberta, expected False"),
        ("roberta", {"pad_token_id": None}, "found pad_token_id null with model_type roberta, expected the id"),
        ("roberta", {"max_position_embeddings": 4}, "model.max_position_embeddings: found 0, expected 1 to 1048576"),
        ("roberta", {"model_type": "camembert", "max_position_embeddings": 42}, "expected shape"),
        ("roberta", {"model_type": "gpt2"}, "found model_type 'gpt2', expected bert, electra, roberta"),
        ("roberta", {"model_type": "mpnet", "pad_token_id": 1}, "found weights of roberta, xlm-roberta, camembert, ex"),
        ("electra", {"hidden_act": "relu"}, "found hidden_act 'relu' with model_type electra, expected 'gelu'"),
        ("albert", {"inner_group_num": 2}, "found inner_group_num 2 with model_type albert, expected 1"),
        ("albert", {"embedding_size": 39}, "found embedding_size 39 with model_type albert, expected another"),
        ("albert", {"num_hidden_groups": 4}, "found num_hidden_groups 4, expected 2, the layers among the weights"),
        ("albert", {"model_type": "bert"}, "found weights of albert, expected those of bert, as config.json says"),
        ("mpnet", {"pad_token_id": 0}, "found pad_token_id 0 with model_type mpnet, expected 1"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "found relative_attention_num_buckets 64 with model_type"),
        ("distilbert", {"activation": "mish"}, "found activation 'mish', expected one of gelu"),
        (
            "distilbert",
            {"num_attention_heads": 2},
            "found num_attention_heads 2 beside n_heads 3 with model_type distil",
        ),
        ("distilbert", {"num_hidden_layers": 1}, "found num_hidden_layers 1 beside n_layers 3 with model_type distil"),
        ("distilbert", {"hidden_size": 16}, "found hidden_size 16 beside dim 39 with model_type distilbert, exp"),
        (
            "modernbert",
            {"sliding_window": 5},
            "found sliding_window 5 beside local_attention 8 with model_type modernb",
        ),
        ("distilbert", {"model_type": "electra"}, "found weights of distilbert, expected those of electra"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(kind, values, message, tmp_path):
    theirs_of(kind, "ForMaskedLM").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ModelError) as caught:
        BertForMaskedLM.from_folder(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="family: roberta needs position_embedding: learned"):
        BertConfig(family="roberta", position_embedding="rotary")
