"""What a process computes on: its name, its data there, and the peak rate of its matrix products."""

from __future__ import annotations

import functools
import json
import platform
import time
from pathlib import Path

import torch

from cloze.launch.system.environment import cache_folder
from cloze.pipeline.storage import publish_text

# Dense 16-bit peaks in FLOP/s from NVIDIA's data sheets, by a part of the device's name; the first match counts.
DATA_SHEETS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12,
}
# Square products whose best rate counts as the peak: large enough to be bound by arithmetic, small enough for a trial.
_SIZES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
# Another process's work only makes a trial slower, and comes and goes: the best of short trials, spread over seconds.
_TRIAL_SECONDS = 0.05
_PAUSE_SECONDS = 0.2
_SECONDS = 4.0


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def work_on(device: torch.device) -> None:
    """Make a GPU the current one of this thread, for what names none, such as barriers: a new thread has the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_kernels(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Settle, for this process, which of several kernels a GPU takes; on a CPU there is nothing to choose.

    Args:
        tf32: whether fp32 products round what they multiply to TF32's 10 bits.
        deterministic: whether sums are taken in an order that is the same each time. That of flash attention's backward
            is not by itself, nor are cuBLAS's with several streams (environment.keep_products_deterministic).
    """
    if device.type != "cuda":
        return
    # Padded batches and ALiBi are for the memory-efficient kernel, whichever version of cuDNN there is: newer ones put
    # themselves first on Hopper, and refuse a dropout that is no multiple of 1/16 (sdp_utils.cpp).
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written


def numbers_on(device: torch.device, *numbers: float) -> torch.Tensor:
    """(N,) float64 on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def to_device(batch: dict, device: torch.device) -> dict:
    """Tensors to the device, plain numbers as they are.

    To a GPU all go in one copy, on a stream of their own: while it computes what was queued before, and no host waits.
    """
    if device.type == "cpu":
        return batch
    packed, places = packed_bytes(batch)
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        there = packed.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(copying)
    there.record_stream(computing)  # or its memory could be given to the next copy while it is still read
    return batch | {name: there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    for name, (start, tensor) in places.items()}


# Where each tensor of a packed batch begins: at a multiple of what the widest loads of a GPU want.
_ALIGNMENT = 16


def packed_bytes(batch: dict) -> tuple[torch.Tensor, dict[str, tuple[int, torch.Tensor]]]:
    """All tensors of a batch in one (N,) uint8, and of each the byte where it begins."""
    places, end = {}, 0
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            places[name] = end, value
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8)
    for start, tensor in places.values():
        packed[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return packed, places


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of one process's device in FLOP/s, or None if it is not known.

    For GPUs the data sheet's 16-bit rate, whatever the dtype; for others, CPUs too, what `cloze doctor` has measured.
    """
    return data_sheet_flops(device) or _measured().get(_key(device, dtype), 0.0) * _units(device) or None


def data_sheet_flops(device: torch.device) -> float | None:
    """Peak in FLOP/s for 16-bit matrix products that the maker of a GPU names, or None."""
    name = f" {device_name(device).replace('-', ' ')} "  # whole words: an "RTX A1000" is no "A100"
    return next((peak for part, peak in DATA_SHEETS.items() if f" {part} " in name), None)


def measure_flops(device: torch.device, *dtypes: torch.dtype) -> dict[torch.dtype, float]:
    """Best FLOP/s of square products by dtype, with the threads that this process has; takes _SECONDS."""
    end = time.monotonic() + _SECONDS
    matrices = [torch.randn(size, size, device=device).to(dtype) for dtype in dtypes for size in _SIZES[device.type]]
    for matrix in matrices:  # the first products choose their kernels
        matrix @ matrix
    best = dict.fromkeys(dtypes, 0.0)
    while True:
        for matrix in matrices:
            best[matrix.dtype] = max(best[matrix.dtype], _rate(matrix))
        if time.monotonic() > end:
            return best
        time.sleep(_PAUSE_SECONDS)


def _rate(matrix: torch.Tensor) -> float:
    """FLOP/s of one trial."""
    _wait(matrix.device)
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < _TRIAL_SECONDS:
        matrix @ matrix
        _wait(matrix.device)
        count += 1
    return 2 * len(matrix) ** 3 * count / seconds


def keep_measured(device: torch.device, rates: dict[torch.dtype, float]) -> dict[torch.dtype, float]:
    """Remember measured FLOP/s for the runs of this user, each unless more was measured before; what is kept.

    Raises:
        UserError: the file can't be written.
    """
    before = _measured()
    kept = {dtype: max(rate / _units(device), before.get(_key(device, dtype), 0.0)) for dtype, rate in rates.items()}
    values = before | {_key(device, dtype): rate for dtype, rate in kept.items()}
    publish_text(_file(), json.dumps(values, indent=1) + "\n")
    return {dtype: rate * _units(device) for dtype, rate in kept.items()}


def doubt_of_peak(device: torch.device) -> str:
    """What it means, and what to do, if a run is faster than `peak_flops`."""
    if data_sheet_flops(device) is not None:
        return f"the data sheet's rate for {device_name(device)!r} in system/devices.py is too low; correct it there"
    return (f"the peak in {_file()} was measured by `cloze doctor` while the machine was busy, or clocked lower than "
            "now; run it again when nothing else runs: the higher value is kept")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _units(device: torch.device) -> int:
    """What a rate is kept per: a GPU, or a thread, since runs differ in how many a process has."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def _key(device: torch.device, dtype: torch.dtype) -> str:
    return f"{device_name(device) if device.type == 'cuda' else _processor()} {dtype}"


def _processor() -> str:
    """Model of the CPU; Python itself knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())


def _file() -> Path:
    return cache_folder() / "matmul-flops.json"


def _measured() -> dict[str, float]:
    """FLOP/s a GPU or a thread, by device and dtype; empty where nothing was measured."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
        return {name: float(rate) for name, rate in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):  # another version's, or damaged: as if there were none
        return {}
