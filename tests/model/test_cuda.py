"""What only a CUDA device can show: the kernels there, no waiting for the device, compiled layers in 16 bits, runs.

What a device in name only can show is in tests/gpu. `python benchmarks/gpu.py` runs these tests and the benchmark.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cloze.launch.system.devices import choose_kernels, to_device
from cloze.launch.training.loop import dropout_seed
from cloze.model.flash import flash_attention
from cloze.model.heads import VocabularyProjection
from cloze.model.weight_copies import WeightCopies
from tests.launching import (
    CLOZE,
    NO_DROPOUT,
    assert_same_weights,
    curve,
    finish,
    kill_when,
    pretrain_command,
    saved,
    start,
    step_of,
    weights,
)
from tests.model.model_batches import TINY, batch, concatenate, pretraining_model
from tests.synthetic import make_shards

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = dataclasses.replace(TINY, hidden_size=128, intermediate_size=256)  # flash attention wants heads of 8, 16, 32 ...
VARIANTS = {
    "bert": {},
    "decoder": dict(is_decoder=True),
    "local and rotary": dict(position_embedding="rotary", local_attention_window=8, norm_position="pre"),
}


def on_device(flat: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in flat.items()}


def gradient_of(model: torch.nn.Module, flat: dict, **arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and all gradients in one fp32 vector on the host."""
    model.zero_grad()
    loss = model(**flat, **arguments).loss
    loss.backward()
    return loss.float().cpu(), torch.cat([each.grad.float().flatten() for each in model.parameters()]).cpu()


@pytest.mark.parametrize("kernel", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_kernels_agree_with_fp32_on_the_host(kernel, variant):
    config = dataclasses.replace(WIDE, **VARIANTS[variant])
    flat = concatenate(batch())
    loss, gradient = gradient_of(pretraining_model(config), flat)
    model = pretraining_model(config, attention_kernel=kernel).to("cuda", torch.bfloat16)
    ours, our_gradient = gradient_of(model, on_device(flat))
    assert abs(ours - loss) < 0.03 * loss
    assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_of_the_loss_is_not_rounded_to_16_bits(dtype):
    """What all elements share shows in norms: either scale, rounded to its dtype, would be 2.6 tolerances off."""
    projection = VocabularyProjection(WIDE).to("cuda", dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        projection.weight.normal_(generator=generator).mul_(0.1)
    hidden = torch.randn(500, WIDE.hidden_size, device="cuda", generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, WIDE.vocab_size, (500,), device="cuda", generator=generator)
    parts = hidden, projection.weight, projection.bias
    norms = []
    for scale in (1.0, 3 + (2**-7 if dtype == torch.bfloat16 else 2**-10)):  # halfway between two numbers of the dtype
        losses, _ = projection(hidden, labels)
        gradients = torch.autograd.grad(losses.sum() * scale, parts)
        norms.append(torch.stack([each.double().norm() for each in gradients]))
    torch.testing.assert_close(norms[1], norms[0] * scale, rtol=1e-3 if dtype == torch.bfloat16 else 1.25e-4, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_never_waits_for_the_device(dropout):
    config = dataclasses.replace(WIDE, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    model = pretraining_model(config).to("cuda", torch.bfloat16)
    flat = on_device(concatenate(batch()))
    gradient_of(model, flat)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = model(**flat, dropout_seed=1)
        (output.mlm_losses.sum() + output.next_sentence_losses.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_and_recomputed_layers_leave_gradients_near(dropout):
    config = dataclasses.replace(WIDE, hidden_dropout_prob=dropout)
    plain = pretraining_model(config).to("cuda", torch.bfloat16)
    compiled = pretraining_model(config, gradient_checkpointing="every_2").to("cuda", torch.bfloat16)
    compiled.bert.encoder.compile_layers()
    for lengths in ((3, 48, 17), (20, 20), (48, 9, 9, 30)):
        flat = on_device(concatenate(batch(lengths=lengths)))
        loss, gradient = gradient_of(plain, flat, dropout_seed=2)
        ours, our_gradient = gradient_of(compiled, flat, dropout_seed=2)
        assert abs(ours - loss) < 0.02 * loss
        assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.99


def test_weight_copies_change_nothing_and_are_as_new_as_the_weights():
    flat = on_device(concatenate(batch()))
    plain, ours = pretraining_model(WIDE).cuda(), pretraining_model(WIDE).cuda()
    copies = WeightCopies(ours, torch.bfloat16)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            expected = gradient_of(plain, flat)
            with copies:
                found = gradient_of(ours, flat)
        assert torch.equal(found[0], expected[0])
        assert torch.nn.functional.cosine_similarity(found[1], expected[1], dim=0) > 0.9999  # flash adds in any order
        with torch.no_grad():
            for left, right in zip(plain.parameters(), ours.parameters(), strict=True):
                left.mul_(0.9)
                right.mul_(0.9)


# ---- flash attention's dropout ---------------------------------------------------------------------------------------


def dropped(seed: int | None, probability: float = 0.25) -> torch.Tensor:
    """Attention of 64 sequences to values of 1: where nothing is dropped all of it is 1."""
    generator = torch.Generator("cuda").manual_seed(3)
    query, key = torch.randn(2, 64 * 100, 4, 32, device="cuda", generator=generator).bfloat16()
    offsets = torch.arange(0, 6401, 100, dtype=torch.int32, device="cuda")
    return flash_attention(query, key, torch.ones_like(query), offsets, 100, (-1, -1), probability, seed)


def test_flash_attention_drops_by_its_seed_and_leaves_the_generator_where_it_was():
    before = torch.cuda.get_rng_state()
    first, again, other = dropped(dropout_seed(1, 2, 3)), dropped(dropout_seed(1, 2, 3)), dropped(dropout_seed(1, 2, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert abs(first.float().mean() - 1) < 0.01 and first.float().std() > 0.01
    assert (dropped(None).float() - 1).abs().max() < 0.01


@pytest.mark.parametrize("checkpointing", ["none", "all"])
def test_dropout_is_the_same_when_recomputed_and_when_compiled(checkpointing):
    config = dataclasses.replace(WIDE, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    flat = on_device(concatenate(batch()))
    plain = pretraining_model(config).to("cuda", torch.bfloat16).train()
    other = pretraining_model(config, gradient_checkpointing=checkpointing).to("cuda", torch.bfloat16).train()
    if checkpointing == "none":
        other.bert.encoder.compile_layers()
    loss, gradient = gradient_of(plain, flat, dropout_seed=dropout_seed(1))
    ours, our_gradient = gradient_of(other, flat, dropout_seed=dropout_seed(1))
    assert abs(ours - loss) < 0.02 * loss
    assert torch.nn.functional.cosine_similarity(our_gradient, gradient, dim=0) > 0.99


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, "_flash_attention_forward"), ({"position_embedding": "alibi"}, "_scaled_dot_product_efficient_attention")],
)
def test_the_kernel_is_the_same_with_every_version_of_cudnn(fields, expected):
    choose_kernels(torch.device("cuda", 0), tf32=False, deterministic=False)
    config = dataclasses.replace(WIDE, attention_probs_dropout_prob=0.1, **fields)
    model = pretraining_model(config).to("cuda", torch.bfloat16).train()
    with Operators() as operators:
        model(**on_device(concatenate(batch())), dropout_seed=1)
    assert expected in operators.names and not any("cudnn" in name for name in operators.names), operators.names


def test_batches_that_are_copied_while_the_gpu_computes_arrive_whole():
    """Three hundred copies on their own stream, whose memory is used again and again while the device is behind."""
    device, busy = torch.device("cuda", 0), torch.randn(2048, 2048, device="cuda")
    sums, expected = [], []
    for number in range(300):
        values = torch.full((1 + 997 * number % 5000,), number)
        moved = to_device({"values": values, "half": values[::2].int(), "longest": 3}, device)
        busy = (busy @ busy).clamp(-1, 1)
        sums.append(moved["values"].sum() + moved["half"].sum())
        expected.append(number * (len(values) + len(values[::2])))
        del moved
    assert torch.stack(sums).tolist() == expected


# ---- whole runs ------------------------------------------------------------------------------------------------------

RUN = (
    "--train.precision",
    "bf16",
    "--train.max_steps",
    "12",
    "--train.log_every_steps",
    "1",
    "--checkpoint.every_steps",
    "4",
    "--schedule.warmup_steps",
    "0",
)
STRICT = "-m", "tests.strict_gpu"
# Lines of metrics and checkpoints read the device, and wait for it.
RARE = "--train.log_every_steps", "5", "--checkpoint.every_steps", "0"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("cuda"), mask_sets=0)


def run(data, output, *overrides: str, program: tuple[str, ...] = CLOZE, processes: int = 1) -> str:
    command = pretrain_command(data, output, *RUN, *overrides, program=program, processes=processes)
    return finish(start(command, DS_ACCELERATOR="cuda"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--optimizer.bias_correction", "false"),
        ("--optimizer.name", "lamb"),
        ("--optimizer.name", "muon"),
        ("--optimizer.name", "stable_adamw", "--train.loss_reduction", "samples"),
    ],
    ids=" ".join,
)
def test_no_host_waits_in_a_whole_step_nor_is_memory_asked_for_twice(data, tmp_path, overrides):
    printed = run(data, tmp_path / "run", "--train.max_steps", "50", *RARE, *overrides, program=STRICT)
    assert "allocator retries: 0" in printed
    losses = [line["train/loss"] for line in curve(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_step_of_nan_is_skipped_on_the_device(data, tmp_path, optimizer):
    run(data, tmp_path / "run", *RARE, "--optimizer.name", optimizer, program=(*STRICT, "poisoned"))
    assert curve(tmp_path / "run")[-1]["train/skipped_steps"] == 2
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


def test_a_killed_run_goes_on_bit_for_bit_when_it_is_deterministic(data, tmp_path):
    overrides = "--train.deterministic", "true", "--train.max_steps", "60"
    run(data, tmp_path / "whole", *overrides)
    killed = tmp_path / "killed"
    command = pretrain_command(data, killed, *RUN, *overrides)
    kill_when(start(command, DS_ACCELERATOR="cuda"), lambda: step_of(killed) >= 6 and saved(killed))
    assert "resumed from step" in finish(start(command, DS_ACCELERATOR="cuda"))
    assert_same_weights(weights(killed), weights(tmp_path / "whole"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stage", [0, 1])
def test_two_ranks_on_nccl_train_as_one(data, tmp_path, stage):
    overrides = (
        "--zero.stage",
        str(stage),
        *NO_DROPOUT,
    )
    run(data, tmp_path / "one", *overrides)
    run(data, tmp_path / "two", *overrides, processes=2)
    one, two = (
        [line["train/loss"] for line in curve(tmp_path / name) if "train/loss" in line] for name in ("one", "two")
    )
    assert one == pytest.approx(two, rel=0.02)
