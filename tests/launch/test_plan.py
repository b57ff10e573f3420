"""`cloze plan`: what it prints and writes, data sheets by the names of devices, and how near it comes to a run."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cloze.launch import cli
from cloze.launch.config import EmaConfig, PretrainConfig, TrainConfig
from cloze.launch.pretrain.probing import SPARE_SHARE
from cloze.launch.system import devices
from cloze.launch.system.data_sheets import DATA_SHEETS, find_data_sheet
from cloze.launch.system.environment import child_variables
from cloze.launch.tools import plan
from cloze.launch.tools.planning.config import PlanConfig
from cloze.launch.tools.planning.estimate import Cluster, Estimator, Lengths
from cloze.launch.tools.planning.machines import find_machine
from cloze.launch.tools.planning.memory import memory, traffic
from cloze.launch.tools.planning.roofline import fuse, product_efficiency
from cloze.launch.tools.planning.trace import Batch, Kernel, ModelRun, Trace, record, trace_micro_step
from cloze.model.config import BertConfig
from cloze.model.flops import training_flops
from cloze.pipeline.errors import UserError
from tests.launching import ROOT
from tests.synthetic import make_shards

NAMES = {
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835, "NVIDIA GH200 480GB": 989, "NVIDIA H800": 989, "NVIDIA H800 PCIe": 756, "NVIDIA H20": 148,
    "NVIDIA GB200": 2500, "NVIDIA B200": 2250, "NVIDIA B300 SXM6 AC": 2250, "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA A30": 165, "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364, "NVIDIA GeForce RTX 5090": 209.5, "NVIDIA L4": 121, "NVIDIA L40S": 362,
    "NVIDIA A10G": 70, "Tesla V100-SXM2-32GB": 125,
    "NVIDIA RTX A1000": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090 D": None, "Quadro RTX 6000": None,
}
SMALL = BertConfig(vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_known_by_their_whole_names(name):
    sheet = find_data_sheet(name)
    assert (sheet and sheet.flops / 1e12) == NAMES[name]


def test_every_data_sheet_can_be_planned_with_and_says_its_source():
    assert len({sheet.key for sheet in DATA_SHEETS}) == len(DATA_SHEETS)
    for sheet in DATA_SHEETS:
        machine = find_machine(sheet.key)
        assert machine.flops == sheet.flops and 0 < machine.best_product < 1 and sheet.source
    with pytest.raises(UserError, match="plan.device: found 'h1000', expected this, cpu, .*h100-nvl"):
        find_machine("h1000")


def test_this_machine_is_what_doctor_has_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="plan.device: found no measurement of CPU, expected one; run `cloze doctor`"):
        find_machine("cpu")
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    devices.keep_measured(cpu, {torch.bfloat16: 4e11, torch.float32: 1e11})
    devices.keep_measured_memory(cpu, (3e10, 2e9))
    devices.keep_measured_memory(cpu, (1e10, 1e9))  # a busy machine's: the best ones stay
    found = find_machine("cpu")
    assert (found.flops, found.bandwidth, found.elements) == (4e11, 3e10, 2e9) and found.memory_bytes > 1e9
    assert find_machine("cpu", torch.float32).flops == 1e11
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    with pytest.raises(UserError, match="found no measurement"):
        find_machine("cpu")  # of so many threads


def test_a_slice_has_its_share_of_the_peak(monkeypatch):
    """Seven slices of a H100 have 16 of its 132 processors each."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 16}))
    assert devices.data_sheet_flops(torch.device("cuda")) == pytest.approx(989e12 * 16 / 132)


def kernel(index_of: str, reads=(), writes=(), kind="pointwise", in_layer=True) -> Kernel:
    return Kernel(index_of, kind, reads=tuple((number, 100) for number in reads),
                  writes=tuple((number, 100) for number in writes), in_layer=in_layer)


def test_fused_kernels_read_what_comes_from_outside_and_write_what_is_used_outside():
    """x -> a -> b -> product -> c, and d of b alone: a is used by nobody else, b is, c and d are results."""
    kernels = [kernel("first", [1], [2]), kernel("second", [2, 3], [4]), kernel("mm", [4, 5], [6], "product"),
               kernel("third", [6, 4], [7]), kernel("late", [4], [8])]
    before, product, after = fuse(Trace(kernels))
    assert dict(before.reads) == {1: 100, 3: 100} and dict(before.writes) == {4: 100, 8: 100} and product == kernels[2]
    assert dict(after.reads) == {6: 100, 4: 100} and dict(after.writes) == {7: 100}


def test_what_is_no_layers_stays_as_it_is():
    """Embeddings, heads and sums of gradients are not compiled."""
    kernels = [kernel("first", [1], [2], in_layer=False), kernel("second", [2], [3], in_layer=False),
               kernel("third", [3], [4]), kernel("fourth", [4], [5])]
    assert [each.name for each in fuse(Trace(kernels))] == ["first", "second", "fused"]
    config = replace(SMALL, num_hidden_layers=2)
    kernels = trace_micro_step(ModelRun(config), Batch((16,) * 4, 8)).kernels
    names = {inside: {each.name for each in kernels if each.in_layer == inside} for inside in (True, False)}
    assert {"gelu_backward", "_flash_attention_forward", "native_layer_norm_backward", "addmm"} <= names[True]
    assert {"embedding", "embedding_dense_backward", "_foreach_copy_", "_softmax"} <= names[False] - names[True]
    assert sum(each.in_layer and each.name == "sum" for each in kernels) == 6 * 2, "biases: three of the qkv's parts"


def test_of_a_table_the_rows_that_are_taken_are_read():
    table, rows = torch.zeros(1000, 8), torch.arange(10)
    with record(SMALL, (1,)) as trace:
        chosen = table.index_select(0, rows)
        table.scatter_add_(0, rows[:, None], chosen[:, :1])
        chosen.copy_(torch.empty(10, 8))
        chosen.new_full((), 1.0)
    taken, added, copied, filled = (each.bytes for each in trace.kernels)
    assert taken == 320 + 80 + 320 and added <= 4 * 80 and copied == 2 * 320 and filled == 4


def test_products_of_few_tiles_fill_few_processors():
    machine = find_machine("h100")
    best = product_efficiency(machine, (1, 128 * 132, 1 << 20, 256))
    assert best == pytest.approx(machine.best_product, rel=1e-3)
    assert product_efficiency(machine, (1, 128, 256, 256)) < best / 100
    assert product_efficiency(machine, (1, 128 * 133, 1 << 20, 256)) == pytest.approx(best * 133 / 264, rel=1e-3)


def test_the_trace_counts_what_the_mathematics_needs():
    """Products and attention of full tiles are the model's FLOPs, less what nobody reads of the last layer."""
    config = replace(SMALL, num_hidden_layers=12)
    batch = Batch((128,) * 8, 8 * 19)
    trace = trace_micro_step(ModelRun(config), batch)
    needed = training_flops(config, batch.lengths, batch.masked)
    recomputed = 2 * config.hidden_size * 128**2 * 8 * 12  # scores, in flash attention's backward
    counted = sum(each.flops for each in trace.kernels) - recomputed
    assert 0.90 * needed < counted < needed
    names = {each.name for each in trace.kernels}
    assert {"_flash_attention_forward", "_flash_attention_backward"} <= names, "as on a GPU"


def test_casts_and_checkpointing_are_seen():
    """A CPU casts each weight where it is used, a GPU all at once; at stage 1 there is nothing to cast."""
    batch = Batch((128,) * 8, 8 * 19)
    cpu, gpu, halved, again = (trace_micro_step(run, batch) for run in (
        ModelRun(SMALL, on_gpu=False), ModelRun(SMALL), ModelRun(SMALL, weights=torch.bfloat16, autocast=None),
        ModelRun(SMALL, gradient_checkpointing="all")))
    casts = [sum(each.name == "_to_copy" for each in trace.kernels) for trace in (cpu, gpu, halved)]
    assert casts[0] > casts[1] + 20 * SMALL.num_hidden_layers and casts[1] < casts[2] + SMALL.num_hidden_layers
    assert max(each.tensors for each in gpu.once) > 4 * SMALL.num_hidden_layers and not halved.once
    assert again.peak_bytes < gpu.peak_bytes
    assert sum(each.flops for each in again.kernels) > 1.2 * sum(each.flops for each in gpu.kernels)


def test_stages_partition_what_they_say():
    """Rajbhandari et al. 2020, with fp32 sums of gradients: 16 bytes a weight at stage 0; at 1 gradients stay whole,
    at 2 those of a micro-step. (tests/gpu/test_memory.py holds this to the engine itself.)"""
    count, options = 1_000_000, {"precision": "bf16", "states": 8_000_000, "on_gpu": False}
    stages = [memory(stage, count, 64, 0, **options) for stage in range(4)]
    assert stages[0].weights + stages[0].gradients + stages[0].moments == 16 * count
    own = 15625
    assert stages[1].weights == 2 * count + 4 * own and stages[1].gradients == 6 * count
    assert stages[1].moments == 8 * own and stages[2].gradients == 2 * count + 4 * own
    assert stages[0].total > stages[1].total > stages[2].total
    sent = [traffic(stage, count, 64, 8, precision="bf16")[0] for stage in range(4)]
    assert sent[2] > 3 * sent[0], "stage 2 reduces in every micro-step"
    assert traffic(0, count, 1, 8, precision="bf16") == (0.0, 0)


def test_a_faster_stage_is_named_with_its_micro_batch():
    stages = {0: {"tokens_per_second": 100.0, "micro_batch_size": 8},
              1: {"tokens_per_second": 118.0, "micro_batch_size": 16}}
    said = plan._advice(0, {"stages": stages, "fastest_stage": 1})
    assert said == "faster: --zero.stage 1 --train.micro_batch_size 16: 18% more tokens/s than stage 0"
    stages[1]["tokens_per_second"] = 104.0  # no more than the estimate may be wrong by
    assert plan._advice(0, {"stages": stages, "fastest_stage": 1}) is None
    assert plan._advice(1, {"stages": stages, "fastest_stage": 1}) is None
    stages[0] = {"fits": False}
    assert plan._advice(0, {"stages": stages, "fastest_stage": 1}) == "fits: --zero.stage 1, unlike stage 0"


def test_what_limits_the_micro_batch_is_named():
    config = PlanConfig(gpus=8, model=SMALL, train=TrainConfig(global_batch_size=64, sequence_length=128))
    estimator = Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 8, 8, 1e9))
    assert "each of 8 devices 8 sequences" in plan._limited_by_batch(config, estimator, {"largest_micro_batch_size": 8})
    assert plan._limited_by_batch(config, estimator, {"largest_micro_batch_size": 4}) is None, "by memory"
    least = replace(config.train, memory_limit_gib=estimator.memory(0, 8).total / 2**30 / (1 - SPARE_SHARE) + 1e-6)
    full = replace(estimator, config=replace(config, train=least))
    assert plan._limited_by_batch(config, full, {"largest_micro_batch_size": 8}) is None, "by both"


def run_plan(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "cloze", "plan", *arguments], cwd=ROOT, env=child_variables(),
                          capture_output=True, text=True, timeout=300)


def test_the_command_prints_and_writes_its_figures(tmp_path):
    data = make_shards(tmp_path / "data")
    path = tmp_path / "plan.json"
    done = run_plan("--config", "tiny", "--data", str(data), "--device", "a100-80gb", "--gpus", "8",
                    "--train.micro_batch_size", "auto", "--price_per_hour", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "limited by the batch, not by memory: it gives each of 8 devices 8 sequences" in done.stdout
    figures = json.loads(path.read_text())
    assert figures["fits"] is True and figures["estimate"] is True and figures["micro_batch_size"] == 8
    assert figures["memory_bytes"] == sum(figures["memory_by_kind"].values()) < figures["device_memory_bytes"]
    assert figures["hours"] == pytest.approx(200 * figures["step_seconds"] / 3600)
    assert figures["cost"] == pytest.approx(16 * figures["hours"])
    assert 0 < figures["communication_share"] < 1 and figures["fastest_stage"] in range(4)
    assert 0 < figures["mfu"] < 1 and set(figures["stages"]) == {"0", "1", "2", "3"}
    printed = " ".join(done.stdout.split())
    assert "an estimate, nothing was run" in printed and "assumed:" in printed and "64 = 8 micro x 1" in printed
    assert "masked tokens alone" not in printed


def test_a_moving_average_takes_four_bytes_a_parameter_divided_as_states_are():
    made = []
    for decay in (None, 0.999):
        config = PretrainConfig(data="", output="", model=SMALL, ema=EmaConfig(decay),
                                train=TrainConfig(global_batch_size=8, micro_batch_size=1))
        made.append(Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 8, 8, 1e9)))
    count = made[0].parameters
    for stage, share in ((0, 1), (2, 8)):
        without, with_it = (each.memory(stage, 1).total for each in made)
        assert with_it - without == pytest.approx(4 * count / share, rel=1e-3)
        assert made[1].checkpoint_bytes(stage) - made[0].checkpoint_bytes(stage) == 4 * count


@pytest.mark.parametrize(("arguments", "said"), [
    (["--device", "h100"], "plan: found neither data nor train.sequence_length"),
    (["--device", "h1000"], "plan.device: found 'h1000'"),
    (["--device", "h100", "--gpus", "48", "--train.sequence_length", "128"],
     "train.global_batch_size: found 256, expected a multiple of the 48 processes"),
    (["--device", "h100", "--gpus", "1024", "--train.sequence_length", "128"],
     "train.global_batch_size: found 256, expected a multiple of the 1024 processes"),
    (["--device", "t4", "--train.sequence_length", "512", "--train.micro_batch_size", "auto",
      "--model.hidden_size", "16384", "--model.num_attention_heads", "64", "--model.num_hidden_layers", "4"],
     "needed for one sequence at zero.stage 0"),
    (["--gpus", "0"], "plan.gpus: found 0"),
])
def test_what_cannot_be_planned_ends_in_one_line(arguments, said, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_sequence_may_be_one_token_long(tmp_path):
    figures = tmp_path / "plan.json"
    assert cli.main(["plan", "--config", "tiny", "--device", "h100", "--train.sequence_length", "1", "--short_share",
                     "1", "--train.micro_batch_size", "auto", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["fits"] and all(map(math.isfinite, (found["step_seconds"], found["hours"], found["mfu"])))


def test_the_largest_micro_batch_is_the_last_that_fits():
    train = TrainConfig(global_batch_size=4096, micro_batch_size="auto", memory_limit_gib=6.0)
    config = PretrainConfig("", "", model=BertConfig(vocab_size=30522, num_hidden_layers=4), train=train)
    estimator = Estimator(config, Lengths.of_procedure(128, 0.1, 0.15), Cluster(find_machine("a10"), 1, 1, 1e9))
    size = estimator.largest_micro_batch(0)
    assert size in (128, 256, 512) and estimator.fits(estimator.memory(0, size))
    assert not estimator.fits(estimator.memory(0, 2 * size))


@pytest.mark.parametrize(("shape", "count", "longest", "dropout"), [
    ("small", 64, 128, 0.0),
    pytest.param("base", 16, 128, 0.0, marks=pytest.mark.slow),
    pytest.param("small", 64, 128, 0.1, marks=pytest.mark.slow),
    pytest.param("small", 16, 512, 0.0, marks=pytest.mark.slow),
])
def test_the_estimate_of_a_step_on_this_cpu_comes_true(shape, count, longest, dropout):
    """Within a quarter, in time and in memory, of what is measured in the same process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.plan_on_cpu", shape, str(count), str(longest), str(dropout)], cwd=ROOT,
        env=child_variables(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu"), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimated_seconds"] == pytest.approx(found["seconds"], rel=0.25)
    assert found["estimated_bytes"] == pytest.approx(found["bytes"], rel=0.25)
