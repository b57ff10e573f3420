"""Which parameters an optimizer treats how, and each optimizer against its published formula in double precision."""

import optimi
import pytest
import torch

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.optimizers import build_optimizer, muon, parameter_groups
from cloze.launch.engine.optimizers.muon import orthogonalized
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig

# What the presets of configs/model/ differ in, as far as parameters go.
VARIANTS = {
    "bert": {},
    "untied": {"tie_word_embeddings": False},
    "d2l": {"mlm_head": "d2l", "tie_word_embeddings": False, "embedding_norm": False},
    "tutorial": {
        "mlm_head": "linear",
        "position_embedding": "sinusoidal",
        "type_vocab_size": 3,
        "pooler": False,
        "segment_padding_index": 0,
    },
    "crammed": {"position_embedding": "scaled_sinusoidal", "mlm_head": "linear", "linear_bias": False, "pooler": False},
    "rms_norm": {"normalization": "rms_norm", "norm_position": "pre", "gated_feed_forward": True},
    "modern": {
        "position_embedding": "rotary",
        "type_vocab_size": 0,
        "norm_position": "pre",
        "norm_bias": False,
        "first_attention_norm": False,
        "linear_bias": False,
        "gated_feed_forward": True,
        "pooler": False,
    },
    "decoder": {"is_decoder": True, "add_cross_attention": True},
}


def model(**changes) -> BertForPreTraining:
    return BertForPreTraining(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=8,
            **changes,
        )
    )


def assert_each_once(bert, groups) -> None:
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in bert.parameters()}
    assert all(group["params"] for group in groups), "DeepSpeed cannot partition an empty group"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay(variant, decay_embeddings):
    bert = model(**VARIANTS[variant])
    groups = parameter_groups(bert, OptimizerConfig(decay_embeddings=decay_embeddings))
    assert_each_once(bert, groups)
    assert [(group["name"], group["weight_decay"]) for group in groups] == [("decay", 0.01), ("no_decay", 0.0)]
    decaying = {id(p) for p in groups[0]["params"]}
    for name, parameter in bert.named_parameters():
        if name.endswith(("bias", "position_scale")) or "norm" in name:
            assert id(parameter) not in decaying, name
        elif ".embeddings." in name:
            assert (id(parameter) in decaying) == decay_embeddings, name
        else:
            assert id(parameter) in decaying, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_muon_gets_the_matrices_of_the_encoder_layers_and_nothing_else(variant):
    bert = model(**VARIANTS[variant])
    groups = parameter_groups(bert, OptimizerConfig(name="muon"))
    assert_each_once(bert, groups)
    muon = {id(p) for group in groups if group["muon"] for p in group["params"]}
    for name, parameter in bert.named_parameters():
        assert (id(parameter) in muon) == (".layers." in name and parameter.dim() == 2), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_layer_gets_a_share_of_the_rate_of_the_layer_above(variant):
    bert = model(**VARIANTS[variant])
    groups = parameter_groups(bert, OptimizerConfig(layer_decay=0.5))
    assert_each_once(bert, groups)
    shares = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    for name, parameter in bert.named_parameters():
        expected = 1.0  # the heads, the pooler, a last norm
        if ".embeddings." in name:
            expected = 0.5**3
        elif ".layers." in name:
            expected = 0.5 ** (2 - int(name.split(".layers.")[1].split(".")[0]))
        assert shares[id(parameter)] == expected, name


def test_a_frozen_parameter_is_in_no_group():
    bert = model()
    bert.bert.embeddings.position.weight.requires_grad_(False)
    ids = {id(p) for group in parameter_groups(bert, OptimizerConfig()) for p in group["params"]}
    assert id(bert.bert.embeddings.position.weight) not in ids


def test_the_optimizer_gets_the_configured_constants():
    optimizer = build_optimizer(model(), OptimizerConfig(betas=[0.9, 0.98], eps=1e-5, weight_decay=0.3), 0.5)
    assert type(optimizer) is torch.optim.AdamW
    decay, rest = optimizer.param_groups
    assert (decay["lr"], decay["betas"], decay["eps"], decay["fused"]) == (0.5, (0.9, 0.98), 1e-5, True)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)


# ---- against formulas ------------------------------------------------------------------------------------------------

RATE, BETA1, BETA2, EPS, DECAY, STEPS = 0.05, 0.9, 0.98, 1e-6, 0.1, 5


def gradients_of(bert):
    """The same gradients for any copy of the model; some are zero and some large."""
    generator = torch.Generator().manual_seed(7)
    for number in range(STEPS):
        yield [
            torch.randn(p.shape, generator=generator) * 10.0 ** (i % 5 - 3) * (number != 2 or i % 3 > 0)
            for i, p in enumerate(bert.parameters())
        ]


def draw(bert) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for i, p in enumerate(bert.parameters()):
            p.copy_(torch.randn(p.shape, generator=generator) * (i % 4 > 0))  # every fourth tensor is all zeros


def stepped(config: OptimizerConfig) -> list[torch.Tensor]:
    """Weights after STEPS steps of our optimizer."""
    bert = model()
    draw(bert)
    optimizer = build_optimizer(bert, config, RATE)
    for gradients in gradients_of(bert):
        for p, gradient in zip(bert.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach().double() for p in bert.parameters()]


def by_formula(move) -> list[torch.Tensor]:
    """The same with `move(weight, gradient, mean, square, step, decay) -> new (weight, mean, square)` in float64."""
    bert = model()
    draw(bert)
    weights = [p.detach().double() for p in bert.parameters()]
    states = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step, gradients in enumerate(gradients_of(bert), start=1):
        for i, gradient in enumerate(gradients):
            decay = DECAY if weights[i].dim() >= 2 else 0.0
            weights[i], *states[i] = move(weights[i], gradient.double(), *states[i], step, decay)
    return weights


def assert_close(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def config(name: str, **changes) -> OptimizerConfig:
    return OptimizerConfig(name=name, betas=[BETA1, BETA2], eps=EPS, weight_decay=DECAY, **changes)


def moments(gradient, mean, square):
    return BETA1 * mean + (1 - BETA1) * gradient, BETA2 * square + (1 - BETA2) * gradient**2


def test_adamw_without_bias_correction_is_that_of_the_bert_release():
    """google-research/bert optimization.py: update = m / (sqrt(v) + eps) + decay * weight; weight -= rate * update."""

    def move(weight, gradient, mean, square, step, decay):
        mean, square = moments(gradient, mean, square)
        return weight - RATE * (mean / (square.sqrt() + EPS) + decay * weight), mean, square

    assert_close(stepped(config("adamw", bias_correction=False)), by_formula(move))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias_correction": False},
        {"trust_ratio_bounds": [0.01, 0.3]},
        {"adapt_undecayed": False},
    ],
)
def test_lamb_is_that_of_the_paper_and_of_nvidia(changes):
    """arXiv 1904.00962, algorithm 2; a ratio with a zero norm is 1; apex's FusedLAMB spares what does not decay."""
    low, high = changes.get("trust_ratio_bounds", (0.0, float("inf")))

    def move(weight, gradient, mean, square, step, decay):
        mean, square = moments(gradient, mean, square)
        corrected = changes.get("bias_correction", True)
        m = mean / (1 - BETA1**step) if corrected else mean
        v = square / (1 - BETA2**step) if corrected else square
        update = m / (v.sqrt() + EPS) + decay * weight
        ratio = 1.0
        if weight.norm() > 0 and update.norm() > 0 and (decay or changes.get("adapt_undecayed", True)):
            ratio = min(max((weight.norm() / update.norm()).item(), low), high)
        return weight - RATE * ratio * update, mean, square

    assert_close(stepped(config("lamb", **changes)), by_formula(move))


def reference_stepped(build) -> list[torch.Tensor]:
    bert = model()
    draw(bert)
    optimizers = build(bert)
    for gradients in gradients_of(bert):
        for p, gradient in zip(bert.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().double() for p in bert.parameters()]


def split(bert, rule) -> tuple[list, list]:
    return (
        [p for name, p in bert.named_parameters() if rule(name, p)],
        [p for name, p in bert.named_parameters() if not rule(name, p)],
    )


def test_stable_adamw_is_optimis_with_which_modernbert_was_trained():
    def build(bert):
        matrices, rest = split(bert, lambda name, p: p.dim() >= 2)
        common = {"lr": RATE, "betas": (BETA1, BETA2), "eps": EPS, "foreach": False, "triton": False}
        return [
            optimi.StableAdamW(matrices, weight_decay=DECAY, **common),
            optimi.StableAdamW(rest, weight_decay=0.0, **common),
        ]

    assert_close(stepped(config("stable_adamw")), reference_stepped(build))


@pytest.fixture
def bf16_products(monkeypatch):
    """Muon's products in torch's format, also on a processor without instructions for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})


@pytest.mark.usefixtures("bf16_products")
def test_muon_is_torchs_muon_and_torchs_adamw():
    def build(bert):
        matrices, rest = split(bert, lambda name, p: ".layers." in name and p.dim() == 2)
        decaying = [p for p in rest if p.dim() >= 2]
        plain = [p for p in rest if p.dim() < 2]
        adamw = torch.optim.AdamW(
            [{"params": decaying, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}],
            lr=RATE,
            betas=(BETA1, BETA2),
            eps=EPS,
            fused=True,
        )
        return [
            torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
            adamw,
        ]

    for ours, theirs in zip(stepped(config("muon", momentum=0.9)), reference_stepped(build), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("matrices, sizes", [("maps", (16, 32)), ("heads", (8, 32))])
def test_muon_takes_each_map_and_each_head_for_a_matrix(matrices, sizes):
    """As torch's Muon does where they are weights of their own."""
    bert = model(gated_feed_forward=True, num_key_value_heads=1)
    draw(bert)
    optimizer = build_optimizer(bert, config("muon", matrices=matrices, momentum=0.9), RATE)
    apart: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in bert.named_parameters():
        if ".layers." in name and p.dim() == 2:
            size = sizes[0] if ".qkv." in name else sizes[1] if ".up." in name else len(p)
            if ".qkv." in name and matrices == "maps":
                parts = p.detach().clone().split([16, 8, 8])
            else:
                parts = p.detach().clone().split(size)
            apart[name] = [torch.nn.Parameter(part.clone()) for part in parts]
    assert {len(parts) for parts in apart.values()} == ({1, 2, 3} if matrices == "maps" else {1, 2, 4})
    torchs = torch.optim.Muon(
        [part for parts in apart.values() for part in parts],
        lr=RATE,
        weight_decay=DECAY,
        momentum=0.9,
        adjust_lr_fn="match_rms_adamw",
    )
    for gradients in gradients_of(bert):
        for (name, p), gradient in zip(bert.named_parameters(), gradients, strict=True):
            p.grad = gradient.clone()
            if parts := apart.get(name):
                for part, own in zip(parts, gradient.split([len(part) for part in parts]), strict=True):
                    part.grad = own.clone()
        optimizer.step()
        torchs.step()
    weights = dict(bert.named_parameters())
    assert all(torch.equal(weights[name], torch.cat(parts)) for name, parts in apart.items())


@pytest.mark.parametrize("decay", ["cautious", "hyperball"])
def test_decays_of_muons_matrices_are_as_published(monkeypatch, decay):
    """A step in double precision, from the direction that Newton's iteration gives (in fp32, which rounds less)."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    bert = model()
    draw(bert)
    optimizer = build_optimizer(bert, config("muon", matrix_decay=decay, momentum=0.9), RATE)
    before = {name: p.detach().double().clone() for name, p in bert.named_parameters()}
    for p, gradient in zip(bert.parameters(), next(iter(gradients_of(bert))), strict=True):
        p.grad = gradient.clone()
    optimizer.step()
    matrices = {name: p for name, p in bert.named_parameters() if ".layers." in name and p.dim() == 2}
    for name, p in matrices.items():
        old, direction = before[name], orthogonalized(p.grad * (1 - 0.9 * 0.9)).double()
        if decay == "cautious":
            kept = torch.where(old * direction > 0, 1 - RATE * DECAY, 1.0)
            expected = old * kept - RATE * 0.2 * max(p.shape) ** 0.5 * direction
        else:
            moved = old - RATE * old.norm() * direction / direction.norm()
            expected = moved * old.norm() / moved.norm()
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("decay", ["plain", "cautious", "hyperball"])
@pytest.mark.parametrize("matrices", ["weights", "heads"])
@pytest.mark.parametrize("elements", [600, 1 << 22], ids=["some", "all"])
def test_muon_of_several_layers_at_once_is_that_of_each(monkeypatch, elements, matrices, decay):
    """As on a GPU, where small ones share their products: all that are alike, or so many that few elements are."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    settings = config("muon", matrices=matrices, matrix_decay=decay, momentum=0.9)
    alone = stepped(settings)
    monkeypatch.setattr(muon.MuonWithAdamW, "at_once", True)
    monkeypatch.setattr(muon, "_ELEMENTS_TOGETHER", elements)
    sizes = []
    monkeypatch.setattr(muon, "orthogonalized", lambda given: sizes.append(given.numel()) or orthogonalized(given))
    for ours, theirs in zip(stepped(settings), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert max(sizes) == (1536 if elements > 600 else 768)  # of queries, keys and values
    assert 256 not in sizes, "one square of a layer alone"


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_newtons_iteration_comes_near_to_the_orthogonal_matrix(monkeypatch, has_bf16, shape):
    """Of singular values well above the least it magnifies; in fp32 where a CPU has no instructions for bf16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16, "avx2": True})
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    left, _, right = torch.linalg.svd(drawn, full_matrices=False)
    found = orthogonalized(left @ torch.diag(torch.linspace(0.3, 1, min(shape))) @ right)
    assert found.dtype == (torch.bfloat16 if has_bf16 else torch.float32)
    sizes = torch.linalg.svdvals(found.float())
    assert 0.65 < sizes.min() and sizes.max() < 1.25
    assert torch.nn.functional.cosine_similarity(found.float().flatten(), (left @ right).flatten(), 0) > 0.97


def test_embeddings_and_heads_have_a_rate_of_their_own():
    bert = model()
    groups = parameter_groups(bert, OptimizerConfig(name="muon", embedding_rate=0.25, layer_decay=0.5))
    assert_each_once(bert, groups)
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    for name, p in bert.named_parameters():
        depth = 0 if ".embeddings." in name else int(name.split(".layers.")[1][0]) + 1 if ".layers." in name else 3
        assert scales[id(p)] == 0.5 ** (3 - depth) * (0.25 if depth in (0, 3) else 1), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias_correction": False},
        {"name": "lamb"},
        {"name": "muon"},
        {"name": "muon", "matrices": "heads", "matrix_decay": "hyperball"},
        {"name": "stable_adamw"},
        {"layer_decay": 0.8},
    ],
)
def test_a_saved_and_loaded_optimizer_goes_on_bit_for_bit(tmp_path, changes):
    """Through a file, as a checkpoint does, with weights_only."""

    def run(optimizer, bert, gradients):
        for p, gradient in zip(bert.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()

    first, second = model(), model()
    draw(first)
    all_gradients = list(gradients_of(first))
    optimizer = build_optimizer(first, OptimizerConfig(**changes), RATE)
    for gradients in all_gradients[:3]:
        run(optimizer, first, gradients)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "file.pt")
    saved = torch.load(tmp_path / "file.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    loaded = build_optimizer(second, OptimizerConfig(**changes), RATE)
    loaded.load_state_dict(saved["optimizer"])
    for gradients in all_gradients[3:]:
        run(optimizer, first, gradients)
        run(loaded, second, gradients)
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias_correction": False},
        {"name": "lamb"},
        {"name": "muon"},
        {"name": "muon", "matrices": "heads", "matrix_decay": "hyperball"},
        {"name": "lamb", "adapt_undecayed": False},
        {"name": "stable_adamw"},
    ],
)
def test_a_step_that_found_inf_calls_off_leaves_no_trace(changes):
    """Nor does the first one: the steps that follow are those of an optimizer that never saw it."""

    def run(optimizer, bert, gradients, found: float = 0.0):
        optimizer.found_inf = torch.tensor(found)
        for i, (p, gradient) in enumerate(zip(bert.parameters(), gradients, strict=True)):
            p.grad = gradient.clone() if not found else gradient * [float("nan"), float("inf"), 1.0][i % 3]
        optimizer.step()

    left, right = model(), model()
    optimizers = []
    for bert in (left, right):
        draw(bert)
        optimizers.append(build_optimizer(bert, OptimizerConfig(**changes), RATE))
    for number, gradients in enumerate(gradients_of(left)):
        if number in (0, 3):
            run(optimizers[1], right, gradients, found=1.0)
        run(optimizers[0], left, gradients)
        run(optimizers[1], right, gradients)
    for ours, expected in zip(right.parameters(), left.parameters(), strict=True):
        assert torch.equal(ours, expected)
        found, state = optimizers[1].state[ours], optimizers[0].state[expected]
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
