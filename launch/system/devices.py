"""The device of a process: its name, transfers of batches to it, and the peak rate of its matrix products."""

import contextlib
import functools
import importlib.util
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention

from cloze.launch.system.data_sheets import DataSheet, find_data_sheet, is_slice
from cloze.launch.system.environment.folders import cache_folder
from cloze.pipeline.errors import UserError, reason_of
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.storage import publish_json
from cloze.pipeline.untrusted import fields_if_readable, is_number

FLASH_ATTENTION_3 = "FA3"  # torch's name of flash attention 3

# Square products whose best rate counts as the peak: large enough to be bound by arithmetic, small enough for a trial.
# 256 tells on a CPU how long the others would take: without instructions for bf16 one of 1024 takes seconds.
_SIZES = {"cuda": (4096, 8192), "cpu": (256, 1024, 2048)}
# Other processes can only slow a trial down, and only at times: take the best of short trials spread over seconds.
_TRIAL_SECONDS = 0.05
_PAUSE_SECONDS = 0.2
_SECONDS = 4.0
_SMALL, _SMALL_TRIALS = 256, 5  # of a trial at each start
# `bf16_slowdown` from which fp32 is advised: below it half the bytes of what lies between products may be worth more.
SLOW_BF16 = 1.5


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def work_on(device: torch.device) -> None:
    """Make the GPU the current device of this thread, for calls that name no device (barriers)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_kernels(device: torch.device, *, tf32: bool, deterministic: bool) -> None:
    """Choose, for this process, among the kernels that torch has for a GPU; does nothing on a CPU.

    Args:
        tf32: whether fp32 matrix products round their inputs to TF32's 10 mantissa bits.
        deterministic: whether sums are computed in the same order each time. By default they are not in the backward
            pass of flash attention, nor in cuBLAS with several streams (keep_products_deterministic).
    """
    if device.type != "cuda":
        return
    # Padded batches and ALiBi use the memory-efficient kernel, whatever the version of cuDNN: newer versions put
    # themselves first on Hopper, and refuse a dropout that is no multiple of 1/16 (sdp_utils.cpp).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Its backward pass sums in no fixed order; plain matrix products and a softmax, used instead, do.
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.use_deterministic_algorithms(deterministic)
    # Nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of a module's own class


def take_flash_attention_3(device: torch.device, dropout: float) -> str | None:
    """Use flash attention 3 in this process if it is installed (`flash_attn_interface`) and the GPU is a Hopper, for
    which it is made. Its kernels have no dropout.

    Returns:
        why it cannot be used although it is installed, or None.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if not hopper or dropout or importlib.util.find_spec("flash_attn_interface") is None:
        return None
    try:
        torch.nn.attention.activate_flash_attention_impl(FLASH_ATTENTION_3)
    except Exception as error:  # any error of its import: built for another torch or CUDA, or without the backward pass
        return reason_of(error)
    return None


def has_flash_attention_3() -> bool:
    """Whether this process uses flash attention 3."""
    return torch.nn.attention.current_flash_attention_impl() == FLASH_ATTENTION_3


class Stopwatch:
    """Sums intervals of device time between two points of its queue, without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started: float | torch.cuda.Event | None = None
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start an interval after the work that is queued so far."""
        self._started = self._now()

    def stop(self) -> None:
        """End the interval after the work that has been queued since."""
        self._spans.append((self._started, self._now()))

    def take(self) -> float:
        """Seconds of all intervals, which are then reset; call it when the device has passed the last one."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            return sum(began.elapsed_time(ended) for began, ended in spans) / 1000
        return sum(ended - began for began, ended in spans)


def numbers_on(device: torch.device, *numbers: float) -> torch.Tensor:
    """The numbers as a tensor (N,) float64 on the device, copied without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move the tensors of a batch to the device; plain numbers stay as they are.

    To a GPU all go in one copy on a separate stream, while it computes earlier work; the host does not wait.
    """
    if device.type == "cpu":
        return batch
    packed, places = packed_bytes(batch)
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        there = packed.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(copying)
    # otherwise its memory could be reused for the next copy while it is still being read
    there.record_stream(computing)
    return batch | {
        name: there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, (start, tensor) in places.items()
    }


# Alignment in bytes of each tensor in a packed batch: that of a GPU's widest loads.
_ALIGNMENT = 16


def packed_bytes(batch: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[int, torch.Tensor]]]:
    """All tensors of a batch in one tensor (N,) uint8; and by name the first byte of each, with the tensor."""
    places, end = {}, 0
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            places[name] = end, value
            end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8)
    for start, tensor in places.values():
        packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return packed, places


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of one process's device in FLOP/s, or None if it is not known.

    For GPUs the data sheet's 16-bit rate, whatever the dtype; for others, CPUs too, what `cloze doctor` has measured.
    """
    return data_sheet_flops(device) or measured_flops(device, dtype)


def data_sheet_of(device: torch.device) -> DataSheet | None:
    """The data sheet of a GPU, or None."""
    return find_data_sheet(device_name(device))


def data_sheet_flops(device: torch.device) -> float | None:
    """Peak in FLOP/s of 16-bit matrix products by the GPU's data sheet, or None; for a slice (MIG) the share of its
    multiprocessors.
    """
    sheet = data_sheet_of(device)
    if sheet is None or not is_slice(device_name(device)):
        return None if sheet is None else sheet.flops
    return sheet.flops * torch.cuda.get_device_properties(device).multi_processor_count / sheet.processors


def measured_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Best FLOP/s of matrix products that `cloze doctor` has measured and saved, or None."""
    return saved_rates().get(rate_key(device, dtype), 0.0) * _units(device) or None


def measure_flops(device: torch.device, *dtypes: torch.dtype) -> dict[torch.dtype, float]:
    """Best FLOP/s of square products by dtype, with the threads that this process has; takes some _SECONDS, also on a
    processor that has no instructions for a dtype.
    """
    end = time.monotonic() + _SECONDS
    numbers = torch.Generator(device).manual_seed(0)  # a generator of its own: the run's random state does not change
    matrices = [
        torch.randn(size, size, device=device, generator=numbers).to(dtype)
        for dtype in dtypes
        for size in _SIZES[device.type]
    ]
    best, quickest = dict.fromkeys(dtypes, 0.0), dict.fromkeys(dtypes, 0.0)
    while True:
        for matrix in matrices:
            dtype, size = matrix.dtype, len(matrix)
            # Asked each time: other processes may have slowed down all products until now.
            if size == _SIZES[device.type][0] or 2 * size**3 <= quickest[dtype] * _SECONDS / 4:
                rate, of_one = _rate(matrix)
                best[dtype], quickest[dtype] = max(best[dtype], rate), max(quickest[dtype], of_one)
        if time.monotonic() > end:
            return best
        time.sleep(_PAUSE_SECONDS)


def _rate(matrix: torch.Tensor) -> tuple[float, float]:
    """FLOP/s of one trial, and of its fastest product."""
    flops = 2 * len(matrix) ** 3
    seconds: list[float] = []
    synchronize(matrix.device)
    while sum(seconds) < _TRIAL_SECONDS:
        began = time.perf_counter()
        matrix @ matrix
        synchronize(matrix.device)
        seconds.append(time.perf_counter() - began)
    return flops * len(seconds) / sum(seconds), flops / min(seconds)


def bf16_slowdown(device: torch.device) -> float:
    """Seconds of a product in bf16 over those of one in fp32 on a CPU, by trials of some 0.01 s, on one without
    instructions for bf16 0.3 s; 0 on a GPU.
    """
    if device.type != "cpu":
        return 0.0
    numbers = torch.Generator().manual_seed(0)  # the run's random state does not change
    product = torch.randn(_SMALL, _SMALL, generator=numbers)
    seconds = []
    for matrix in (product.to(torch.bfloat16), product):
        trials = []
        for _ in range(_SMALL_TRIALS):
            began = time.perf_counter()
            matrix @ matrix
            trials.append(time.perf_counter() - began)
        seconds.append(min(trials))  # the first one chooses the kernel; other processes only slow one down
    return seconds[0] / seconds[1]


def keep_measured(device: torch.device, rates: dict[torch.dtype, float]) -> dict[torch.dtype, float]:
    """Save measured FLOP/s for this user's runs, each unless a higher rate is saved already.

    Returns:
        The saved rates.

    Raises:
        UserError: the file can't be written.
    """
    units = _units(device)
    kept = keep_rates({rate_key(device, dtype): rate / units for dtype, rate in rates.items()})
    return {dtype: rate * units for dtype, rate in zip(rates, kept, strict=True)}


def keep_rates(rates: dict[str, float]) -> list[float]:
    """Write the maximum of each rate and its saved value.

    Returns:
        The saved values.
    """
    before = saved_rates()
    kept = {key: max(rate, before.get(key, 0.0)) for key, rate in rates.items()}
    publish_json(_file(), before | kept)
    return list(kept.values())


def peak_warning(device: torch.device) -> str:
    """The warning for a run that is faster than `peak_flops`: which peak is wrong, and how it is corrected."""
    if data_sheet_flops(device) is not None:
        return (
            f"the data sheet's rate for {device_name(device)!r} in launch/system/data_sheets.py is too low; "
            "correct it there"
        )
    return (
        f"the peak in {_file()} was measured while the machine was busy, or clocked lower than now; it is measured "
        "again, and the higher value kept"
    )


def measured_anew(device: torch.device, dtype: torch.dtype, keep: bool) -> float | None:
    """Peak in FLOP/s, measured again, or None for a device with a data sheet; takes _SECONDS.

    Args:
        keep: whether this process saves it for other runs, if it can.
    """
    if data_sheet_flops(device) is not None:
        return None
    rates = measure_flops(device, dtype)
    if keep:
        with contextlib.suppress(UserError):  # not a reason to end a run
            keep_measured(device, rates)
    return rates[dtype]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _units(device: torch.device) -> int:
    """The number that a rate is divided by before it is saved: 1 for a GPU; on a CPU the threads, whose number differs
    between runs.
    """
    return torch.get_num_threads() if device.type == "cpu" else 1


def rate_key(device: torch.device, what: torch.dtype | str) -> str:
    return f"{device_name(device) if device.type == 'cuda' else _processor()} {what}"


def _processor() -> str:
    """Model name of the CPU; Python's `platform` knows it on few systems only."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()  # the second starts a process


def processor_features() -> str:
    """Names of the CPU's sets of instructions, as Linux lists them; elsewhere empty."""
    return _cpuinfo("flags") or _cpuinfo("Features") or ""  # x86; ARM


def _cpuinfo(field: str) -> str | None:
    """A field of Linux's description of the first CPU, or None."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == field), None)


def _file() -> Path:
    return cache_folder() / "matmul-flops.json"


def saved_rates() -> dict[str, float]:
    """FLOP/s a GPU or a thread, by device and dtype, and bytes/s; empty where nothing was measured."""
    return {name: float(rate) for name, rate in fields_if_readable(_file()).items() if is_number(rate) and rate > 0}
