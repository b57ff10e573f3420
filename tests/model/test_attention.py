"""Attention: windows, dropout, and the kernels that a device has."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from cloze.model import attention
from cloze.model.bert import BertModel
from cloze.model.config import BertConfig, ModelError
from cloze.model.initialization import init_weights
from tests.model.model_batches import TINY, scramble
from tests.model.test_variants import MODERN, TOLERANCE


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


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "sdpa"), ((8, 0), "varlen"), ((9, 0), "varlen")])
def test_gpus_before_ampere_have_no_flash_attention(monkeypatch, capability, expected):
    """T4 and V100, for which fp16 is: their kernel is torch's own choice among its others."""
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tokens = SimpleNamespace(is_cuda=True, dtype=torch.float16, dim=lambda: 2, device=torch.device("cuda:0"))
    assert attention.select_kernel("auto", TINY, tokens, False) == expected
    if expected == "sdpa":
        with pytest.raises(ModelError, match="Ampere or newer"):
            attention.select_kernel("varlen", TINY, tokens, False)
    attention._has_flash.cache_clear()
