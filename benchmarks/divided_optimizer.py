"""Time and memory of an optimizer whose work is divided among ranks by whole tensors, beside torch's own division.

    python benchmarks/divided_optimizer.py --ranks 1 2 4 --layers 6 --width 512

For LAMB and Muon, over gloo on this machine with one thread a rank: processor seconds of the slowest rank's update as a
multiple of one rank's time over the number of ranks (1 is a perfect division), seconds of the exchange of weights, and
bytes of optimizer states. The peer is torch.distributed.optim.ZeroRedundancyOptimizer around the same optimizer; the
weights of both must be those of one rank to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no warning that there is no GPU

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from cloze.launch.config import OptimizerConfig
from cloze.launch.engine.division import Division
from cloze.launch.engine.optimizers import build_optimizer, parameter_groups
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig

STEPS = 4


def build(layers: int, width: int) -> BertForPreTraining:
    torch.manual_seed(0)
    return BertForPreTraining(
        BertConfig(
            vocab_size=30522,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
        )
    )


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """The same on all ranks, as after their sum."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


def measure(rank: int, world_size: int, port: int, name: str, way: str, layers: int, width: int, folder: str) -> None:
    """One rank: writes what it measured into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    model, config = build(layers, width), OptimizerConfig(name=name)
    groups = parameter_groups(model, config)
    division = Division(model, groups, 1, rank, world_size, on_gpu=False)
    if way == "cloze":
        optimizer = build_optimizer(model, config, 1e-3, groups=division.owned_groups)
        update, exchange, states = optimizer.step, division.share, optimizer
    else:
        make = partial(_optimizer, model=model, config=config)
        peer = ZeroRedundancyOptimizer([dict(group) for group in groups], make)
        update, exchange, states = peer.step, lambda: None, peer.optim  # its step sends the weights, too
    used, exchanged = [], []
    for step in range(STEPS):
        give_gradients(model, step)
        dist.barrier()
        begin = time.thread_time()
        update()
        used.append(time.thread_time() - begin)
        dist.barrier()
        begin = time.perf_counter()
        exchange()
        exchanged.append(time.perf_counter() - begin)
    found = {"update": min(used[1:]), "exchange": min(exchanged[1:]), "states": state_bytes(states)}
    torch.save((found, model.state_dict() if rank == world_size - 1 else None), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _optimizer(groups, model, config, **_) -> torch.optim.Optimizer:
    return build_optimizer(model, config, 1e-3, groups=groups)


def run(world_size: int, *settings) -> tuple[list[dict], dict[str, torch.Tensor]]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(measure, (world_size, port, *settings, folder), world_size)
        parts = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world_size)]
    return [found for found, _ in parts], parts[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'optimizer':9} {'by':5} {'ranks':>5} {'update':>9} {'x ideal':>8} {'exchange':>9} {'states':>9} same bits")
    for name in ("lamb", "muon"):
        alone, weights = run(1, name, "cloze", arguments.layers, arguments.width)
        for world_size in arguments.ranks:
            for way in ("cloze", "torch") if world_size > 1 else ("cloze",):
                ranks, found = run(world_size, name, way, arguments.layers, arguments.width)
                slowest = max(each["update"] for each in ranks)
                ratio = slowest / (alone[0]["update"] / world_size)
                same = all(torch.equal(found[key], weights[key]) for key in weights)
                most = max(each["states"] for each in ranks)
                exchange = max(each["exchange"] for each in ranks)
                print(
                    f"{name:9} {way:5} {world_size:5} {slowest * 1e3:6.1f} ms {ratio:8.2f} {exchange * 1e3:6.1f} ms "
                    f"{most / 2**20:5.0f} MiB {'yes' if same else 'NO'}",
                    flush=True,
                )
                figures[f"{name}/{way}/{world_size} ranks: update, multiple of one rank's over ranks"] = ratio
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
