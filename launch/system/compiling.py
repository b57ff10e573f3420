"""What torch.compile needs on a GPU beside torch: proven by one kernel, looked for where that fails."""

import importlib.util
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from cloze.launch.system.environment.compilers import c_compiler, cuda_driver_folder
from cloze.pipeline.errors import reason_of


@dataclass(frozen=True)
class Lack:
    """Why nothing can be compiled."""

    what: str
    """What is missing, or how the first kernel ended."""
    advice: str
    """What brings it."""


def lack(device: torch.device) -> Lack | None:
    """Compile and run one kernel; returns why that failed, or None."""
    try:
        _compile_one(device)
    except Exception as error:  # of Inductor, Triton, the C compiler, the linker, or CUDA's assembler
        return _missing() or Lack(f"a kernel of one addition ended with {reason_of(error)!r}", "make that kernel run")
    return None


def _missing() -> Lack | None:
    """The first thing that Triton needs and this machine lacks, or None."""
    if importlib.util.find_spec("triton") is None:
        return Lack("no Triton", "pip install triton, in the version that torch's build for CUDA asks for")
    if not c_compiler():
        return Lack("no C compiler", "install gcc (Debian: gcc libc6-dev; Red Hat: gcc)")
    # Triton compiles its interface to CUDA's driver at its first kernel (triton/backends/nvidia/driver.py).
    if not (header := Path(sysconfig.get_path("include"), "Python.h")).is_file():
        return Lack(f"no {header}", "install Python's headers (Debian: python3-dev; Red Hat: python3-devel)")
    if torch.version.cuda is not None and cuda_driver_folder() is None:
        return Lack(
            "no libcuda.so.1",
            "install NVIDIA's driver (Debian: libcuda1), or let the container see it (NVIDIA container toolkit, "
            "NVIDIA_DRIVER_CAPABILITIES with compute); elsewhere, name its folder in TRITON_LIBCUDA_PATH",
        )
    return None


def _compile_one(device: torch.device) -> None:
    """Compile and run a trivial kernel; any error means that nothing can be compiled here."""
    torch.compile(lambda values: values + 1, fullgraph=True)(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
