"""The checks of `cloze doctor`: each function examines one thing on this rank and returns what it found."""

import fcntl
import os
import platform
import shutil
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement

from cloze.launch.parsing import parse
from cloze.launch.pretrain.shapes import complete
from cloze.launch.system import distributed
from cloze.launch.system.compiling import lack
from cloze.launch.system.data_sheets import is_slice
from cloze.launch.system.devices import (
    SLOW_BF16,
    data_sheet_flops,
    data_sheet_of,
    device_name,
    keep_measured,
    measure_flops,
)
from cloze.launch.system.environment.launchers import Environment
from cloze.launch.system.memory import GIB, available_bytes
from cloze.launch.tools.plan import make_estimator
from cloze.launch.tools.planning.config import PlanConfig
from cloze.launch.tools.planning.kernels import keep_measured_kernels, measure_kernels
from cloze.pipeline.jobs.verifying import check_shard
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.storage import readable_errors, sync_folder
from cloze.pipeline.stores.places import Place
from cloze.version import DISTRIBUTION

# Three checkpoints of BERT-large (two kept, one being written): 16 bytes for each of 340 million parameters.
_ROOM_BYTES = 16 * GIB
# NCCL's buffers between the GPUs of a machine; containers come with 64 MB (NCCL's documentation, "Shared memory").
_SHARED_MEMORY_BYTES = GIB
# Heartbeats and time limits compare clocks of different machines.
_SKEW_SECONDS = 1.0
_TEST_FILE_BYTES = 64 << 20
_REDUCED_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}
# Gradients of BERT-base, reduced in fp32 at each step.
_BERT_BASE_BYTES = 4 * 110e6
# The share of a step that the sum of gradients may take. It runs beside backward, which is two thirds of a micro-step,
# and a step mostly has several micro-steps.
_MOST_OF_A_STEP = 0.25


Verdict = Literal["skipped", "ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""
    """What to do about a warning or a problem."""
    uniform: bool = False
    """Whether all ranks must find the same."""
    measure: float = 0.0
    """Orders equal verdicts: that of the rank with the lowest measure is shown."""


def advised(check: str, found: str, advice: str, verdict: Verdict = "warning", measure: float = 0.0) -> Finding:
    """A finding with a verdict if there is anything to advise; else it is ok."""
    return Finding(check, found, verdict if advice else "ok", advice, measure=measure)


def versions() -> list[Finding]:
    """Python, Cloze and what it needs, against the versions that it asks for."""
    needed = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or [] if "extra ==" not in text]
    found, wrong = [f"Python {platform.python_version()}", f"cloze {metadata.version(DISTRIBUTION)}"], []
    for requirement in needed:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = "missing"
        found.append(f"{requirement.name} {version}")
        if version == "missing" or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name}: found {version}, expected {requirement.specifier}")
    advice = f"{'; '.join(wrong)}; make env installs them"
    return [
        Finding("versions", ", ".join(found), "problem" if wrong else "ok", advice if wrong else "", uniform=True),
        *_stranger(),
    ]


def _stranger() -> list[Finding]:
    """The distribution that PyPI knows as `cloze`: its files lie in the folder `cloze`, among ours, and which of two
    files of one name is left depends on what was installed last.
    """
    try:
        version = metadata.version("cloze")
    except metadata.PackageNotFoundError:
        return []
    advice = f"uninstall both, then install {DISTRIBUTION} again: their folders have one name"
    return [Finding("package", f"cloze {version}, which is not {DISTRIBUTION}", "problem", advice, uniform=True)]


def device(device: torch.device) -> list[Finding]:
    """The device of this process, and its memory."""
    if device.type == "cpu":
        free = available_bytes()
        room = "" if free is None else f", {free / GIB:.1f} GiB memory free"
        return [Finding("device", f"CPU, {torch.get_num_threads()} threads{room}", measure=free or 0)]
    free, total = torch.cuda.mem_get_info(device)
    found, advice = f"{device_name(device)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free", ""
    if free < 0.9 * total:
        advice = "another process holds memory of this GPU; end it"
    elif not torch.cuda.is_bf16_supported():
        advice = "it has no bf16; train with --train.precision fp16 --zero.stage 1"
    return [advised("device", found, advice, measure=free)]


def matrix_product(device: torch.device, keep: bool) -> list[Finding]:
    """The rate of a large matrix product; saved for plans and, without a data sheet, for the MFU of runs."""
    rates = measure_flops(device, torch.bfloat16, torch.float32)
    bf16, fp32 = rates.values()
    kept = keep_measured(device, rates) if keep else rates
    found = f"{bf16 / 1e12:.3g} TFLOP/s in bf16, {fp32 / 1e12:.3g} in fp32"
    sheet = data_sheet_flops(device)
    if sheet is None:
        found += (
            ", kept for the MFU of runs"
            if kept == rates
            else (
                f"; kept for the MFU of runs: {kept[torch.bfloat16] / 1e12:.3g} and {kept[torch.float32] / 1e12:.3g}, "
                "the most that was ever measured"
            )
        )
        advice = "train with --train.precision fp32" if bf16 * SLOW_BF16 < fp32 else ""
    else:
        found += f"; {bf16 / sheet:.0%} of the data sheet"
        advice = "the GPU is shared, hot or held down; see nvidia-smi" if bf16 < 0.5 * sheet else ""
    return [advised("matrix product", found, advice, measure=bf16)]


def memory_bandwidth(device: torch.device, keep: bool) -> list[Finding]:
    """The rate of a long copy in the device's memory; saved for `cloze plan`, with the rates of a layer's kernels."""
    rates = {dtype: measure_kernels(device, dtype) for dtype in (torch.bfloat16, torch.float32)}
    for dtype, measured in rates.items():
        if keep:
            keep_measured_kernels(device, dtype, measured)
    rate = rates[torch.bfloat16].copy
    found = f"{rate / 1e9:.3g} GB/s, read and written"
    sheet = data_sheet_of(device) if device.type == "cuda" else None
    if sheet is not None and not is_slice(device_name(device)):
        found += f"; {rate / sheet.bandwidth:.0%} of the data sheet"
        if rate < 0.5 * sheet.bandwidth:
            return [
                Finding(
                    "memory bandwidth", found, "warning", "the GPU is shared or held down; see nvidia-smi", measure=rate
                )
            ]
    return [Finding("memory bandwidth", found, measure=rate)]


def compilation(device: torch.device) -> list[Finding]:
    """Whether torch.compile has what it needs on a GPU."""
    if device.type != "cuda":
        return [Finding("compilation", "for GPUs only", "skipped")]
    found = lack(device)
    if found is None:
        return [Finding("compilation", "torch.compile made a kernel, and it ran")]
    advice = f"{found.advice}; without it runs do not compile their layers, and are slower (docs/performance.md)"
    return [Finding("compilation", found.what, "warning", advice)]


def shared_memory(device: torch.device | None, world_size: int) -> list[Finding]:
    """/dev/shm, through which processes of one machine communicate."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []  # macOS has none
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.2f} GiB free in {folder}"
    short = free < _SHARED_MEMORY_BYTES and world_size > 1 and device is not None and device.type == "cuda"
    advice = "give the container at least 1 GiB: docker run --shm-size, or an emptyDir of medium Memory at /dev/shm"
    return [advised("shared memory", found, advice if short else "", "problem", free)]


def output(folder: Path, rank: int) -> list[Finding]:
    """The output folder: free space, locks, and a file that is written, synced and read back."""
    path = folder / f".doctor-rank-{rank:05d}"
    content = os.urandom(1 << 20)
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < 2 * _TEST_FILE_BYTES:
            return [Finding("output", f"{free / GIB:.2f} GiB free in {folder}", "problem", "free space there")]
        try:
            began = time.perf_counter()
            with open(path, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for _ in range(_TEST_FILE_BYTES // len(content)):
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # so that the disk is read, and not the page cache; macOS has none
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            written = time.perf_counter()
            with open(path, "rb") as file:
                same = all(piece == content for piece in iter(lambda: file.read(len(content)), b""))
            read = time.perf_counter()
        finally:
            path.unlink(missing_ok=True)
    speeds = [_TEST_FILE_BYTES / 1e6 / seconds for seconds in (written - began, read - written)]
    found = f"{free / GIB:,.0f} GiB free in {folder}, writes {speeds[0]:,.0f} MB/s, reads {speeds[1]:,.0f} MB/s"
    if not same:
        return [Finding("output", found, "problem", "it gave back other bytes than were written; check the disk")]
    advice = f"three checkpoints of BERT-large take {_ROOM_BYTES / GIB:.0f} GiB; of smaller models proportionally less"
    return [advised("output", found, advice if free < _ROOM_BYTES else "", measure=speeds[0])]


def data(folder: Place, rank: int, world_size: int, seconds: float) -> list[Finding]:
    """The prepared folder: its manifest, and the hashes of this rank's part of the shards, as far as time allows."""
    manifest = Manifest.load(folder)
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    began, checked, damaged = time.monotonic(), 0, []
    mine = shards[rank::world_size]
    for shard in mine:
        if checked and time.monotonic() - began > seconds:
            break
        damaged += check_shard(folder / shard.file, shard)
        checked += 1
    findings = [
        Finding(
            "data",
            f"{folder}: manifest {manifest.hash[:12]}, {len(shards)} shards, "
            f"{sum(shard.tokens for shard in shards):,} tokens",
            uniform=True,
        )
    ]
    if damaged:
        findings.append(Finding("shards", "; ".join(damaged), "problem", "prepare or copy the damaged shards again"))
    elif checked < len(mine):
        findings.append(
            Finding(
                "shards",
                f"{checked} of {len(mine)} verified in {seconds:.0f} s",
                "warning",
                f"verify all of them once: cloze verify {folder}",
                measure=checked,
            )
        )
    else:
        findings.append(Finding("shards", "all verified"))
    return findings


def processes(environment: Environment, device: torch.device) -> Finding:
    """Number of processes and machines, and their communication backend. Collective."""
    hosts = set(distributed.gather_texts(platform.node(), device))
    through = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device.type == "cuda" else "gloo"
    return Finding(
        "processes",
        f"{environment.world_size} on {len(hosts)} machine{'s' * (len(hosts) > 1)}, started "
        f"by {environment.launcher}, through {through}",
        uniform=True,
    )


def clock(device: torch.device, world_size: int) -> list[Finding]:
    """Difference between the clocks of the ranks. Collective."""
    if world_size == 1:
        return [Finding("clock", "one process alone has nothing to compare", "skipped")]
    skews = []
    for _ in range(5):  # the least of a few: a rank that leaves the barrier late looks like one with a late clock
        distributed.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=device)
        times = distributed.gather(now)[:, 0]
        skews.append(float(times.max() - times.min()))
    advice = "set the machines' clocks (NTP): heartbeats and time limits compare them"
    found = f"within {min(skews):.3f} s of each other"
    return [advised("clock", found, advice if min(skews) > _SKEW_SECONDS else "")]


def collective(device: torch.device, world_size: int, recipe: str | None) -> list[Finding]:
    """Correctness and speed of a sum over all ranks. Collective.

    Args:
        recipe: whose step the sum of gradients is compared with.
    """
    if recipe is not None:
        _planned(recipe, "this", world_size)  # a name that is none is said before anything is measured
    if world_size == 1:
        return [Finding("all-reduce", "found one process, expected several to add up over", "skipped")]
    size = _REDUCED_BYTES[device.type]
    seconds = []
    for _ in range(4):
        values = torch.ones(size // 4, device=device)
        distributed.barrier()
        began = time.perf_counter()
        right = bool((distributed.reduce_sum(values) == world_size).all())
        seconds.append(time.perf_counter() - began)
        if not right:
            return [
                Finding(
                    "all-reduce",
                    "a wrong sum",
                    "problem",
                    "the network or a device corrupts data; run it on fewer machines to find which",
                )
            ]
    # The rate of the wires: a byte of a ring all-reduce crosses them 2 (n - 1) / n times (nccl-tests, PERFORMANCE.md).
    slowest = distributed.gather(torch.tensor([statistics.median(seconds[1:])], dtype=torch.float64, device=device))
    second = float(slowest.max())
    wires = size * 2 * (world_size - 1) / world_size / second
    found = Finding(
        "all-reduce",
        f"{wires / 1e9:.2f} GB/s with {size >> 20} MiB; BERT-base's gradients take "
        f"{_BERT_BASE_BYTES / size * second:.2f} s",
    )
    return [found] if recipe is None else [found, share_of_step(recipe, world_size, second / size)]


def _planned(recipe: str, device: str, world_size: int) -> PlanConfig:
    words = ["--config", recipe, "--device", device, "--gpus", str(world_size)]
    return parse("plan", PlanConfig, words, configs="pretrain", complete=complete)


def share_of_step(recipe: str, world_size: int, seconds_a_byte: float, device: str = "this") -> Finding:
    """What share of a planned step the sum of gradients takes, at the measured speed.

    Args:
        recipe: name or file of a configuration.
        seconds_a_byte: of a sum over all ranks.
        device: as in `cloze plan`.
    """
    config = _planned(recipe, device, world_size)
    estimator, stage = make_estimator(config), config.zero.stage
    step = estimator.step(stage, estimator.micro_batch_size(stage))
    alone = step.seconds - step.waiting_seconds
    seconds = 4 * estimator.parameters * seconds_a_byte
    found = (
        f"the sum of {recipe}'s gradients, {4 * estimator.parameters / 1e9:.2f} GB, takes {seconds:.3g} s: "
        f"{seconds / alone:.0%} of a planned step of {alone:.3g} s without it"
    )
    advice = (
        "backward cannot hide so much: take a larger global batch, fewer machines or a faster network (NCCL_DEBUG=INFO "
        "says which one NCCL uses)"
    )
    return advised("all-reduce of the run", found, advice if seconds > _MOST_OF_A_STEP * alone else "")


def shared_folder(folder: Path, environment: Environment) -> list[Finding]:
    """Whether all machines share the output folder. Collective."""
    path = folder / f".doctor-seen-{environment.rank:05d}"
    with suppress(OSError):  # `output` has reported the error; the others must not wait for this rank
        path.touch()
        sync_folder(folder)
    distributed.barrier()
    missing = [
        rank for rank in range(environment.world_size) if not os.path.exists(folder / f".doctor-seen-{rank:05d}")
    ]  # `exists` is false too for a file in a folder that this process may not enter
    distributed.barrier()
    with suppress(OSError):
        path.unlink()
    if missing:
        return [
            Finding(
                "shared output",
                f"files of rank {', '.join(map(str, missing))} are not to be seen",
                "problem",
                "--output must be a folder that all machines share",
            )
        ]
    return [Finding("shared output", "every rank sees the files of all")]
