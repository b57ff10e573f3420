"""Variants: what each changes, against formulas written out here; layouts and kernels agree for all of them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml

from cloze.model import embeddings
from cloze.model.attention import alibi_slopes
from cloze.model.bert import BertForPreTraining, BertModel
from cloze.model.config import BertConfig, HeadConfig
from cloze.model.embeddings import rotary_tables, rotate_packed, sinusoidal_table
from cloze.model.huggingface import family_of, load_pretrained, to_huggingface
from cloze.model.initialization import init_weights
from cloze.model.tasks import ARCHITECTURES, BertForMaskedLM
from tests.model.model_batches import TINY, batch, concatenate, gradients, pretraining_model, scramble

TOLERANCE = dict(atol=1e-5, rtol=0)
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
    "no positions": dict(position_embedding="none"),
    "pre-LN": dict(norm_position="pre"),
    "RMSNorm": dict(normalization="rms_norm"),
    "ReLU": dict(hidden_act="relu"),
    "GeGLU": dict(gated_feed_forward=True),
    "SwiGLU": dict(gated_feed_forward=True, hidden_act="silu"),
    "GeGLU without gate bias": dict(gated_feed_forward=True, gate_bias=False),
    "no biases": dict(linear_bias=False, norm_bias=False, decoder_bias=False),
    "three segments": dict(type_vocab_size=3, segment_padding_index=0),
    "no segments": dict(type_vocab_size=0),
    "plain embeddings": dict(embedding_norm=False, embedding_dropout=False),
    "no pooler": dict(pooler=False),
    "d2l head": dict(mlm_head="d2l", tie_word_embeddings=False),
    "linear head": dict(mlm_head="linear"),
    "untied": dict(tie_word_embeddings=False),
    "local and global": dict(local_attention_window=8, global_attention_every=2),
    "decoder": dict(is_decoder=True),
    "local decoder": dict(is_decoder=True, local_attention_window=8),
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
    for cls in (BertForMaskedLM, BertModel, *[BertForPreTraining] * (family_of(config) != "modernbert")):
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
        for each, expected in zip(found, ours, strict=True):
            assert torch.equal(each, expected) if expected is not None else each is None


# Mean nothing by themselves.
OWN_TESTS = {"segment_padding_index", "global_attention_every", "embedding_dropout", "gate_bias"}
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


def test_sinusoids_and_slopes_are_those_of_their_papers():
    table = sinusoidal_table(50, 8)
    for position, column in ((0, 0), (0, 1), (7, 2), (49, 5)):
        angle = position / 10000 ** (2 * (column // 2) / 8)
        expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
        assert table[position, column] == pytest.approx(expected, abs=1e-5)
    assert alibi_slopes(8).tolist() == [2**-number for number in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


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


def test_scaled_sinusoids_have_one_learned_factor_that_starts_small_and_is_saved(tmp_path):
    config = dataclasses.replace(TINY, position_embedding="scaled_sinusoidal", embedding_norm=False, type_vocab_size=0)
    model = BertModel(config).eval()
    factor = model.embeddings.position_scale
    with torch.no_grad():
        factor.fill_(3.0)
    init_weights(model, 0)
    assert factor.shape == (1,) and factor.item() == pytest.approx(32**-0.5)
    with torch.no_grad():
        factor.fill_(0.3)
    ids = torch.randint(5, 200, (2, 7))
    embedded = model.embeddings(ids, None, torch.arange(7))
    table = sinusoidal_table(7, 32)
    torch.testing.assert_close(embedded, model.embeddings.word.weight[ids] + 0.3 * table)
    embedded.sum().backward()
    torch.testing.assert_close(factor.grad, 2 * table.sum()[None])
    model.save(tmp_path)
    assert torch.equal(BertModel.from_folder(tmp_path).embeddings.position_scale, factor)


def test_rotation_keeps_lengths_and_makes_products_relative():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(1, 3 * 8, generator=generator).expand(40, -1)
    rotated = rotate_packed(packed, 1, rotary_tables(torch.arange(40), 8, 10_000.0))
    query, key, value = rotated.view(40, 3, 8).unbind(1)
    torch.testing.assert_close(query.norm(dim=1), packed[:, :8].norm(dim=1))
    torch.testing.assert_close(value, packed[:, 16:])
    products = query @ key.t()
    for shift in (1, 5):  # depends on the distance only
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(300,), (3, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_are_a_complex_product(shape, dtype, monkeypatch):
    """In blocks of 16 tokens, so that there are several and the last is smaller."""
    monkeypatch.setitem(embeddings._BLOCK_ELEMENTS, False, 16 * 2 * 2 * 8)
    positions = torch.arange(300).view(shape) % 64
    cosine, sine = rotary_tables(positions, 8, 10_000.0)
    turns = torch.complex(cosine, sine)[..., :4].to(torch.complex128).unsqueeze(-2)
    packed = torch.randn(*shape, 3 * 16).to(dtype).requires_grad_()
    rotated = rotate_packed(packed, 2, (cosine, sine))
    rotated.backward(towards := torch.randn_like(rotated))

    def expected(of: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        parts = of.detach().double().unflatten(-1, (3, 2, 2, 4))
        turned = torch.complex(parts[..., :2, :, 0, :], parts[..., :2, :, 1, :]) * turns
        queries_keys = torch.stack((turned.real, turned.imag), dim=-2)
        return torch.cat((queries_keys, parts[..., 2:, :, :, :]), dim=-4).flatten(-4)

    rounding = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-8}  # rounded once
    assert rotated.dtype == packed.grad.dtype == dtype
    torch.testing.assert_close(rotated.double(), expected(packed, turns), **rounding)
    torch.testing.assert_close(packed.grad.double(), expected(towards, turns.conj()), **rounding)


def attention_reach(config: BertConfig, layers: int) -> torch.Tensor:
    """(S, S) bool: which inputs the first `layers` layers' output at each token depends on, by gradient."""
    config = dataclasses.replace(config, num_hidden_layers=layers, type_vocab_size=0)
    model = scramble(BertModel(config)).eval()
    vectors = torch.randn(1, 40, config.hidden_size, requires_grad=True)
    hidden = model(inputs_embeds=vectors).last_hidden_state
    rows = [torch.autograd.grad(hidden[0, row].sum(), vectors, retain_graph=True)[0][0] for row in range(40)]
    return torch.stack([row.abs().sum(-1) > 0 for row in rows])


def test_local_layers_see_their_window_and_decoders_the_past():
    distance = torch.arange(40)[None] - torch.arange(40)[:, None]
    local = dataclasses.replace(TINY, local_attention_window=8, global_attention_every=2)
    assert attention_reach(local, 1).all()  # layer 0 is global
    # Two layers, of which a model that starts at layer 1 would be local: seen through the probabilities.
    model = scramble(BertModel(local)).eval()
    ids = torch.randint(5, 200, (1, 40))
    attentions = model(ids, output_attentions=True).attentions
    for layer, probabilities in enumerate(attentions):
        seen = probabilities[0, 0] > 0
        assert torch.equal(seen, distance.abs() <= 4 if layer == 1 else torch.ones_like(seen))
    decoder = dataclasses.replace(TINY, is_decoder=True)
    assert torch.equal(attention_reach(decoder, 2), distance <= 0)


def test_embedding_dropout_can_be_turned_off_alone():
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.5, num_hidden_layers=1)
    ids = torch.randint(5, 200, (2, 30))
    for embedding_dropout in (True, False):
        model = scramble(BertModel(dataclasses.replace(config, embedding_dropout=embedding_dropout))).train()
        embeddings = model(ids, output_hidden_states=True, dropout_seed=1).hidden_states[0]
        assert ((embeddings == 0).float().mean() > 0.4) == embedding_dropout


def test_what_attention_gives_has_a_dropout_of_its_own():
    """With a feed-forward network of zeros a layer is x + what is kept of attention, scaled; nothing else is lost."""
    shape = dataclasses.replace(
        MODERN,
        num_hidden_layers=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attention_output_dropout_prob=0.25,
    )
    model = BertModel(shape)
    init_weights(model, 1)
    layer = model.encoder.layers[0]
    layer.feed_forward.down.weight.data.zero_()
    seen = {}
    layer.attention.register_forward_hook(
        lambda module, inputs, output: seen.update(before=inputs[0], change=output[0])
    )
    model.encoder.final_norm.register_forward_pre_hook(lambda module, inputs: seen.update(after=inputs[0]))
    ids = torch.randint(5, shape.vocab_size, (8, 16))
    model.train()(ids, attention_mask=torch.full((8,), 16), dropout_seed=3)
    kept = (seen["after"] - seen["before"]).abs() > seen["change"].abs() / 2
    torch.testing.assert_close(seen["after"], seen["before"] + seen["change"] * kept / 0.75, **TOLERANCE)
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.03)
    model.eval()(ids, attention_mask=torch.full((8,), 16))
    torch.testing.assert_close(seen["after"], seen["before"] + seen["change"])


def test_megatrons_initial_weights_are_those_of_the_reference():
    """ModernBERT's, drawn by transformers from another generator: equal deviations, cut off at the same bounds."""
    shape = dataclasses.replace(
        MODERN,
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        vocab_size=1000,
        tie_word_embeddings=False,
        initialization="megatron",
        initializer_cutoff=2.0,
    )
    ours = BertForMaskedLM(shape)
    init_weights(ours, 5)
    theirs = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            vocab_size=1000,
            hidden_size=128,
            intermediate_size=192,
            num_attention_heads=4,
            num_hidden_layers=5,
            tie_word_embeddings=False,
            initializer_cutoff_factor=2.0,
            pad_token_id=0,
        )
    ).state_dict()
    compared = 0
    for name, tensor in to_huggingface(ours.state_dict(), shape).items():
        if tensor.dim() == 2:
            assert float(tensor.std()) == pytest.approx(float(theirs[name].std()), rel=0.05), name
            assert float(tensor.abs().max()) == pytest.approx(float(theirs[name].abs().max()), rel=0.02), name
            compared += 1
    assert compared == 5 * 4 + 3


def test_the_padding_segment_is_zero_and_stays_so():
    config = dataclasses.replace(TINY, type_vocab_size=3, segment_padding_index=0, embedding_norm=False)
    model = BertForPreTraining(config)
    init_weights(model, 0)
    weight = model.bert.embeddings.segment.weight
    assert (weight[0] == 0).all() and (weight[1:] != 0).all()
    padded = batch(config)
    padded["token_type_ids"] += padded["attention_mask"]
    model(**padded).loss.backward()
    assert (weight.grad[0] == 0).all() and (weight.grad[1] != 0).any()


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
    ours = to_huggingface({key: each.grad for key, each in model.named_parameters()}, MODERN)
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
