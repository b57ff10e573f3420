"""`cloze plan`: what it prints and writes, data sheets by the names of devices, and how near it comes to a run."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

from cloze.launch import cli, commands
from cloze.launch.config import EmaConfig, PretrainConfig, TrainConfig, ZeroConfig
from cloze.launch.pretrain.micro_batch_size import SPARE_SHARE
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.pretrained.loading import load_model
from cloze.launch.system import devices
from cloze.launch.tools import plan
from cloze.launch.tools.planning.config import PlanConfig
from cloze.launch.tools.planning.estimate import Cluster, Estimator, Lengths
from cloze.launch.tools.planning.machines import find_machine
from cloze.model.config import BertConfig
from tests.forked import ForkedRun
from tests.launch.tools import plan_on_cpu
from tests.launching import finish
from tests.synthetic import make_shards

SMALL = BertConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
TWO_LAYERS = replace(SMALL, num_hidden_layers=2)


def test_a_slice_has_its_share_of_the_peak(monkeypatch):
    """Seven slices of a H100 have 16 of its 132 processors each."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 16}))
    assert devices.data_sheet_flops(torch.device("cuda")) == pytest.approx(989e12 * 16 / 132)


def test_a_faster_stage_is_named_with_its_micro_batch():
    stages = {
        0: {"tokens_per_second": 100.0, "micro_batch_size": 8},
        1: {"tokens_per_second": 118.0, "micro_batch_size": 16},
    }
    said = plan._advice(0, {"stages": stages, "fastest_stage": 1})
    assert said == "faster: --zero.stage 1 --train.micro_batch_size 16: 18% more tokens/s than stage 0"
    stages[1]["tokens_per_second"] = 104.0  # no more than the estimate may be wrong by
    assert plan._advice(0, {"stages": stages, "fastest_stage": 1}) is None
    assert plan._advice(1, {"stages": stages, "fastest_stage": 1}) is None
    stages[0] = {"fits": False}
    assert plan._advice(0, {"stages": stages, "fastest_stage": 1}) == "fits: --zero.stage 1, unlike stage 0"


def test_sums_run_beside_the_last_backward_of_stage_0_alone():
    """In steps of one micro-step and of eight the same, as far as backward is long enough; at other stages nothing."""
    model = replace(SMALL, hidden_size=768, intermediate_size=3072, num_attention_heads=12)
    steps = {}
    for size in (8, 64):
        config = PlanConfig(gpus=64, model=model, train=TrainConfig(global_batch_size=64 * 64, sequence_length=512))
        estimator = Estimator(config, Lengths.of_procedure(512, 0.1, 0.15), Cluster(find_machine("h100"), 64, 8, 5e10))
        steps[size] = estimator.step(0, size)
        assert len(estimator.buckets) == 3 and sum(estimator.buckets) == estimator.parameters
    least = estimator.cluster.collective_seconds(2 * 63 / 64 * 4 * estimator.buckets[-1], 1)
    for step in steps.values():
        assert least < step.waiting_seconds < step.communication_seconds
    assert steps[64].waiting_seconds <= steps[8].waiting_seconds
    assert steps[8].communication_seconds == steps[64].communication_seconds
    stage_1 = estimator.step(1, 64)
    assert stage_1.waiting_seconds == stage_1.communication_seconds


def test_what_limits_the_micro_batch_is_named():
    config = PlanConfig(gpus=8, model=TWO_LAYERS, train=TrainConfig(global_batch_size=64, sequence_length=128))
    estimator = Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 8, 8, 1e9))
    assert "each of 8 devices 8 sequences" in plan._limited_by_batch(config, estimator, {"largest_micro_batch_size": 8})
    assert plan._limited_by_batch(config, estimator, {"largest_micro_batch_size": 4}) is None, "by memory"
    least = replace(config.train, memory_limit_gib=estimator.memory(0, 8).total / 2**30 / (1 - SPARE_SHARE) + 1e-6)
    full = replace(estimator, config=replace(config, train=least))
    assert plan._limited_by_batch(config, full, {"largest_micro_batch_size": 8}) is None, "by both"


def test_a_step_waits_for_the_fullest_rank_for_hooks_and_for_inspection():
    """Alone there is none to wait for; and slower products lower the MFU."""
    config = PlanConfig(gpus=8, model=TWO_LAYERS, train=TrainConfig(global_batch_size=64, sequence_length=128))
    cluster = Cluster(find_machine("h100"), 8, 8, 5e10)
    eight = Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), cluster)
    together, alone = eight.step(0, 8), eight.on(1).step(0, 8)
    assert alone.straggling_seconds == 0 < alone.hooks_seconds < together.hooks_seconds
    share = 0.07 * math.sqrt(math.log(8) / math.log(1024))  # eight samples a rank, as where 1,024 ranks were measured
    assert together.straggling_seconds == pytest.approx(share * together.micro.seconds)
    without = replace(eight.on(1), config=replace(config, monitor=replace(config.monitor, inspect_every_steps=0)))
    assert without.step(0, 8).hooks_seconds == 0
    assert 0 < eight.pessimistic().mfu(0, 8) <= eight.mfu(0, 8)
    products = [each.cluster.machine.best_product for each in (eight, eight.pessimistic())]
    assert products == [pytest.approx(0.752), 0.70]


def test_the_command_prints_and_writes_its_figures(tmp_path, capsys):
    data = make_shards(tmp_path / "data")
    path = tmp_path / "plan.json"
    arguments = [
        "plan",
        "--config",
        "tiny",
        "--data",
        str(data),
        "--device",
        "a100-80gb",
        "--gpus",
        "8",
        "--train.micro_batch_size",
        "auto",
        "--price_per_hour",
        "2",
        "--json",
        str(path),
    ]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "limited by the batch, not by memory: it gives each of 8 devices 8 sequences" in said
    figures = json.loads(path.read_text())
    assert figures["fits"] is True and figures["estimate"] is True and figures["micro_batch_size"] == 8
    assert figures["memory_bytes"] == sum(figures["memory_by_kind"].values()) < figures["device_memory_bytes"]
    assert figures["hours"] == pytest.approx(200 * figures["step_seconds"] / 3600)
    assert figures["cost"] == pytest.approx(16 * figures["hours"])
    assert 0 < figures["communication_share"] < 1 and figures["fastest_stage"] in range(4)
    assert 0 < figures["mfu"] < 1 and set(figures["stages"]) == {"0", "1", "2", "3"}
    printed = " ".join(said.split())
    assert "an estimate, nothing was run" in printed and "assumed:" in printed and "64 = 8 micro x 1" in printed
    assert "masked tokens alone" not in printed


def test_numbers_of_gpus_are_compared_for_a_number_of_tokens(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["plan", "--config", "tiny", "--train.sequence_length", "64", "--device", "a10", "--json", str(path)]
    arguments += ["--train.micro_batch_size", "auto", "--tokens", "5e6", "--train.memory_limit_gib"]
    assert cli.main([*arguments, "100", "--gpus", "8", "3", "1", "--price_per_hour", "2"]) == 0
    printed = capsys.readouterr()
    found, said = json.loads(path.read_text()), " ".join(printed.out.split())
    assert "on 1 GPU (number 1 of 3): trace 1, ZeRO stage 0, a micro-batch of 64 x up to 64 tokens" in printed.err
    assert [each["gpus"] for each in found["by_gpus"]] == [1, 8]
    for each in found["by_gpus"]:
        assert each["steps"] == math.ceil(5e6 / (64 * (0.9 * 64 + 0.1 * 32.5)))  # a tenth of them shorter
        assert each["tokens"] == pytest.approx(5e6, rel=1e-3)
        assert each["cost"] == pytest.approx(2 * each["hours"] * each["gpus"])
        assert f"{each['mfu']:.1%}" in said
    assert "64 sequences" not in found["refused"]["3"] and "multiple of the 3 processes" in found["refused"]["3"]
    assert "3 GPUs: train.global_batch_size: found 64" in said and found["batch_too_small_from_gpus"] == 1
    assert "the batch of 64 sequences limits the speed already on one GPU: the memory of a GPU could hold" in said
    config = commands.parse("plan", [*arguments[1:], "100", "--price_per_hour", "2"])
    estimator = plan.make_estimator(config, 8)
    figures = plan._figures(config, estimator, estimator.step(0, estimator.micro_batch_size(0)))
    assert found["by_gpus"][1] == json.loads(json.dumps(figures)), "traces of other numbers change nothing"
    eight = estimator.memory(0, 8).total / 2**30 / (1 - SPARE_SHARE) + 1e-6
    assert cli.main([*arguments, str(eight), "--gpus", "8", "16"]) == 0
    assert json.loads(path.read_text())["batch_too_small_from_gpus"] == 16, "eight can hold their 8, not 16"
    without = capsys.readouterr().out
    assert "cost: given by --price_per_hour" in without and without.count("cost") == 1, "no empty column"
    assert cli.main([*arguments, "1", "--gpus", "3", "5"]) == 2
    assert "multiple of the 3 processes" in capsys.readouterr().err


def test_a_moving_average_takes_four_bytes_a_parameter_divided_as_states_are():
    made = []
    for decay in (None, 0.999):
        config = PretrainConfig(
            data="",
            output="",
            model=TWO_LAYERS,
            ema=EmaConfig(decay),
            train=TrainConfig(global_batch_size=8, micro_batch_size=1),
        )
        made.append(Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 8, 8, 1e9)))
    count = made[0].parameters
    for stage, share in ((0, 1), (2, 8)):
        without, with_it = (each.memory(stage, 1).total for each in made)
        assert with_it - without == pytest.approx(4 * count / share, rel=1e-3)
        assert made[1].checkpoint_bytes(stage) - made[0].checkpoint_bytes(stage) == 4 * count


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Four layers of SMALL's width, with no tokenizer of any shards: a plan without data asks for none."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=8192,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
        )
    ).save_pretrained(folder)
    for path in (make_shards(folder.parent / "shards") / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


def planned(objective: str, stage: int = 0, **options) -> Estimator:
    model = replace(TWO_LAYERS, embedding_size=SMALL.hidden_size, pooler=False)
    config = PretrainConfig(
        "",
        "",
        model=model,
        objective=objective,
        objective_options=options,
        zero=ZeroConfig(stage),
        train=TrainConfig(global_batch_size=64, micro_batch_size=8),
    )
    return Estimator(config, Lengths.of_procedure(128, 0.0, 0.15), Cluster(find_machine("a10"), 1, 1, 1e9))


def test_objectives_are_planned_with_their_own_models(teacher):
    """Products are those that the objective counts, but for outputs of the last layer that no head reads, and, of
    ELECTRA, the scores that tokens are drawn from; a generator's weights are trained, a teacher's lie there."""

    def encoder(layers: int, width: int) -> float:
        return 6.0 * layers * 12 * width**2 + 12.0 * layers * width * 128

    masked, scores = planned("masked"), 0.15 * 6.0 * 256 * 8192
    for objective, options, more in (  # FLOPs a token
        ("span_boundary", {}, scores + 0.15 * 6.0 * 4 * 256**2),
        (
            "replaced_tokens",
            {"generator_size": 0.5},
            encoder(2, 128) + 6.0 * 256 * (128 + 257) - 0.15 * 6.0 * 256 * 128,
        ),
        ("distillation", {"teacher": teacher}, (encoder(4, 256) + scores + 0.15 * 6.0 * 256**2) / 3),
    ):
        found = planned(objective, **options)
        step, plain = (each.step(0, 8) for each in (found, masked))
        assert step.flops - plain.flops == pytest.approx(more * step.tokens, rel=1e-3), objective
        counted = sum(each.flops for each in found.traced(0, found.lengths.typical(8)).kernels)
        assert counted == pytest.approx(step.flops / 8, rel=0.15), objective
        assert step.micro.device_seconds > plain.micro.device_seconds, objective
        assert found.memory(0, 8).activations > masked.memory(0, 8).activations, objective
        trained = make_objective(found.config).build_model()
        assert found.parameters == sum(each.numel() for each in trained.parameters()), objective
    frozen, one = load_model(teacher).model, planned("distillation", teacher=teacher)
    count = sum(each.numel() for each in frozen.parameters())
    for stage, width in ((0, 4), (1, 2)):  # whole at any stage, in the dtype of the student's weights
        assert one.memory(stage, 8).weights - masked.memory(stage, 8).weights == width * count, stage
    halved = one.traced(1, one.lengths.largest(8))
    assert not any(each.name == "_to_copy" and each.bytes > 1e7 for each in halved.kernels), "no weights are cast"


def test_the_command_plans_an_objective(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = [
        "plan",
        "--config",
        "electra-small",
        "--model.num_hidden_layers",
        "1",
        "--train.global_batch_size",
        "32",
        "--device",
        "a10",
        "--json",
        str(path),
    ]
    assert cli.main([*arguments, "--train.micro_batch_size", "32"]) == 0
    shared = 128 * 30522  # by discriminator and generator, which has a bias for each token
    assert shared + 30522 < json.loads(path.read_text())["parameters"] < 2 * shared
    assert "masked tokens alone" not in capsys.readouterr().out
    assert cli.main([*arguments, "--model.pooler", "true"]) == 2
    assert "with objective replaced_tokens, expected a width that both models share" in capsys.readouterr().err


def test_next_tokens_take_the_memory_of_all_predictions_and_a_part_of_their_time(tmp_path):
    found = []
    arguments = [
        "plan",
        "--config",
        "bert-base-phase1",
        "--model.num_hidden_layers",
        "1",
        "--device",
        "a10",
        "--short_share",
        "0",
        "--train.max_steps",
        "100",
        "--schedule.warmup_steps",
        "null",
        "--train.global_batch_size",
        "32",
        "--train.micro_batch_size",
        "32",
        "--json",
    ]
    for name, options in (
        ("masked", []),
        ("half", ["--masking.next_tokens_until", str(100 * 32 * 128 // 2)]),
        ("all", ["--masked_share", "1"]),
    ):
        assert cli.main([*arguments, str(tmp_path / name), *options]) == 0
        found.append(json.loads((tmp_path / name).read_text()))
    masked, half, all_predicted = found
    assert masked["memory_bytes"] < half["memory_bytes"] == all_predicted["memory_bytes"]
    assert half["hours"] == pytest.approx((masked["hours"] + all_predicted["hours"]) / 2, rel=0.03)


def test_a_sequence_may_be_one_token_long(tmp_path):
    figures = tmp_path / "plan.json"
    assert (
        cli.main(
            [
                "plan",
                "--config",
                "tiny",
                "--device",
                "h100",
                "--train.sequence_length",
                "1",
                "--short_share",
                "1",
                "--train.micro_batch_size",
                "auto",
                "--json",
                str(figures),
            ]
        )
        == 0
    )
    found = json.loads(figures.read_text())
    assert found["fits"] and all(map(math.isfinite, (found["step_seconds"], found["hours"], found["mfu"])))


def test_the_largest_micro_batch_is_the_last_that_fits():
    train = TrainConfig(global_batch_size=4096, micro_batch_size="auto", memory_limit_gib=6.0)
    config = PretrainConfig("", "", model=BertConfig(vocab_size=30522, num_hidden_layers=4), train=train)
    estimator = Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 1, 1, 1e9))
    size = estimator.largest_micro_batch(0)
    assert size in (128, 256, 512) and estimator.fits(estimator.memory(0, size))
    assert not estimator.fits(estimator.memory(0, 2 * size))


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor has no products of bf16: a step takes minutes",
)
@pytest.mark.parametrize(
    ("shape", "count", "longest", "dropout", "objective"),
    [
        ("small", 32, 128, 0.0, "masked"),
        pytest.param("small", 64, 128, 0.0, "replaced_tokens", marks=pytest.mark.slow),
    ],
)
def test_the_estimate_of_a_step_on_this_cpu_comes_true(shape, count, longest, dropout, objective):
    """Within a quarter, in time and in memory, of what is measured in the same process."""
    command = [shape, str(count), str(longest), str(dropout), objective]
    found = json.loads(finish(ForkedRun(command, main=plan_on_cpu.main)).splitlines()[-1])
    assert found["estimated_seconds"] == pytest.approx(found["seconds"], rel=0.25)
    assert found["estimated_bytes"] == pytest.approx(found["bytes"], rel=0.25)
