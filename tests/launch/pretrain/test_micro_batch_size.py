"""`--train.micro_batch_size auto`: the search, memory as it is read, and real runs on two processes."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml

from cloze.launch import cli
from cloze.launch.commands import parse
from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain import micro_batch_size as probing
from cloze.launch.pretrain.first_model import build_model
from cloze.launch.pretrain.inputs import open_inputs
from cloze.launch.pretrain.micro_batch_size import (
    MIXED_BATCHES,
    SPARE_SHARE,
    Probe,
    ProbeBatches,
    largest_that_fits,
)
from cloze.launch.pretrain.objectives.masked import MaskedTokens
from cloze.launch.system.console import Console
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.memory import available_bytes, peak_bytes, resident_bytes
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from tests.forked import FORKSERVER, ForkedRun
from tests.launching import assert_same_weights, finish, pretrain_arguments, train, weights
from tests.synthetic import make_shards

# Activations that take memory, and products that do not take long.
LARGER = (
    "--model.hidden_size",
    "64",
    "--model.intermediate_size",
    "2048",
    "--train.global_batch_size",
    "128",
    "--train.max_steps",
    "1",
    "--train.micro_batch_size",
    "auto",
)


class Memory:
    """100 bytes, and 7 more for each sequence that was tried."""

    def __init__(self, limit: int) -> None:
        self.tried, self._limit = [], limit

    def run(self, size, agree) -> bool:
        self.tried.append(size)
        return agree(True)

    def peak(self) -> int:
        return 100 + 7 * max(self.tried, default=0)

    def limit(self) -> int:
        return self._limit


def test_what_is_expected_not_to_fit_is_not_tried():
    memory = Memory(round(170 / (1 - SPARE_SHARE)))
    assert largest_that_fits([1, 2, 4, 8, 16], memory.run, memory, bool) == 8
    assert memory.tried == [1, 2, 4, 8]


def test_a_distant_candidate_is_approached_in_doublings():
    """A process's share of 127 divides by nothing: one sequence predicts nothing about 127."""
    memory = Memory(10**9)
    assert largest_that_fits([1, 127], memory.run, memory, bool) == 127
    assert memory.tried == [1, 2, 4, 8, 16, 32, 64, 127]
    memory = Memory(round(600 / (1 - SPARE_SHARE)))
    assert largest_that_fits([1, 127], memory.run, memory, bool) == 1 and memory.tried[-1] == 64


def test_a_size_that_runs_out_of_memory_is_backed_off_from():
    memory = Memory(10**9)
    assert largest_that_fits([1, 2, 4, 8], lambda size, agree: memory.run(size, agree) and size < 4, memory, bool) == 2
    with pytest.raises(UserError, match="found no size that fits.*gradient_checkpointing"):
        largest_that_fits([1, 2], lambda *_: False, Memory(10**9), bool)


class EngineWithRoomFor:
    """An engine on the CPU whose whole steps, optimizer states and all, have room for so many sequences."""

    def __init__(self, model: torch.nn.Module, sequences: int) -> None:
        self.model, self._sequences = model, sequences
        self.as_in_a_step = nullcontext

    def __call__(self, **inputs):
        self._running = len(inputs["sequence_offsets"]) - 1
        return self.model(**inputs)

    def backward(self, loss, *, last):
        if self._running > self._sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss.backward()

    def step(self, rate):
        self.model.zero_grad()


def probing_whole_steps(world_size: int, fits: int) -> Probe:
    config = PretrainConfig("", "", model=BertConfig.preset("tiny", vocab_size=50))
    objective = MaskedTokens(config)
    batches = ProbeBatches(8, [0, 0, 0, 5, 0, 3, 0, 0, 2], 50, 0.2, torch.device("cpu"))
    return Probe(
        EngineWithRoomFor(objective.build_model(), fits), objective, batches, world_size, 2, partitions_weights=False
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_whole_step_that_runs_out_of_memory_is_no_traceback(world_size):
    """One process backs off; of several the others stand in a reduction."""
    expected = "no size that fits" if world_size == 1 else "no memory for a whole step of 1 sequences"
    with pytest.raises(UserError, match=f"found {expected}.*; set train.gradient_checkpointing to all"):
        largest_that_fits([1, 2, 4], probing_whole_steps(world_size, 0).run, Memory(10**9), bool)
    if world_size == 1:
        assert largest_that_fits([1, 2, 4], probing_whole_steps(1, 2).run, Memory(10**9), bool) == 2
    else:
        with pytest.raises(UserError, match="a whole step of 4 sequences, expected room for it; give less than 4, or"):
            largest_that_fits([1, 2, 4], probing_whole_steps(2, 2).run, Memory(10**9), bool)


def test_the_probe_tries_the_longest_and_lengths_of_the_corpus():
    """An allocator that has seen one shape only says nothing about a run's, which change from batch to batch."""
    histogram = [0, 0, 0, 5, 0, 3, 0, 0, 2]  # sequences of 3, 5 and 8 tokens
    longest, *mixed = ProbeBatches(8, histogram, 50, 0.2, torch.device("cpu")).of(64)
    assert longest["sequence_offsets"].diff().tolist() == [8] * 64 and len(longest["labels"]) == 64 * 2
    assert len(mixed) == MIXED_BATCHES
    for batch in mixed:
        lengths = batch["sequence_offsets"].diff().tolist()
        assert set(lengths) == {3, 5, 8} and batch["max_sequence_length"] == 8
        assert batch["position_ids"].tolist() == [place for length in lengths for place in range(length)]
        assert len(batch["input_ids"]) == sum(lengths)
        assert len(batch["labels"]) == sum(-(-length // 4) for length in lengths)  # a fifth, and a quarter of it more
        assert torch.equal(batch["labels"], batch["input_ids"][batch["masked_positions"]])
    assert len({tuple(batch["sequence_offsets"].tolist()) for batch in mixed}) == MIXED_BATCHES


def test_the_probe_of_a_run_that_begins_with_next_tokens_tries_both_parts():
    """Both take graphs of their own, and every token to predict takes most memory."""
    batches = ProbeBatches(8, [0, 0, 0, 5, 0, 3, 0, 0, 2], 50, 0.2, torch.device("cpu"), next_tokens=True).of(4)
    first, later = batches[: 1 + MIXED_BATCHES], batches[1 + MIXED_BATCHES :]
    assert len(first) == len(later) and all(each["causal"] for each in first)
    assert all(len(each["labels"]) == len(each["input_ids"]) - 4 for each in first), "but of each sequence's last"
    assert all("causal" not in each and len(each["labels"]) < len(each["input_ids"]) for each in later)


def test_a_model_that_does_not_fit_alone_ends_in_one_line():
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(UserError, match="found no memory for the model and its optimizer alone.*raise zero.stage"):
        probing._search(full, 8, None, torch.device("cpu"), Console(), [1])


def _rank(rank: int, limits: list[int], port: int, results) -> None:
    import os

    from cloze.launch.system import distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    device = distributed.initialize(Environment(rank, rank, len(limits), "torchrun"))
    memory = Memory(limits[rank])

    def agree(fits: bool) -> bool:
        return not distributed.on_any_rank(not fits, torch.device(device))

    found = largest_that_fits([1, 2, 4, 8, 16], memory.run, memory, agree)
    results.put((rank, found, memory.tried))
    distributed.shutdown()


def test_ranks_of_unequal_memory_agree():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = FORKSERVER.Queue()
    limits = [10**6, round(135 / (1 - SPARE_SHARE))]
    processes = [FORKSERVER.Process(target=_rank, args=(rank, limits, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert found == [(0, 4, [1, 2, 4]), (1, 4, [1, 2, 4])]


def test_a_machine_of_another_kind_does_not_tell(tmp_path, monkeypatch):
    assert available_bytes(tmp_path) is resident_bytes(tmp_path) is None and peak_bytes(tmp_path) > 0
    monkeypatch.setattr(probing, "available_bytes", lambda: None)
    assert probing.Memory.of_host(2, 5).limit() == 5
    with pytest.raises(UserError, match="train.micro_batch_size: found auto on a system that does not tell"):
        probing.Memory.of_host(2)


def test_memory_of_a_machine_is_shared(monkeypatch):
    monkeypatch.setattr(probing, "available_bytes", lambda: 4000)
    monkeypatch.setattr(probing, "resident_bytes", lambda: 100)
    assert probing.Memory.of_host(2).limit() == 100 + 2000


def test_the_peak_is_this_process_own():
    """The kernel's `maxrss` of a process begins with that of the one that started it."""
    code = "from cloze.launch.system.memory import peak_bytes; print(peak_bytes())"
    held = bytearray(500 << 20)
    own = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert own < len(held) // 2


def held_gib() -> float:
    """What a process of a run holds before it begins: with torch built for CUDA a quarter more."""
    with FORKSERVER.Pool(1) as pool:
        return pool.apply(peak_bytes) / 2**30


@pytest.mark.parametrize("stage", ["0", pytest.param("3", marks=pytest.mark.slow)])
def test_a_run_finds_its_micro_batch_keeps_it_and_trains_as_without_the_probe(tmp_path, stage):
    """At stage 2 the next test shows it, where memory runs out."""
    data, run = make_shards(tmp_path / "data"), tmp_path / "run"
    grows = ("--train.initial_global_batch_size", "64", "--train.batch_warmup_tokens", "9") if stage == "0" else ()
    front_end = 0.08 if stage == "3" else 0.0  # of torch's compiler, which DeepSpeed imports at stage 3
    limit = held_gib() + front_end + 0.2  # some candidates fit, and not all
    output = train(
        data, run, *LARGER, *grows, "--train.memory_limit_gib", f"{limit:.2f}", "--zero.stage", stage, processes=2
    )
    chosen = int(re.search(r"micro-batch: (\d+) sequences are the most that fit", output)[1])
    assert chosen in (2, 4, 8, 16, 32), "the limit meant nothing"
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["micro_batch_size"] == chosen
    assert f"128 = {chosen} micro x" in output
    again = train(
        data,
        run,
        *LARGER,
        *grows,
        "--train.max_steps",
        "2",
        "--zero.stage",
        stage,
        "--checkpoint.accept_changes",
        "true",
        processes=2,
    )  # no limit now, and the saved number all the same
    assert f"128 = {chosen} micro x" in again and "are the most that fit" not in again
    other = tmp_path / "other"
    train(data, other, *LARGER[:-1], str(chosen), *grows, "--train.max_steps", "1", "--zero.stage", stage, processes=2)
    assert_same_weights(weights(run, 1), weights(other, 1))


def full_from_four(command: list[str]) -> int:
    """Cloze on machines of which that of rank 1 has no room to train on four sequences."""
    from cloze.model.bert import BertForPreTraining

    forward = BertForPreTraining.forward

    def limited(self, *inputs, **named):
        if os.environ["RANK"] == "1" and self.training and len(named["sequence_offsets"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *inputs, **named)

    BertForPreTraining.forward = limited
    return cli.main(command)


@pytest.mark.parametrize("stage", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_all_back_off_where_one_rank_runs_out_of_memory_and_train_as_without_the_probe(tmp_path, stage):
    data, given = make_shards(tmp_path / "data"), ("--train.max_steps", "1", "--zero.stage", stage)
    limited = ("--train.micro_batch_size", "auto", "--train.memory_limit_gib", "8")  # otherwise none would be tried
    output = finish(ForkedRun(pretrain_arguments(data, tmp_path / "run", *given, *limited), 2, full_from_four))
    tried = [int(size) for size in re.findall(r"micro-batch: trying (\d+) sequences? of 32 tokens", output)]
    assert tried == [1, 2, 4, 8][: len(tried)] and len(tried) > 2
    assert "micro-batch: 2 sequences are the most that fit" in output and "complete at step 1" in output
    train(data, tmp_path / "other", *given, "--train.micro_batch_size", "2", processes=2)
    assert_same_weights(weights(tmp_path / "run"), weights(tmp_path / "other"))


def test_a_limit_that_nothing_fits_ends_in_one_line(tmp_path):
    data = make_shards(tmp_path / "data")
    output = train(data, tmp_path / "run", *LARGER, "--train.memory_limit_gib", "0.1", status=2)
    assert "train.micro_batch_size: found no size that fits" in output and "Traceback" not in output


def test_nothing_is_tried_on_a_cpu_where_memory_cannot_matter(tmp_path, monkeypatch, capsys):
    config = parse("pretrain", pretrain_arguments(make_shards(tmp_path / "data"), tmp_path / "run", *LARGER)[1:])
    inputs = open_inputs(config, 1)
    monkeypatch.setattr(probing.distributed, "from_main", lambda number, device: number)
    monkeypatch.setattr(probing.distributed, "on_any_rank", lambda flag, device: flag)

    def found(free: int) -> int:
        monkeypatch.setattr(probing, "available_bytes", lambda: free)
        build = partial(build_model, inputs.config, inputs.objective)
        arguments = (inputs.config, inputs.data, inputs.objective, build, Environment(), torch.device("cpu"), Console())
        return probing.resolve(*arguments).train.micro_batch_size

    assert found(8 << 30) == probing.CPU_MICRO_BATCH
    said = capsys.readouterr().out
    assert "micro-batch: 32 sequences, without a trial: more are no faster on a CPU" in said and "trying" not in said
    monkeypatch.setattr(probing, "_search", lambda *arguments: arguments[-1][0])
    assert found(1 << 20) == 1, "sizes are tried where memory may be short"


def test_the_bound_of_memory_is_one(tmp_path):
    """A step of a model takes less, in a process of its own, than what lets a trial be left out."""
    config = parse("pretrain", pretrain_arguments(make_shards(tmp_path / "data"), tmp_path / "run", *LARGER)[1:])
    inputs = open_inputs(config, 1)
    model = replace(inputs.config.model, hidden_size=512, intermediate_size=2048)
    bound = probing.most_bytes(model, inputs.data, probing.run_masking(inputs.config, inputs.data), 32)
    with FORKSERVER.Pool(1) as pool:
        assert 0.3 * bound < pool.apply(_bytes_of_a_step, (model, 32, inputs.data.max_length)) < bound


def _bytes_of_a_step(model: BertConfig, size: int, length: int) -> int:
    before = peak_bytes()
    objective = MaskedTokens(PretrainConfig("", "", model=model))
    network = objective.build_model()
    optimizer = torch.optim.AdamW(network.parameters())
    (batch, *_) = ProbeBatches(length, [0] * length + [1], model.vocab_size, 0.3, torch.device("cpu")).of(size)
    for _ in range(2):
        output = network(**batch, dropout_seed=0)
        (output.mlm_losses.sum() + output.next_sentence_losses.sum()).backward()
        optimizer.step()
    return peak_bytes() - before
