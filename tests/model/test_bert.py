"""BertForPreTraining against transformers.BertForPreTraining: outputs, losses, every gradient; kernels;
layouts.
"""

import dataclasses

import pytest
import torch

from cloze.model import amx
from cloze.model.config import ModelError
from tests.model.model_batches import (
    FLAT,
    INPUTS,
    TINY,
    TOLERANCE,
    assert_equal_gradients,
    batch,
    concatenate,
    gradients,
    pretraining_model,
    reference,
)

LENGTHS = [(3, 48, 17, 9, 30), (48, 48), (3,), (20, 3, 4, 48), (48, 47, 45, 44, 9, 9)]
KERNELS = ["eager", "sdpa"]


def run_reference(theirs, padded):
    output = theirs(**padded, output_hidden_states=True, output_attentions=True)
    output.loss.backward()
    return output


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_concatenated_tokens_match_the_reference(kernel, lengths):
    model = pretraining_model(attention_kernel=kernel)
    padded = batch(lengths=lengths)
    flat = concatenate(padded)
    mask = padded["attention_mask"].bool()
    theirs = reference(model)
    expected = run_reference(theirs, padded)

    output = model(**flat)
    output.loss.backward()

    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    torch.testing.assert_close(output.next_sentence_logits, expected.seq_relationship_logits, **TOLERANCE)
    assert_equal_gradients(model, theirs)

    unlabelled = {name: value for name, value in flat.items() if name not in ("labels", "next_sentence_label")}
    scores = model(**unlabelled).prediction_logits
    expected_scores = expected.prediction_logits[mask][flat["masked_positions"]]
    torch.testing.assert_close(scores, expected_scores, **TOLERANCE)
    hidden = model.bert(**{name: flat[name] for name in ("input_ids", "token_type_ids", "sequence_offsets")})
    torch.testing.assert_close(hidden.last_hidden_state, expected.hidden_states[-1][mask], **TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_lengths_drawn_at_random_match_the_reference(seed):
    """From 3 to the maximum, unsorted; a maximum of its own for each seed, and the batch's ids and labels
    too.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = 24 + 6 * seed
    config = dataclasses.replace(TINY, max_position_embeddings=longest)
    lengths = torch.randint(3, longest + 1, (8,), generator=generator).tolist()
    model, padded = pretraining_model(config), batch(config, (*lengths, longest), seed)
    theirs = reference(model)
    expected = run_reference(theirs, padded)
    output = model(**concatenate(padded))
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    assert_equal_gradients(model, theirs)


@pytest.mark.parametrize(
    "kernel, activation",
    [("eager", "gelu"), ("sdpa", "gelu"), ("eager", "gelu_tanh"), ("eager", "relu"), ("eager", "silu")],
)
def test_padded_tokens_match_the_reference(kernel, activation):
    model = pretraining_model(dataclasses.replace(TINY, hidden_act=activation), attention_kernel=kernel)
    padded = batch()
    theirs = reference(model)
    expected = run_reference(theirs, padded)

    output = model(**padded)
    output.loss.backward()

    torch.testing.assert_close(output.loss, expected.loss, **TOLERANCE)
    assert output.mlm_losses.shape == padded["labels"].shape
    assert (output.mlm_losses[padded["labels"] == -100] == 0).all()
    assert_equal_gradients(model, theirs)


def test_the_two_losses_are_those_of_the_reference_one_by_one():
    model = pretraining_model()
    padded = batch()
    output = model(**concatenate(padded))
    expected = reference(model)(**{name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")})
    mlm = torch.nn.functional.cross_entropy(
        expected.prediction_logits.flatten(0, 1), padded["labels"].flatten(), reduction="none"
    )
    pairs = torch.nn.functional.cross_entropy(
        expected.seq_relationship_logits, padded["next_sentence_label"], reduction="none"
    )
    counted = padded["labels"].flatten() != -100
    torch.testing.assert_close(output.mlm_losses, mlm[counted], **TOLERANCE)
    torch.testing.assert_close(output.next_sentence_losses, pairs, **TOLERANCE)
    hits = expected.prediction_logits.flatten(0, 1).argmax(-1)[counted] == padded["labels"].flatten()[counted]
    assert torch.equal(output.mlm_correct, hits)
    assert torch.equal(
        output.next_sentence_correct, expected.seq_relationship_logits.argmax(-1) == padded["next_sentence_label"]
    )


def test_hidden_states_and_attentions_on_request_match_the_reference():
    model = pretraining_model(attention_kernel="sdpa")  # probabilities come from the eager kernel all the same
    padded = batch()
    mask = padded["attention_mask"].bool()
    expected = run_reference(reference(model), padded)
    output = model(**padded, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == TINY.num_hidden_layers + 1
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    for ours, theirs in zip(output.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    flat = model(**concatenate(padded), output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(flat.hidden_states[1], expected.hidden_states[1][mask], **TOLERANCE)
    rows = mask[:, None, :, None].expand_as(expected.attentions[1])
    torch.testing.assert_close(flat.attentions[1][rows], expected.attentions[1][rows], **TOLERANCE)


def test_masked_positions_may_come_padded():
    model = pretraining_model()
    padded = batch()
    positions = torch.tensor([[1, 2], [40, 5], [0, 16], [3, 3], [29, 1]])
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    everywhere = model(**inputs).prediction_logits
    here = model(**inputs, masked_positions=positions).prediction_logits
    assert here.shape == (5, 2, TINY.vocab_size)
    torch.testing.assert_close(here, everywhere[torch.arange(5)[:, None], positions], **TOLERANCE)
    labels = padded["input_ids"].gather(1, positions)
    labels[0, 1] = -100
    losses = model(**inputs, masked_positions=positions, labels=labels).mlm_losses
    assert losses.shape == (5, 2) and losses[0, 1] == 0


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("hole", [False, True])
def test_attention_masks_of_every_form_agree(hole, kernel):
    model = pretraining_model(attention_kernel=kernel).eval()
    padded = batch()
    mask = padded["attention_mask"].clone()
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids")}
    if hole:
        mask[1, 7:11] = 0
    square = mask[:, None, :].expand(-1, mask.shape[1], -1)
    expected = reference(model)(**inputs, attention_mask=mask).prediction_logits
    forms = [mask, mask.bool(), square] + ([] if hole else [mask.sum(1)])
    for form in forms:
        output = model(**inputs, attention_mask=form).prediction_logits
        torch.testing.assert_close(output[mask.bool()], expected[mask.bool()], **TOLERANCE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_of_who_sees_whom_matches_the_reference(kernel):
    model = pretraining_model(attention_kernel=kernel).eval()
    padded = batch(lengths=(20, 20))
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids")}
    square = torch.rand(2, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.6
    square |= torch.eye(20, dtype=torch.bool)
    additive = torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)[:, None]
    expected = reference(model)(**inputs, attention_mask=additive).prediction_logits
    output = model(**inputs, attention_mask=square).prediction_logits
    torch.testing.assert_close(output, expected, **TOLERANCE)


@pytest.mark.parametrize("checkpointing", ["all", "every_2"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_checkpointing_leaves_gradients_bitwise_equal_with_dropout_on(checkpointing, kernel):
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    flat = concatenate(batch())
    found = []
    for mode in ("none", checkpointing):
        model = pretraining_model(config, attention_kernel=kernel, gradient_checkpointing=mode)
        torch.manual_seed(mode == "none")  # the default generator must not matter
        model(**flat, dropout_seed=5).loss.backward()
        found.append(gradients(model))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


def test_checkpointing_recomputes_the_selected_layers_only():
    for mode, expected in (("none", 3), ("all", 6), ("every_2", 5)):
        model = pretraining_model(gradient_checkpointing=mode)
        calls = []
        for layer in model.bert.encoder.layers:
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        model(**concatenate(batch())).loss.backward()
        assert len(calls) == expected, mode


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_is_a_function_of_its_seed(kernel):
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    model = pretraining_model(config, attention_kernel=kernel)
    flat = concatenate(batch())
    torch.manual_seed(0)
    first = model(**flat, dropout_seed=1).loss
    state = torch.get_rng_state()
    torch.manual_seed(9)
    again, other = model(**flat, dropout_seed=1).loss, model(**flat, dropout_seed=2).loss
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())  # a keyed forward draws nothing from the default generator
    unkeyed = model(**flat).loss
    torch.manual_seed(0)
    assert torch.equal(unkeyed, model(**flat).loss)
    assert torch.equal(model.eval()(**flat, dropout_seed=1).loss, model(**flat).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_masked_tokens_or_pairs_runs_backward(dtype):
    model = pretraining_model().to(dtype)
    flat = concatenate(batch())
    flat["masked_positions"], flat["labels"] = flat["masked_positions"][:0], flat["labels"][:0]
    flat["next_sentence_label"] = torch.full_like(flat["next_sentence_label"], -100)
    output = model(**flat)
    (output.mlm_losses.sum() + output.next_sentence_losses.sum()).backward()
    assert output.num_masked == 0 and output.num_pairs == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


@pytest.mark.parametrize("mode", ["weights", "autocast"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_bf16_stays_near_fp32(mode, kernel):
    flat = concatenate(batch())
    exact = pretraining_model()
    exact(**flat).loss.backward()
    model = pretraining_model(attention_kernel=kernel)
    if mode == "weights":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        output = model(**flat)
    assert output.mlm_losses.dtype == output.next_sentence_losses.dtype == torch.float32
    assert output.next_sentence_logits.dtype == torch.bfloat16
    output.loss.backward()
    # 8 bits of mantissa: single gradients differ by per cents, their direction must not.
    for (name, parameter), expected in zip(model.named_parameters(), exact.parameters(), strict=True):
        one, two = parameter.grad.double().flatten(), expected.grad.double().flatten()
        cosine = torch.nn.functional.cosine_similarity(one, two, dim=0)
        assert cosine > 0.99 or two.norm() < 1e-6, f"{name}: {cosine}"


# The eager kernel's machine code is held by tests/distributed/test_compile.py: here its graphs, forward and backward.
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "backend"), [("eager", "aot_eager"), ("sdpa", "inductor")])
def test_compiled_layers_leave_gradients_as_they_are_for_any_number_of_tokens(kernel, backend):
    config = dataclasses.replace(TINY, hidden_dropout_prob=0.1)
    plain = pretraining_model(config, attention_kernel=kernel)
    compiled = pretraining_model(config, attention_kernel=kernel, gradient_checkpointing="every_2")
    compiled.bert.encoder.compile_layers(backend)
    assert set(plain.state_dict()) == set(compiled.state_dict())
    for lengths in LENGTHS:
        flat = concatenate(batch(lengths=lengths))
        for model in (plain, compiled):
            model.zero_grad()
            model(**flat, dropout_seed=3).loss.backward()
        ours, expected = gradients(compiled), gradients(plain)
        for name in expected:
            torch.testing.assert_close(ours[name], expected[name], **TOLERANCE)


def test_every_kind_of_layer_and_batch_has_its_graph():
    """More of them than dynamo's limit, here a half of its own 8, beyond which it would go on without compiling."""
    from torch._dynamo.testing import CompileCounter  # an import of seconds

    config = dataclasses.replace(
        TINY,
        norm_position="pre",
        first_attention_norm=False,
        local_attention_window=8,
        global_attention_every=2,
        num_hidden_layers=4,
    )
    plain, compiled = (pretraining_model(config, attention_kernel="sdpa") for _ in range(2))
    counter = CompileCounter()
    compiled.bert.encoder.compile_layers(backend=counter)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for number, lengths in enumerate(((48, 48), (3, 48, 17)), start=1):
            flat = concatenate(batch(config, lengths))
            torch.testing.assert_close(compiled(**flat).loss, plain(**flat).loss, **TOLERANCE)
            assert counter.frame_count == 4 * number  # first, local, global and last
        compiled(**concatenate(batch(config, (7, 20, 33, 5))))
    assert counter.frame_count == 8


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("fields", [{}, dict(norm_position="pre"), dict(pooler=False)], ids=["post", "pre", "plain"])
def test_the_last_layer_computes_what_is_read_and_nothing_else_changes(kernel, fields, monkeypatch):
    """Masked tokens and the first of each sequence; losses and gradients are those of the whole layer."""
    monkeypatch.setitem(amx._SIZES_PER_OCTAVE, False, None)
    config = dataclasses.replace(TINY, **fields)
    flat = concatenate(batch())
    found = []
    for whole in (False, True):  # all hidden states are wanted: the last layer computes every token
        model, rows = pretraining_model(config, attention_kernel=kernel), []
        last = model.bert.encoder.layers[-1].feed_forward
        last.register_forward_hook(lambda module, inputs, output, rows=rows: rows.append(len(output[0])))
        output = model(**flat, output_hidden_states=whole)
        output.loss.backward()
        read = len(flat["masked_positions"]) + len(flat["sequence_offsets"]) - 1
        assert rows == [len(flat["input_ids"]) if whole else read]
        found.append((output, {name: each.grad for name, each in model.named_parameters()}))
    torch.testing.assert_close(found[0][0].mlm_losses, found[1][0].mlm_losses, **TOLERANCE)
    torch.testing.assert_close(found[0][0].next_sentence_losses, found[1][0].next_sentence_losses, **TOLERANCE)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], **TOLERANCE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(position_embedding="alibi"),
        dict(is_decoder=True),
        dict(position_embedding="rotary", local_attention_window=8),
    ],
    ids=["all see all", "alibi", "causal", "local"],
)
def test_any_tokens_can_be_read_in_any_order(kernel, fields, monkeypatch):
    """Also one twice, the first of a sequence, none of another; in groups and in one piece; with every bias."""
    config = dataclasses.replace(TINY, **fields)
    flat = concatenate(batch(lengths=(5, 6, 17, 40, 33)))
    inputs = {name: flat[name] for name in ("input_ids", "token_type_ids", "sequence_offsets", "max_sequence_length")}
    inputs["position_ids"] = flat.get("position_ids")
    tokens = torch.tensor([100, 3, 70, 11, 28, 3, 99, 68, 12])  # of sequences 4, 0, 4, 2, 3, 0, 4, 4, 2
    offsets = flat["sequence_offsets"].tolist()
    assert not any(offsets[1] <= token < offsets[2] for token in tokens.tolist())
    for cost in (0, 1 << 18):
        monkeypatch.setattr("cloze.model.attention._GROUP_COST", cost)
        results = []
        for read in (None, tokens):
            model = pretraining_model(config, attention_kernel=kernel).bert
            output = model(**inputs, read_tokens=read)
            hidden = output.last_hidden_state if read is not None else output.last_hidden_state[tokens]
            hidden = torch.cat((hidden, output.first_hidden_state))
            (hidden * torch.arange(hidden.numel()).view_as(hidden).cos()).sum().backward()
            results.append((hidden, {name: each.grad for name, each in model.named_parameters()}))
        torch.testing.assert_close(results[0][0], results[1][0], **TOLERANCE)
        for name, gradient in results[0][1].items():
            if gradient is not None:
                torch.testing.assert_close(results[1][1][name], gradient, **TOLERANCE)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "fields", [{}, dict(position_embedding="rotary", local_attention_window=8)], ids=["global", "local"]
)
def test_causal_attention_for_one_call_is_that_of_a_decoder(kernel, fields, monkeypatch):
    """Which transformers' decoders confirm (test_variants.py); the next call sees all tokens again."""
    padded = batch(lengths=(5, 6, 17, 40, 33))
    flat = concatenate(padded)
    model = pretraining_model(dataclasses.replace(TINY, **fields), attention_kernel=kernel).bert
    decoder = pretraining_model(dataclasses.replace(TINY, is_decoder=True, **fields), attention_kernel=kernel).bert
    decoder.load_state_dict(model.state_dict())
    for cost in (0, 1 << 18):
        monkeypatch.setattr("cloze.model.attention._GROUP_COST", cost)
        for inputs in ({name: padded[name] for name in INPUTS}, {name: flat[name] for name in FLAT if name in flat}):
            plain = model(**inputs).last_hidden_state
            found, expected = model(**inputs, causal=True).last_hidden_state, decoder(**inputs).last_hidden_state
            assert torch.equal(found, expected)
            assert torch.equal(model(**inputs).last_hidden_state, plain) and not torch.equal(plain, found)


def test_reading_some_tokens_of_padded_inputs_is_refused():
    padded = batch()
    inputs = {name: padded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
    with pytest.raises(ModelError, match="read_tokens"):
        pretraining_model().bert(**inputs, read_tokens=torch.tensor([1]))


def test_shifted_predictions_are_those_of_the_tokens_before():
    """In both layouts, at given positions and at all; under causal attention a position predicts the next token."""
    padded = batch()
    flat = concatenate(padded)
    plain = pretraining_model()
    shifted = pretraining_model(dataclasses.replace(TINY, shifted_predictions=True))
    shifted.load_state_dict(plain.state_dict())
    given = [{name: padded[name] for name in INPUTS}, {name: flat[name] for name in FLAT}]
    padded_logits, flat_logits = (plain(**inputs).prediction_logits for inputs in given)
    found_padded, found_flat = (shifted(**inputs).prediction_logits for inputs in given)
    torch.testing.assert_close(found_padded[:, 1:], padded_logits[:, :-1], **TOLERANCE)
    starts = flat["sequence_offsets"][:-1].long()
    later = torch.ones(len(found_flat), dtype=torch.bool).index_fill(0, starts, False).nonzero()[:, 0]
    torch.testing.assert_close(found_flat[later], flat_logits[later - 1], **TOLERANCE)
    chosen = shifted(**given[1], masked_positions=later).prediction_logits
    torch.testing.assert_close(chosen, found_flat[later], **TOLERANCE)
    columns = torch.arange(1, 3).expand(len(padded["input_ids"]), -1)
    chosen = shifted(**given[0], masked_positions=columns).prediction_logits
    torch.testing.assert_close(chosen, padded_logits[:, :2], **TOLERANCE)
    causal = [model(**given[1], masked_positions=later - 1, causal=True) for model in (plain, shifted)]
    assert torch.equal(causal[0].prediction_logits, causal[1].prediction_logits)
    with pytest.raises(ModelError, match="shifted_predictions: true needs is_decoder: false"):
        dataclasses.replace(TINY, shifted_predictions=True, is_decoder=True)
