"""Variants: what each changes, against formulas written out here; layouts and kernels agree for all of them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.config import ROBERTAS, BertConfig
from cloze.model.embeddings import sinusoidal_table
from cloze.model.families import family_of
from cloze.model.huggingface import load_pretrained
from cloze.model.problems import HeadConfig
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM
from cloze.model.weight_names import to_huggingface
from tests.model.model_batches import TINY, TOLERANCE, batch, concatenate, gradients, pretraining_model, scramble

MODERN = dataclasses.replace(
    TINY,
    position_embedding="rotary",
    rotary_theta=160_000.0,
    type_vocab_size=0,
    norm_position="pre",
    first_attention_norm=False,
    gated_feed_forward=True,
    linear_bias=False,
    norm_bias=False,
    pooler=False,
    classifier_transform=True,
    local_attention_window=8,
    num_hidden_layers=5,
    layer_norm_eps=1e-5,
)
VARIANTS = {
    "sinusoidal": dict(position_embedding="sinusoidal"),
    "scaled sinusoidal": dict(position_embedding="scaled_sinusoidal"),
    "rotary": dict(position_embedding="rotary"),
    "alibi": dict(position_embedding="alibi"),
    "grouped queries": dict(num_key_value_heads=2),
    "grouped queries, rotary": dict(num_key_value_heads=1, position_embedding="rotary"),
    "grouped queries, alibi, local": dict(num_key_value_heads=2, position_embedding="alibi", local_attention_window=8),
    "no positions": dict(position_embedding="none"),
    "pre-LN": dict(norm_position="pre"),
    "RMSNorm": dict(normalization="rms_norm"),
    "ReLU": dict(hidden_act="relu"),
    "GeGLU": dict(gated_feed_forward=True),
    "SwiGLU": dict(gated_feed_forward=True, hidden_act="silu"),
    "GeGLU without gate bias": dict(gated_feed_forward=True, gate_bias=False),
    "bias in the masked-LM transform alone": dict(linear_bias=False, transform_bias=True),
    "no biases": dict(linear_bias=False, norm_bias=False, decoder_bias=False),
    "three segments": dict(type_vocab_size=3, segment_padding_index=0),
    "no segments": dict(type_vocab_size=0),
    "plain embeddings": dict(embedding_norm=False, embedding_dropout=False),
    "no pooler": dict(pooler=False),
    "d2l head": dict(mlm_head="d2l", tie_word_embeddings=False),
    "linear head": dict(mlm_head="linear"),
    "untied": dict(tie_word_embeddings=False),
    "local and global": dict(local_attention_window=8, global_attention_every=2),
    "shared layers": dict(num_layer_groups=2),
    "one layer": dict(num_layer_groups=1, embedding_size=24, hidden_act="gelu_tanh"),
    "relative positions": dict(relative_position_buckets=32),
    "decoder": dict(is_decoder=True),
    "local decoder": dict(is_decoder=True, local_attention_window=8),
    "disentangled": dict(relative_attention="both", relative_buckets=8, relative_distances=20, relative_norm=True),
    "convolution": dict(convolution_size=3, convolution_act="relu"),
    "content to position": dict(relative_attention="c2p", relative_distances=20, relative_projections=True),
    "position to content": dict(relative_attention="p2c", position_embedding="none", is_decoder=True),
    "projected embeddings": dict(embedding_size=18, embedding_projection="before_norm"),
    "modern": dataclasses.asdict(MODERN),
}
PRESETS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted(Path(__file__).parents[2].glob("configs/model/*.yaml"))
}
SMALL = {
    name: getattr(TINY, name)
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_layouts_and_kernels_agree_for_every_variant(name):
    config = dataclasses.replace(TINY, **VARIANTS[name])
    padded = batch(config)
    flat = concatenate(padded)
    model = pretraining_model(config, attention_kernel="eager")
    expected = model(**padded)
    expected.loss.backward()
    grads = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    assert all(grad.isfinite().all() for grad in grads.values())
    for inputs, kernel in ((padded, "sdpa"), (flat, "eager"), (flat, "sdpa")):
        model.bert.attention_kernel = kernel
        model.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[key], **TOLERANCE)


@pytest.mark.parametrize("name", [*VARIANTS, *PRESETS])
def test_every_variant_and_preset_comes_back_from_its_folder(tmp_path, name):
    """Those that transformers has no architecture of too, with all that they are configured to be."""
    config = dataclasses.replace(TINY, **VARIANTS[name] if name in VARIANTS else PRESETS[name] | SMALL)
    flat = concatenate(batch(config))
    for cls in (
        BertForMaskedLM,
        BertModel,
        *[BertForPreTraining] * (family_of(config) not in ("modernbert", "deberta-v2", "distilbert", *ROBERTAS)),
    ):
        model = scramble(cls(config)).eval()
        model.save(tmp_path / cls.__name__)
        again = cls.from_folder(tmp_path / cls.__name__)
        assert not again.new_parameters
        unsaid = dict.fromkeys(
            (
                "pooler",
                "classifier_dropout",
                "classifier_transform",
                "initialization",
                "initializer_cutoff",
                "attention_output_dropout_prob",
            )
        )  # in formats of transformers
        assert dataclasses.asdict(again.config) | unsaid == dataclasses.asdict(config) | unsaid
        inputs = {key: each for key, each in flat.items() if "label" not in key and "masked" not in key}
        ours, found = model(**inputs), again(**inputs)
        if cls is BertModel and family_of(config) in ("deberta-v2", "distilbert"):  # no pooler in a bare encoder there
            ours = ours._replace(pooled_output=None)
        for each, expected in zip(found, ours, strict=True):
            assert torch.equal(each, expected) if expected is not None else each is None


# Mean nothing by themselves.
OWN_TESTS = {
    "segment_padding_index",
    "global_attention_every",
    "embedding_dropout",
    "gate_bias",
    "relative_distances",
    "relative_buckets",
    "relative_norm",
    "relative_projections",
    "convolution_act",  # families/test_deberta.py
    "embedding_projection",
    "transform_bias",  # true where other linear maps have no bias: families/test_rotary.py
}
FIELDS = sorted(
    {
        item
        for name, fields in VARIANTS.items()
        if name != "modern"
        for item in fields.items()
        if item[0] not in OWN_TESTS
    },
    key=str,
)


@pytest.mark.parametrize("field, value", FIELDS)
def test_every_field_of_a_variant_changes_something(field, value):
    """An option that no code reads would leave the parameters and the loss as they were."""
    plain, varied = pretraining_model(), pretraining_model(dataclasses.replace(TINY, **{field: value}))
    shapes = [{name: each.shape for name, each in model.named_parameters()} for model in (plain, varied)]
    flat = concatenate(batch())
    assert shapes[0] != shapes[1] or not torch.equal(plain(**flat).loss, varied(**flat).loss)


def test_a_layer_of_alibi_rms_norm_and_swiglu_computes_what_its_papers_say():
    """arXiv 2108.12409, 1910.07467 and 2002.05202, written out for two sequences in one piece; gradients too."""
    config = dataclasses.replace(
        TINY,
        num_hidden_layers=1,
        position_embedding="alibi",
        normalization="rms_norm",
        gated_feed_forward=True,
        hidden_act="silu",
        layer_norm_eps=1e-3,
    )
    model = scramble(BertModel(config)).double()
    layer = model.encoder.layers[0]
    output = model(torch.randint(5, 200, (17,)), sequence_offsets=torch.tensor([0, 5, 17]), output_hidden_states=True)

    def normalised(rows, norm):
        return norm.weight * rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    def computed(rows):
        parts = [
            rows @ weight.T + bias
            for weight, bias in zip(layer.attention.qkv.weight.chunk(3), layer.attention.qkv.bias.chunk(3), strict=True)
        ]
        places, mixed = torch.arange(len(rows)), []
        for head, (query, key, value) in enumerate(zip(*(part.split(8, dim=1) for part in parts), strict=True)):
            distance = (places[:, None] - places).abs()
            scores = (query @ key.T / math.sqrt(8) - 2.0 ** (-2 * (head + 1)) * distance).exp()
            mixed.append(scores / scores.sum(1, keepdim=True) @ value)
        rows = normalised(rows + layer.attention.output(torch.cat(mixed, 1)), layer.attention_norm)
        weights, biases = layer.feed_forward.up.weight, layer.feed_forward.up.bias
        swish, gate = rows @ weights[:64].T + biases[:64], rows @ weights[64:].T + biases[64:]
        swish = swish / (1 + (-swish).exp())
        return normalised(rows + layer.feed_forward.down(swish * gate), layer.feed_forward_norm)

    expected = torch.cat([computed(rows) for rows in output.hidden_states[0].split((5, 12))])
    torch.testing.assert_close(output.last_hidden_state, expected)
    factors = torch.arange(expected.numel()).view_as(expected).cos()
    found, wanted = (
        torch.autograd.grad((each * factors).sum(), list(layer.parameters()), retain_graph=True)
        for each in (output.last_hidden_state, expected)
    )
    torch.testing.assert_close(found, wanted)


def test_the_d2l_head_is_linear_relu_layer_norm_linear():
    model = scramble(BertForMaskedLM(dataclasses.replace(TINY, mlm_head="d2l", tie_word_embeddings=False)))
    ids, head = torch.randint(5, 200, (2, 7)), model.masked_lm
    hidden = head.dense(model.bert(ids).last_hidden_state).clamp_min(0)
    centred = hidden - hidden.mean(-1, keepdim=True)
    hidden = head.norm.weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() + head.norm.bias
    scores = (hidden @ head.decoder.weight.T + head.decoder.bias)[..., : TINY.vocab_size]
    torch.testing.assert_close(model(ids).prediction_logits, scores, **TOLERANCE)


@pytest.mark.parametrize("bases", [(160_000.0, 10_000.0), (10_000.0, 10_000.0), (160_000.0, 160_000.0)])
def test_modern_bert_matches_the_reference_and_goes_there_and_back(tmp_path, bases):
    """At the rotary bases of each phase of ModernBERT and Ettin."""
    shape = dataclasses.replace(MODERN, rotary_theta=bases[0], local_rotary_theta=bases[1])
    model = scramble(BertForMaskedLM(shape)).train()
    model.save(tmp_path / "ours")
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert type(theirs).__name__ == "ModernBertForMaskedLM" and theirs.config.cls_token_id is None
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    padded, flat = batch(), concatenate(batch())
    expected = theirs.train()(
        input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], labels=padded["labels"]
    )
    names = ("input_ids", "position_ids", "sequence_offsets", "max_sequence_length", "masked_positions", "labels")
    output = model(**{name: flat[name] for name in names})
    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    output.loss.backward()
    expected.loss.backward()
    ours = gradients(model)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **TOLERANCE)
    theirs.save_pretrained(tmp_path / "theirs")
    config, weights = load_pretrained(tmp_path / "theirs")
    again = BertForMaskedLM(config)
    again.load_state_dict(weights)
    torch.testing.assert_close(again(**{name: flat[name] for name in names}).loss, output.loss, **TOLERANCE)


def test_a_modern_bert_that_names_no_padding_token_loads(tmp_path):
    scramble(BertForMaskedLM(MODERN)).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": None}))
    assert transformers.AutoConfig.from_pretrained(tmp_path).pad_token_id is None
    assert load_pretrained(tmp_path)[0].pad_token_id == 0


HEADS = {
    "BertForSequenceClassification": [HeadConfig(("a", "b", "c"), pooling=kind) for kind in ("cls", "mean")]
    + [HeadConfig(("x", "y"), "multi_label", pooling="mean"), HeadConfig(("x",), "regression", pooling="cls")],
    "BertForTokenClassification": [HeadConfig(("a", "b", "c"), pooling="cls")],
    "BertForMultipleChoice": [HeadConfig(pooling=kind) for kind in ("cls", "mean")],
    "BertForQuestionAnswering": [None],
}


@pytest.mark.parametrize("name, head", [(name, head) for name, heads in HEADS.items() for head in heads])
def test_every_head_of_modern_bert_matches_the_reference_and_goes_there_and_back(tmp_path, name, head):
    cls, padded = ARCHITECTURES[name], batch()
    model = scramble(cls(MODERN) if head is None else cls(MODERN, head)).train()
    model.save(tmp_path / "ours")
    theirs, report = getattr(transformers, f"Modern{name}").from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert json.loads((tmp_path / "ours/config.json").read_text())["architectures"] == [f"Modern{name}"]
    inputs = {key: padded[key] for key in ("input_ids", "attention_mask")}
    labels = {"labels": torch.tensor([2, 0, 1, 1, 0])}
    if name == "BertForTokenClassification":
        labels = {"labels": (padded["labels"] % 3).masked_fill(padded["labels"] == -100, -100)}
    elif name == "BertForMultipleChoice":
        inputs = {key: tensor[:4].unflatten(0, (2, 2)) for key, tensor in inputs.items()}
        labels = {"labels": torch.tensor([1, 0])}
    elif name == "BertForQuestionAnswering":
        labels = {"start_positions": torch.tensor([1, 40, 0, 3, 29]), "end_positions": torch.tensor([2, 47, 16, 8, 29])}
    elif head.problem == "multi_label":
        labels = {"labels": torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]]).float()}
    elif head.problem == "regression":
        labels = {"labels": torch.randn(5, generator=torch.Generator().manual_seed(1))}
    output, expected = model(**inputs, **labels), theirs.train()(**inputs, **labels)
    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    seen = padded["attention_mask"].bool() if "Token" in name or "Question" in name else ...  # padding has no scores
    torch.testing.assert_close(output[0][seen], expected[1][seen], **TOLERANCE)
    output.loss.backward()
    expected.loss.backward()
    ours = to_huggingface({key: each.grad for key, each in model.named_parameters()}, MODERN, name)
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.pop(key), parameter.grad, **TOLERANCE)
    assert not ours
    theirs.save_pretrained(tmp_path / "theirs")
    again = cls.from_folder(tmp_path / "theirs")
    assert not again.new_parameters and (head is None or again.head.pooling == head.pooling)
    torch.testing.assert_close(again(**inputs)[0], output[0], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in HEADS if name != "BertForMultipleChoice"])
def test_a_new_classifier_of_modern_bert_goes_on_with_its_pretrained_head_as_the_reference_does(tmp_path, name):
    scramble(BertForMaskedLM(MODERN)).save(tmp_path)
    options = {} if HEADS[name] == [None] else {"head": HEADS[name][0]}
    ours = ARCHITECTURES[name].from_folder(tmp_path, new_head_seed=0, **options)
    theirs = getattr(transformers, f"Modern{name}").from_pretrained(tmp_path)
    for part in ("dense.weight", "norm.weight"):
        assert torch.equal(ours.transform.get_parameter(part), theirs.head.get_parameter(part))
    assert all(name.startswith(("classifier.", "span.")) for name in ours.new_parameters)


def test_the_tutorials_tensors_train_its_preset_as_its_formulas_say():
    """Bare linear heads at every position and at position 0; 0 is ignored by the one loss and not by the
    other.
    """
    preset = Path(__file__).parents[2] / "configs" / "model" / "tutorial.yaml"
    config = BertConfig(vocab_size=15, **yaml.safe_load(preset.read_text()) | {"hidden_dropout_prob": 0.0})
    model = scramble(BertForPreTraining(config)).eval()
    padding = [0] * 12
    ids = torch.tensor([[3, 4, 14, 5, 2, 5, 10, 2, *padding]])
    labels = torch.tensor([[0, 7, 0, 0, 0, 0, 11, 0, *padding]])
    segments = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, *padding]])
    is_next = torch.tensor([0])
    output = model(
        ids,
        segments,
        attention_mask=ids != 0,
        labels=labels.masked_fill(labels == 0, -100),
        next_sentence_label=is_next,
    )

    hidden = model.bert(ids, segments, attention_mask=ids != 0).last_hidden_state
    tokens = (model.masked_lm.decoder(hidden)).log_softmax(-1)
    pairs = (hidden[:, 0] @ model.next_sentence.classifier.weight.T + model.next_sentence.classifier.bias).log_softmax(
        -1
    )
    expected = torch.nn.functional.nll_loss(tokens[0], labels[0], ignore_index=0)
    expected = expected + torch.nn.functional.nll_loss(pairs, is_next)
    torch.testing.assert_close(output.loss, expected, **TOLERANCE)
    embedded = model.bert(ids, segments, output_hidden_states=True).hidden_states[0]
    by_hand = model.bert.embeddings.word.weight[ids] + model.bert.embeddings.segment.weight[segments]
    torch.testing.assert_close(embedded, by_hand + sinusoidal_table(20, config.hidden_size), **TOLERANCE)
