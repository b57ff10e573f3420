"""What a training step asks of a GPU: when the host waits for it, what the ranks send each other, how much is launched.

The real engine and the real Trainer run on a GPU that computes nothing (fake_cuda.py), as rank 0 of 64.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cloze.launch import commands
from cloze.launch.tools.plan import make_estimator
from tests.gpu.cases import MICRO_STEPS, Case

OPTIMIZERS = {
    "adamw": {},
    "adamw uncorrected": {"bias_correction": False},
    "lamb": {"optimizer": "lamb"},
    "muon": {"optimizer": "muon"},
    "stable_adamw": {"optimizer": "stable_adamw"},
}
# The reduction of the loss is a part of forward and the optimizer one of the update: each meets every precision, and
# not each the other. A case takes 2 to 3 s of CPU, at stage 3 ten.
PRECISIONS = ("bf16", "fp32", "autocast")
STAGE_0 = [
    *(Case(precision=precision, **optimizer) for optimizer in OPTIMIZERS.values() for precision in PRECISIONS),
    *(Case(precision=precision, loss_reduction="samples") for precision in PRECISIONS),
    Case(loss_reduction="samples", optimizer="muon"),
]
# At stage 3 DeepSpeed cuts each gradient for each rank: less of 8 than of 64, and as often.
PARTITIONED_WEIGHTS = Case(3, world_size=8)
PARTITIONED = [
    *(
        replace(case, precision=precision)
        for case in (Case(1), Case(2), PARTITIONED_WEIGHTS)
        for precision in (*PRECISIONS, "fp16")
    ),
    Case(2, bias_correction=False),
]
ALL_RANKS = Case(3)  # slow: as PARTITIONED_WEIGHTS, with as many ranks as the other stages

# Where DeepSpeed 0.19.8 has the host wait, and how often a step: stages 1 to 3 measure the norm on the host. A version
# that waits less, or elsewhere, is welcome to change this table.
UTILS, ZERO = "deepspeed/runtime/utils.py", "deepspeed/runtime/zero"
BF16_OPTIMIZER = {
    f"copy from cpu to cuda at {UTILS}:mask_nan_or_inf_with_val_inplace": 1,
    f"item at {UTILS}:is_invalid_grad_norm": 1,
    f"item at {UTILS}:clip_tensors_by_global_norm": 1,
}
STAGES_1_AND_2 = {
    f"copy from cpu to cuda at {UTILS}:mask_nan_or_inf_with_val_inplace": 2,  # one a parameter group
    f"item at {UTILS}:is_invalid_grad_norm": 3,
}
STAGE_3 = {
    f"stream.synchronize at {ZERO}/stage3.py:independent_gradient_partition_epilogue": MICRO_STEPS,
    f"copy from cpu to cuda at {ZERO}/stage3.py:get_grad_norm_direct": 2,
    f"item at {UTILS}:is_invalid_grad_norm": 1,
    f"cuda.synchronize at {ZERO}/partition_parameters.py:_allgather_params_coalesced": 1,
}
OVERFLOW_1_AND_2 = {f"item at {ZERO}/stage_1_and_2.py:has_overflow": 1}
OVERFLOW_3 = {f"item at {ZERO}/stage3.py:has_overflow": 1}


def deepspeeds_waits(case: Case) -> dict[str, int]:
    """What DeepSpeed waits for in one step of `case`, by place."""
    checks = case.precision == "fp16" or (case.stage == 2 and case.precision == "bf16")
    if case.stage == 3:
        return STAGE_3 | (OVERFLOW_3 if checks else {})
    if case.stage == 1 and case.precision == "bf16":
        return BF16_OPTIMIZER
    return STAGES_1_AND_2 | (OVERFLOW_1_AND_2 if checks else {})


def name(case: Case) -> str:
    changed = {field: value for field, value in vars(case).items() if value != getattr(Case(), field)}
    return " ".join(f"{field}={value}" for field, value in changed.items()) or "plain"


def marked(cases: list[Case], kept) -> list:
    """Parameters of a test; slow but for the cases that `kept` keeps."""
    return [pytest.param(case, id=name(case), marks=[] if kept(case) else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", marked(STAGE_0, lambda case: case.precision == "bf16"))
def test_no_host_waits_for_the_device_at_stage_0(step, case):
    assert step(case).waits == {}


def test_no_host_waits_for_the_losses_of_sources(step):
    """And they come with the micro-batch, in its one copy."""
    plain, mixed = step(Case()), step(Case(mixed=True))
    assert mixed.waits == {} and mixed.copies == plain.copies


def test_no_host_waits_for_what_a_generator_draws_and_for_the_average(step):
    found = step(Case(objective="replaced_tokens", ema_decay=0.999))
    assert found.waits == {} and found.misplaced == {}
    partitioned = Case(1, ema_decay=0.999)
    assert step(partitioned).waits == deepspeeds_waits(partitioned)
    # Three operators take a step into the average, however many tensors there are, beside its weight.
    more = sum(step(Case(ema_decay=0.999)).launches.values()) - sum(step(Case()).launches.values())
    assert 0 < more < 12


@pytest.mark.parametrize(
    "case",
    marked(
        [*PARTITIONED, ALL_RANKS],
        lambda case: (
            case.bias_correction
            and case != ALL_RANKS
            and (case.precision == "bf16" or (case.stage == 1 and case.precision != "autocast"))
        ),
    ),
)
def test_only_deepspeed_waits_at_stages_1_to_3_and_only_where_it_is_known_to(step, case):
    assert step(case).waits == deepspeeds_waits(case)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_only_deepspeed_waits_with_the_optimizer_on_the_host(step, stage):
    """Which waits for each of its copies: docs/performance.md advises against it."""
    waits = step(Case(stage, offload=True)).waits
    assert waits and all(" at deepspeed/" in wait for wait in waits), waits


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        replace(Case(), attention_dropout=0.1),
        replace(Case(), position_embedding="alibi"),
        replace(Case(), gradient_checkpointing="all"),
        replace(Case(), hidden_dropout=0.0),
    ],
    ids=name,
)
def test_neither_dropout_nor_positions_nor_recomputation_wait(step, case):
    assert step(case).waits == {}


def test_events_that_the_host_waits_for_stand_before_this_steps_work(step):
    """The host hears of wishes to stop and of the step before: nothing of this step's passes is queued before that."""
    for case in (Case(), Case(1)):
        assert step(case).events == [2, 0]  # the counts' copy and their sum; an event of the step before


@pytest.mark.parametrize(
    "case",
    marked(
        [*STAGE_0, *PARTITIONED, ALL_RANKS],
        lambda case: case in (Case(), Case(1), Case(2), PARTITIONED_WEIGHTS, Case(optimizer="muon")),
    ),
)
def test_no_operator_mixes_host_and_device(step, case):
    assert step(case).misplaced == {}


def test_a_micro_batch_goes_to_the_device_in_one_copy(step):
    """And its keys of dropout in another; a step's numbers in two, to the objective and to the meter; two come back, of
    the ranks and of the step."""
    assert step(Case()).copies == {"cpu to cuda": 2 * MICRO_STEPS + 2, "cuda to cpu": 2}


def test_muon_asks_for_no_more_products_of_a_deeper_model(step):
    """Small matrices of one shape share them: 5 iterations of 2 for each of four shapes."""
    few, many = (step(Case(optimizer="muon", layers=layers)).launches["baddbmm"] for layers in (2, 3))
    assert few == many == 40


# What torch refuses under use_deterministic_algorithms, as its documentation says, as far as a step could want it.
REFUSED = {"bincount", "cumsum", "histc", "median", "nll_loss2d_forward", "put_", "scatter_reduce"}


@pytest.mark.parametrize(
    "case",
    [Case(), Case(loss_reduction="samples"), Case(optimizer="muon"), Case(position_embedding="alibi"), Case(1)],
    ids=name,
)
def test_no_operator_of_a_step_is_refused_by_train_deterministic(step, case):
    assert not REFUSED & step(case).launches.keys()


# ---- what the ranks send each other ----------------------------------------------------------------------------------

# Masked tokens, pairs; tokens, stops, saves, saves to leave out, written, seconds.
COUNTS = ["allreduce", "float64", 8 * 8]
FP32, BF16 = 4, 2


def total(report, operator: str, dtype: str) -> int:
    """Bytes that all collectives of a kind move; the norms' and flags' few are left out."""
    return sum(size for kind, found, size in report.collectives if (kind, found) == (operator, dtype) and size > 64)


def elements(report) -> int:
    """Elements of a small model's gradients, as stage 0 sends them in one piece."""
    return report.collectives[1][2] // FP32


def test_stage_0_sends_the_counts_and_a_small_models_gradients_in_one_bucket_in_fp32(step):
    report = step(Case())
    assert [each[:2] for each in report.collectives] == [COUNTS[:2], ["allreduce", "float32"]]
    assert report.collectives[0] == COUNTS


LAYERS = 7  # of BERT-base's 12: four buckets
BASE = Case(preset="base", layers=LAYERS, world_size=1024)
LAYER = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768  # weights of BERT-base


def test_stage_0_sends_gradients_of_a_large_model_while_backward_runs(step):
    """BERT-base, but shallower, among 1,024: every gradient once, from the heads to the embedding of words, which is
    finished last."""
    report = step(BASE)
    assert report.waits == {} and report.events == [2, 0] and report.misplaced == {}
    assert report.collectives[0] == COUNTS
    assert {(kind, dtype) for kind, dtype, _ in report.collectives[1:]} == {("allreduce", "float32")}
    sizes = [size for *_, size in report.collectives[1:]]
    words = FP32 * 30528 * 768
    assert sizes == [61_571_336, 75_598_848, 67_734_528, words]
    heads = FP32 * (2 * (768 * 768 + 768) + 2 * 768 + 30528 + 2 * 768 + 2)  # pooler; dense, norm, bias; pairs
    assert sum(sizes) == words + FP32 * (LAYERS * LAYER + (512 + 2 + 2) * 768) + heads
    assert all(64 << 20 <= size for size in sizes[1:])
    planned = make_estimator(
        commands.parse(
            "plan",
            [
                "--config",
                "bert-base-phase1",
                "--device",
                "h100",
                "--gpus",
                "1024",
                "--train.global_batch_size",
                "1024",
                "--model.num_hidden_layers",
                str(LAYERS),
            ],
        )
    )
    assert sizes == [FP32 * count for count in planned.buckets]
    # Some 40 kernels of each layer's backward stand between a bucket and the next; behind the last one come the means,
    # clipping and the update.
    gaps = [second - first for first, second in pairwise(report.queued[1:])]
    assert all(gap > 80 for gap in gaps[:-1]) and gaps[-1] < 10
    assert sum(report.launches.values()) - report.queued[-1] < 50


def test_stage_1_sends_gradients_once_in_fp32_and_weights_in_bf16(step):
    size, report = elements(step(Case())), step(Case(1))
    assert report.collectives[0] == COUNTS
    assert FP32 * size <= total(report, "allreduce", "float32") < 1.001 * FP32 * size  # padded to the ranks
    assert total(report, "allgather_base", "bfloat16") == pytest.approx(BF16 * size, rel=1e-3)
    assert len(report.collectives) == 4


def test_stage_2_sends_gradients_in_each_micro_step(step):
    """Why docs/training.md advises against it with accumulation."""
    size, report = elements(step(Case())), step(Case(2))
    assert total(report, "allreduce", "float32") == MICRO_STEPS * FP32 * size
    assert total(report, "allgather_base", "bfloat16") == pytest.approx(BF16 * size, rel=1e-3)


def test_stage_3_gathers_weights_in_bf16_and_scatters_gradients_in_fp32_in_each_micro_step(step):
    size, report = elements(step(Case())), step(PARTITIONED_WEIGHTS)
    assert total(report, "reduce_scatter_base", "float32") == pytest.approx(MICRO_STEPS * FP32 * size, rel=1e-3)
    gathered = total(report, "allgather_base", "bfloat16") / (BF16 * size)
    assert MICRO_STEPS * 0.4 < gathered < MICRO_STEPS * 2 + 1  # small ones stay; at most once forward, once backward


# ---- how much is launched --------------------------------------------------------------------------------------------


def launches(report) -> int:
    return sum(report.launches.values())


def launches_a_layer(step, case: Case) -> float:
    """Kernels of forward and backward of one encoder layer in one micro-step, its share of the update included."""
    few, many = step(case), step(replace(case, layers=case.layers + 1))
    return (launches(many) - launches(few)) / MICRO_STEPS


def test_attention_dropout_stays_in_flash_attention_and_pads_nothing(step):
    with_it, without = step(Case(attention_dropout=0.1)).launches, step(Case()).launches
    assert with_it == without and with_it["_flash_attention_forward"] == 2 * MICRO_STEPS


# Kernels a layer and micro-step, and a step of two layers, not compiled: a change may only lower them. (Masks from a
# generator took 7 fewer a layer, which compiled code fuses; 5 are products by parts, for a pass over all tokens:
# docs/performance.md.)
BUDGET = {
    Case(): (58, 614),
    Case(1): (87, 803),  # bf16 weights, but DeepSpeed adds up and copies back each gradient alone
}


@pytest.mark.parametrize("case", list(BUDGET), ids=name)
def test_launches_stay_within_their_budget(step, case):
    a_layer, a_step = BUDGET[case]
    found = launches_a_layer(step, case), launches(step(case))
    assert 0.9 * a_layer <= found[0] <= a_layer and 0.9 * a_step <= found[1] <= a_step, (found, step(case).launches)
