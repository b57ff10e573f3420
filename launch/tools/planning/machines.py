"""Machines of a plan: devices by their data sheets or by the measurements of `cloze doctor`, and their links."""

import math
from dataclasses import dataclass

import torch

from cloze.launch.system import devices
from cloze.launch.system.data_sheets import DataSheet, named_sheet
from cloze.launch.system.environment.gpus import device_type
from cloze.launch.system.memory import available_bytes, resident_bytes
from cloze.launch.tools.planning.assumptions import BANDWIDTH, BEST_PRODUCT, FLASH, PCIE, SUSTAINED
from cloze.launch.tools.planning.kernels import KernelRates, measured_kernels
from cloze.pipeline.errors import UserError


@dataclass(frozen=True)
class Machine:
    """The figures of one process's device."""

    name: str
    flops: float
    """Peak of 16-bit products, FLOP/s: what MFU is a share of."""
    bandwidth: float
    """Attainable bandwidth of its memory, bytes/s."""
    memory_bytes: float
    processors: int
    architecture: str
    best_product: float
    """Share of `flops` that products of the best shapes reach; of a CPU those of linear maps."""
    link: float
    """Bandwidth to the other devices of the machine, bytes/s in one direction."""
    has_flash: bool
    origin: str
    """Source of the figures."""
    elements: float = math.inf
    """Elements/s of GELU on a CPU, whose pointwise operations are bound by arithmetic too."""
    batched_product: float = 0.0
    """Share of `flops` that attention's products reach on a CPU."""

    @property
    def is_cpu(self) -> bool:
        return self.architecture == "cpu"

    @property
    def flash(self) -> tuple[float, float]:
        """Shares of `flops` of flash attention, forward and backward."""
        return FLASH.get(self.architecture, FLASH["ampere"])


def find_machine(name: str, dtype: torch.dtype = torch.bfloat16) -> Machine:
    """The device of this name: of a data sheet (h100, a100-80gb-pcie), `cpu`, or `this` one.

    Args:
        dtype: of the products, for a CPU, whose rates are measured for each.

    Raises:
        UserError: there is no such device, or there are no measurements of this one.
    """
    if name == "this":
        return _this(torch.device(device_type()), dtype)
    if name == "cpu":
        return _this(torch.device("cpu"), dtype)
    return of_data_sheet(named_sheet(name))


def of_data_sheet(sheet: DataSheet) -> Machine:
    """A Machine from a data sheet."""
    return Machine(
        name=sheet.name,
        flops=sheet.flops,
        bandwidth=sheet.bandwidth * BANDWIDTH,
        memory_bytes=sheet.memory_bytes,
        processors=sheet.processors,
        architecture=sheet.architecture,
        best_product=SUSTAINED * BEST_PRODUCT[sheet.architecture],
        link=sheet.link,
        has_flash=sheet.has_flash,
        origin=sheet.source,
    )


def measured(device: torch.device, product: float, rates: KernelRates, memory_bytes: float) -> Machine:
    """A Machine from measurements: its best product (FLOP/s) and its kernels."""
    bandwidth = rates.copy
    if device.type == "cpu":
        return Machine(
            name="CPU",
            flops=product,
            bandwidth=bandwidth,
            memory_bytes=memory_bytes,
            processors=1,
            architecture="cpu",
            best_product=rates.linear / product,
            link=bandwidth,
            has_flash=False,
            origin="measured",
            elements=rates.gelu,
            batched_product=rates.batched / product,
        )
    name, sheet = devices.device_name(device), devices.data_sheet_of(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count  # of a slice, its own
    if sheet is None:  # measured alone: the peak is then what was reached
        return Machine(
            name=name,
            flops=product,
            bandwidth=bandwidth,
            memory_bytes=memory_bytes,
            processors=processors,
            architecture="ampere",
            best_product=SUSTAINED,
            link=PCIE,
            has_flash=torch.cuda.get_device_capability(device) >= (8, 0),
            origin="measured",
        )
    peak = devices.data_sheet_flops(device)
    assert peak is not None, "it has a data sheet"
    return Machine(
        name=name,
        flops=peak,
        bandwidth=bandwidth,
        memory_bytes=memory_bytes,
        processors=processors,
        architecture=sheet.architecture,
        best_product=SUSTAINED * product / peak,
        link=sheet.link,
        has_flash=sheet.has_flash,
        origin=f"{sheet.source}; product and bandwidth measured here",
    )


def _this(device: torch.device, dtype: torch.dtype) -> Machine:
    dtype = dtype if device.type == "cpu" else torch.bfloat16
    product, rates = devices.measured_flops(device, dtype), measured_kernels(device, dtype)
    if product is None or rates is None:
        sheet = devices.data_sheet_of(device) if device.type == "cuda" else None
        if sheet is None:
            raise UserError(
                f"plan.device: found no measurement of {devices.device_name(device)}, expected one; run "
                "`cloze doctor` first"
            )
        return of_data_sheet(sheet)
    if device.type == "cuda":
        return measured(device, product, rates, torch.cuda.get_device_properties(device).total_memory)
    return measured(device, product, rates, (resident_bytes() or 0) + (available_bytes() or 0))
