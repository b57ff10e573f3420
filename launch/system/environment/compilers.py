"""The compilers that torch uses: how many at once, and whether they are there."""

import contextlib
import os
import shutil
import subprocess

from cloze.launch.system.cores import usable_cores
from cloze.launch.system.environment.launchers import Environment, processes_on_this_machine

# Workers in which Inductor compiles at most, for each rank: a layer has some 30 kernels.
_MOST_COMPILE_WORKERS = 4


def bound_compile_workers(environment: Environment) -> None:
    """Let Inductor's workers of all processes of a machine be no more than its cores, and few: each process would
    start as many as it sees cores, up to 32, of half a gigabyte each. A user's own setting stays.
    """
    workers = max(1, min(_MOST_COMPILE_WORKERS, usable_cores() // processes_on_this_machine(environment)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))


def cuda_architectures() -> str:
    """The architectures of GPUs for which torch has nvcc compile, as the user has chosen them; empty: those of the GPUs
    here.
    """
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


def c_compiler() -> str | None:
    """The C compiler that Triton would use (its runtime/build.py), or None."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, ("clang", "gcc", "cc"))), None)


def cuda_driver_folder() -> str | None:
    """The folder with CUDA's driver library where Triton would look for it (its backends/nvidia/driver.py), or None."""
    if given := os.environ.get("TRITON_LIBCUDA_PATH"):
        return given
    known: list[str] = []
    with contextlib.suppress(OSError):
        listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, errors="replace")
        known = [line.split()[-1] for line in listing.stdout.splitlines() if "libcuda.so.1" in line]
    folders = [os.path.dirname(path) for path in known] or os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return next((folder for folder in folders if os.path.exists(os.path.join(folder, "libcuda.so.1"))), None)
