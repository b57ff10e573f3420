"""DeepSpeed's own AdamW, whose kernels are compiled where it is first used."""

import contextlib
import hashlib
import importlib.util
import io
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder.builder import OpBuilder

from cloze.launch.engine.optimizers.groups import Group
from cloze.launch.system.console import doing
from cloze.launch.system.devices import processor_features
from cloze.launch.system.environment.compilers import cuda_architectures
from cloze.launch.system.environment.folders import extensions_folder, extensions_in
from cloze.pipeline.errors import UserError, reason_of
from cloze.pipeline.storage import ASIDE, clear, holding, readable_errors, sync_file

Loaded = TypeVar("Loaded")
_LOOK_SECONDS = 0.2  # between two looks whether another process has ended its compilation, which takes minutes


def compiled_adam(groups: list[Group], on_cpu: bool, **constants: Any) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam (needs g++) or FusedAdam (needs the CUDA toolkit of torch's version), compiled when it is first
    used on a machine; both need ninja.

    Raises:
        UserError: the kernel cannot be compiled here.
    """
    kind, operation, compiler = (
        (DeepSpeedCPUAdam, "cpu_adam", "g++")
        if on_cpu
        else (FusedAdam, "fused_adam", "nvcc of the CUDA version that torch has")
    )

    def build(library: Path | None = None) -> torch.optim.Optimizer:
        if library is not None:
            OpBuilder._loaded_ops[operation] = imported(operation, library)  # which DeepSpeed then does not compile
        with contextlib.redirect_stdout(io.StringIO()):  # the compiler's commands
            optimizer: torch.optim.Optimizer = kind(groups, **constants)
        return optimizer

    # As DeepSpeed's builder asks (load): DS_BUILD_OPS=1 of its installation may have compiled them already.
    installed = installed_ops.get(operation) and accelerator_name == get_accelerator()._name
    try:
        return build() if installed else compiled_once(kind.__name__, build)
    except UserError as error:
        raise UserError(f"{error}; TORCH_EXTENSIONS_DIR names another folder for DeepSpeed's kernels") from error
    except Exception as error:  # a compiler fails in many ways; every one means the same to the user
        raise UserError(
            f"optimizer.implementation: found deepspeed, whose {kind.__name__} could not be built "
            f"({reason_of(error)}), expected ninja and {compiler}; install them, or use "
            "--optimizer.implementation torch"
        ) from error


def compiled_once(name: str, load: Callable[[Path | None], Loaded]) -> Loaded:
    """Load an extension that torch.utils.cpp_extension compiles; compile it first where it is not yet, in one process,
    while the others of this user wait.

    torch's own lock is a file, which stays when its process is killed; every later start then waits for ever. Here the
    lock ends with its process, and what was compiled gets its name when it is whole: the compilers of a killed process
    may still write. What is whole is loaded without torch, which would need ninja, and compile again in place wherever
    another version of ninja, or another variable, makes other commands.

    Args:
        name: of the folder, and for the line that says what takes so long.
        load: loads the library that is given; None: through torch, which compiles it.

    Raises:
        UserError: the folder of compiled extensions can't be written or locked, or what is in it can't be loaded.
    """
    folder = extensions_folder() / f"cloze-{name}-{_digest_of_machine()}"
    whole = folder / "compiled"
    if os.path.lexists(whole):
        return _loaded(whole, load)
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _held(folder / "cloze.lock"):
        if os.path.lexists(whole):  # meanwhile
            return _loaded(whole, load)
        for left in folder.glob(f"{ASIDE}*"):
            clear(left, ignore_errors=True)  # compilers that still write there have their files again in an instant
        with readable_errors(folder):
            aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=folder))
        with doing() as tell, extensions_in(aside):
            tell(lambda: f"compiling {name} for this machine, once: one to two minutes")
            loaded = load(None)
        with readable_errors(folder):
            for file in filter(Path.is_file, aside.rglob("*")):
                sync_file(file)
            aside.rename(whole)
        return loaded


def _loaded(whole: Path, load: Callable[[Path | None], Loaded]) -> Loaded:
    """What `load` makes of the library in a folder of a compiled extension.

    Raises:
        UserError: there is none that can be loaded.
    """
    libraries = list(whole.glob("*/*.so"))
    try:
        if len(libraries) != 1:
            raise FileNotFoundError(f"found {len(libraries)} libraries, expected one")
        return load(libraries[0])
    except Exception as error:
        raise UserError(
            f"{whole}: can't be loaded ({reason_of(error)}); remove it, and it is compiled again"
        ) from error


def imported(name: str, library: Path) -> ModuleType:
    """The module of a compiled library.

    Raises:
        ImportError: it is none of this name.
    """
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None, "a name with the suffix of a library"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it."""
    while True:
        with holding(path) as held:
            if held:
                yield
                return
        time.sleep(_LOOK_SECONDS)


def _digest_of_machine() -> str:
    """What a compiled extension depends on beside its sources: versions, where they are installed, the processor, for
    which g++ compiles (-march=native), and the GPUs, for which nvcc does: machines of several kinds share a home.
    """
    versions = (sys.prefix, platform.python_version(), torch.__version__, deepspeed.__version__)
    gpus = {torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())}
    parts = (*versions, platform.machine(), processor_features(), *map(str, sorted(gpus)), cuda_architectures())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
