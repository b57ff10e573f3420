"""Measures steps on one core of a CPU, and estimates them from rates measured in turn with them; prints both as JSON.

CPU time counts, not the clock's, and what the estimate rests on is measured between the steps: another process's work
slows both.
"""

import json
import statistics
import time
from dataclasses import astuple, replace

import torch

from cloze.launch.config import PretrainConfig, TrainConfig
from cloze.launch.pretrain.objectives import Objective
from cloze.launch.pretrain.objectives.factory import make_objective
from cloze.launch.system.environment.process import bound_primitive_caches, keep_freed_pages
from cloze.launch.system.memory import peak_bytes, resident_bytes
from cloze.launch.tools.planning.estimate import Cluster, Estimator, Lengths
from cloze.launch.tools.planning.kernels import KernelRates, measure_kernels
from cloze.launch.tools.planning.machines import measured
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights

CPU = torch.device("cpu")
ROUNDS = 3
SHAPES = {
    "small": dict(vocab_size=8192, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
    "base": dict(vocab_size=30522, num_hidden_layers=4),
}


def seconds(work) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def best_product() -> float:
    """FLOP/s of the better of two sizes of square products in bf16."""
    matrices = [torch.randn(size, size).bfloat16() for size in (1024, 2048)]
    return max(2 * len(each) ** 3 / min(seconds(lambda each=each: each @ each) for _ in range(3)) for each in matrices)


def kernel_rates() -> tuple[float, ...]:
    return astuple(measure_kernels(CPU, torch.bfloat16, seconds=0, clock=time.process_time))


def make_step(objective: Objective, lengths: tuple[int, ...], masked: int):
    """A function that trains one step as the trainer does: bf16 autocast, the objective's loss, fused AdamW."""
    config, model = objective.config.model, objective.build_model()
    init_weights(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = sum(lengths)
    ids = torch.randint(5, config.vocab_size, (tokens,))
    positions = 1 + torch.randperm(tokens - 2)[:masked].sort().values  # never the first and the last, which are special
    inputs = dict(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        labels=ids[positions],
        masked_positions=positions,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        max_sequence_length=max(lengths),
        sequence_offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        next_sentence_label=torch.zeros(len(lengths), dtype=torch.int64),
        dropout_seed=1,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    totals = torch.tensor(objective.counts([inputs]), dtype=torch.float64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs)
        objective(output, inputs, totals)[0].backward()
        optimizer.step()

    return step


def main(command: list[str]) -> int:
    """Measure and estimate.

    Args:
        command: shape, sequences of a micro-batch, tokens of the longest, dropout, objective.
    """
    (shape, objective), (count, longest), dropout = command[::4], map(int, command[1:3]), float(command[3])
    keep_freed_pages()
    bound_primitive_caches()
    torch.set_num_threads(1)
    model = BertConfig(**SHAPES[shape], hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    if objective == "replaced_tokens":
        model = replace(model, embedding_size=model.hidden_size, pooler=False)
    train = TrainConfig(global_batch_size=count, micro_batch_size=count, gradient_clipping=0)
    config = PretrainConfig("", "", model=model, train=train, objective=objective)
    lengths = Lengths.of_procedure(longest, 0.1, 0.15)
    batch = lengths.typical(count)
    best_product()  # the libraries that it loads are not the model's; pages that larger work frees, a step would reuse
    before = resident_bytes()
    step = make_step(make_objective(config), batch.lengths, batch.masked)
    for _ in range(2):
        step()
    held = peak_bytes() - before  # before the kernels below, whose memory is not the model's
    products, rates, steps = [], [], []
    for _ in range(ROUNDS):
        products.append(best_product())
        rates.append(kernel_rates())
        steps.append(seconds(step))
    machine = measured(
        CPU, statistics.median(products), KernelRates(*map(statistics.median, zip(*rates, strict=True))), 1e12
    )
    estimator = Estimator(config, lengths, Cluster(machine, 1, 1, 1e9))
    estimated = estimator.step(0, count)
    print(
        json.dumps(
            {
                "seconds": statistics.median(steps),
                "estimated_seconds": estimated.seconds - estimated.gradient_seconds,
                "bytes": held,
                "estimated_bytes": estimator.memory(0, count).total,
            }
        )
    )
    return 0
