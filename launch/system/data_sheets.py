"""NVIDIA's data sheets: dense rates, memory, links of GPUs. † recalled, not read again at the source."""

import re
from dataclasses import dataclass

from cloze.pipeline.errors import UserError, did_you_mean


@dataclass(frozen=True)
class DataSheet:
    """One GPU. Rates are dense rates; data sheets often print the rate with sparsity, which is twice as high."""

    name: str
    """As torch names the device, without NVIDIA and GeForce: the words that tell it from others."""
    flops: float
    """16-bit products with 32-bit sums, FLOP/s."""
    memory_bytes: float
    bandwidth: float
    """Bandwidth of the memory, bytes/s."""
    link: float
    """NVLink (or PCIe) to the other GPUs of a machine, bytes/s in one direction."""
    processors: int
    """Streaming multiprocessors that are enabled (architecture white papers; torch's multi_processor_count)."""
    architecture: str
    source: str

    @property
    def key(self) -> str:
        """Its name on a command line: h100-nvl."""
        return self.name.lower().replace(" ", "-")

    @property
    def has_flash(self) -> bool:
        """Whether the GPU supports flash attention: Ampere and newer."""
        return self.architecture not in ("volta", "turing")


def _sheet(
    name: str,
    tera_flops: float,
    gigabytes: float,
    gigabytes_a_second: float,
    link: float,
    processors: int,
    architecture: str,
    source: str,
) -> DataSheet:
    return DataSheet(
        name, tera_flops * 1e12, gigabytes * 1e9, gigabytes_a_second * 1e9, link * 1e9, processors, architecture, source
    )


# The first entry all of whose words are in the device's name is taken, so H100 comes after H100 NVL.
# Blackwell's data sheets print only sparse rates; the dense rate is half of them.
DATA_SHEETS = (
    _sheet("GB300", 2500, 279, 8000, 900, 152, "blackwell", "GB300 NVL72 data sheet†: 360 PF sparse of 72"),
    _sheet("B300", 2250, 270, 7700, 900, 148, "blackwell", "HGX B300 data sheet†: 36 PF sparse of 8"),
    _sheet("GB200", 2500, 186, 8000, 900, 152, "blackwell", "GB200 NVL72 data sheet: 5 PF sparse a GPU"),
    _sheet("B200", 2250, 180, 7700, 900, 148, "blackwell", "HGX B200 data sheet: 4.5 PF sparse a GPU"),
    _sheet("GH200", 989, 96, 4000, 450, 132, "hopper", "GH200 data sheet†, with HBM3"),
    _sheet("H200 NVL", 835, 141, 4800, 450, 132, "hopper", "H200 data sheet: 1,671 TF sparse"),
    _sheet("H200", 989, 141, 4800, 450, 132, "hopper", "H200 data sheet: 1,979 TF sparse"),
    _sheet("H100 NVL", 835, 94, 3900, 300, 132, "hopper", "H100 NVL data sheet: 1,671 TF sparse"),
    _sheet("H100 PCIe", 756, 80, 2000, 300, 114, "hopper", "H100 data sheet: 1,513 TF sparse"),
    _sheet("H100", 989, 80, 3350, 450, 132, "hopper", "H100 data sheet: 1,979 TF sparse"),
    _sheet("H800 PCIe", 756, 80, 2000, 200, 114, "hopper", "H800 data sheet†: the H100's, a narrower NVLink"),
    _sheet("H800", 989, 80, 3350, 200, 132, "hopper", "H800 data sheet†: the H100's, a narrower NVLink"),
    _sheet("H20", 148, 96, 4000, 450, 78, "hopper", "H20 data sheet†"),
    _sheet("A100 80GB PCIe", 312, 80, 1935, 300, 108, "ampere", "A100 data sheet"),
    _sheet("A100 40GB", 312, 40, 1555, 300, 108, "ampere", "A100 data sheet"),
    _sheet("A100 80GB", 312, 80, 2039, 300, 108, "ampere", "A100 data sheet"),
    _sheet("A100", 312, 80, 2039, 300, 108, "ampere", "A100 data sheet, of 80 GB"),
    _sheet("A800", 312, 80, 2039, 200, 108, "ampere", "A800 data sheet†: the A100's, a narrower NVLink"),
    _sheet("A30", 165, 24, 933, 100, 56, "ampere", "A30 data sheet"),
    _sheet("A40", 149.7, 48, 696, 56, 84, "ampere", "A40 data sheet"),
    _sheet("RTX A6000", 154.8, 48, 768, 56, 84, "ampere", "RTX A6000 data sheet: 309.7 TF sparse"),
    _sheet("A10G", 70, 24, 600, 32, 80, "ampere", "AWS G5†: 70 TF with 32-bit sums"),
    _sheet("A10", 125, 24, 600, 32, 72, "ampere", "A10 data sheet"),
    _sheet("RTX 3090", 71, 24, 936, 56, 82, "ampere", "GA102 white paper, 32-bit sums"),
    _sheet("L40S", 362, 48, 864, 32, 142, "ada", "L40S data sheet"),
    _sheet("L40", 181, 48, 864, 32, 142, "ada", "L40 data sheet"),
    _sheet("L4", 121, 24, 300, 32, 58, "ada", "L4 data sheet: 242 TF sparse"),
    _sheet("RTX 6000 Ada", 364, 48, 960, 32, 142, "ada", "RTX 6000 Ada data sheet†: 1,457 TF sparse in 8 bits"),
    _sheet("RTX 4090", 165, 24, 1008, 32, 128, "ada", "Ada white paper, 32-bit sums"),
    _sheet("RTX 5090", 209.5, 32, 1792, 64, 170, "rtx blackwell", "RTX Blackwell white paper†, 32-bit sums"),
    _sheet("V100", 125, 32, 900, 150, 80, "volta", "V100 data sheet"),
    _sheet("T4", 65, 16, 320, 16, 40, "turing", "T4 data sheet"),
)
# Device names that a command line accepts: this machine's, or one with a data sheet.
NAMES = ("this", "cpu", *(sheet.key for sheet in DATA_SHEETS))
# With one of these words in its name a device is a slower one than the device that the name begins with.
_OTHERS = {"laptop", "max", "d", "mobile"}  # max: Max-Q
_WORD = re.compile(r"[A-Za-z0-9.]+")


def find_data_sheet(device_name: str) -> DataSheet | None:
    """The data sheet of a device by its name in torch, such as NVIDIA A100-SXM4-80GB; None if there is none here."""
    words = {word.lower() for word in _WORD.findall(device_name)}
    if words & _OTHERS:
        return None
    return next((sheet for sheet in DATA_SHEETS if {word.lower() for word in sheet.name.split()} <= words), None)


def named_sheet(name: str) -> DataSheet:
    """The data sheet of a device by its name on a command line.

    Raises:
        UserError: there is none.
    """
    sheets = {sheet.key: sheet for sheet in DATA_SHEETS}
    if name.lower() in sheets:
        return sheets[name.lower()]
    raise UserError(
        f"plan.device: found {name!r}, expected {', '.join(NAMES[:-1])} or {NAMES[-1]}"
        + did_you_mean(name.lower(), NAMES)
    )


def is_slice(device_name: str) -> bool:
    """Whether the device is a slice of a GPU (MIG), such as NVIDIA H100 80GB HBM3 MIG 1g.10gb."""
    return " MIG " in f" {device_name} "
