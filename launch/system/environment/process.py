"""What is set in a process before torch, DeepSpeed and others are imported, most of it as variables that they read."""

import codecs
import contextlib
import locale
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cloze.launch.system.cores import usable_cores
from cloze.launch.system.environment.compilers import bound_compile_workers
from cloze.launch.system.environment.gpus import device_type
from cloze.launch.system.environment.launchers import Environment, processes_on_this_machine, read_environment
from cloze.launch.system.streams import outlive_terminals
from cloze.pipeline import allocator
from cloze.pipeline.bounds import whole_number


def open_standard_streams() -> None:
    """Open what a wrapper or a daemon has closed (`>&-`) as the null device: the next file that is opened would take
    its place, and what is printed would be written into it. What is printed on a terminal that is closed goes nowhere.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    outlive_terminals()


def read_and_write_utf8() -> None:
    """Begin again in Python's UTF-8 mode where the locale has another encoding, as en_US without .UTF-8 on some
    clusters: what is printed (bars, tokens, other scripts) and read (configurations) is UTF-8. PYTHONUTF8=0 keeps the
    locale's.
    """
    if "PYTHONUTF8" not in os.environ and codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


_ALLOCATOR_SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def protect_process() -> None:
    """Set the variables that every command needs, before torch, DeepSpeed or tokenizers are imported.

    - TOKENIZERS_PARALLELISM: threads of `tokenizers` deadlock in forked children (datasets#620).
    - KINETO_LOG_LEVEL: torch.profiler prints when it starts and stops; above 5 it does not.
    - TEARDOWN_CUPTI: without it steps after a trace stay 10 to 20% slower on a GPU (pytorch#146604); it crashed with
      CUDA graphs, which nothing here uses.
    - PYTORCH_ALLOC_CONF: batches of changing lengths fragment the CUDA allocator's segments; expandable segments avoid
      it. Read when CUDA starts; a user's own setting, under the older names too, wins.
    - GOMP_SPINCOUNT: torch's threads on a CPU wait for each other after each part of a step, by turning 300,000 times
      before they sleep. Where other processes have the cores, what they wait for does not run meanwhile: a step took
      four times the processor time. 100 turns are what the library takes by itself where it knows of too few cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "100")  # libgomp's manual, GOMP_SPINCOUNT
    if not _ALLOCATOR_SETTINGS & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def forbid_pickled_code() -> None:
    """Let torch load nothing but tensors in this process, also where DeepSpeed hard-codes weights_only=False."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


def prepare_process() -> Environment:
    """Prepare a process of a run before DeepSpeed is imported; returns its rank, world size and the rest."""
    environment = read_environment()
    prepare_deepspeed(environment)
    if device_type() == "cpu":
        keep_freed_pages()
        bound_primitive_caches()
    else:
        bound_compile_workers(environment)
    return environment


def prepare_deepspeed(environment: Environment) -> None:
    """Set the variables that DeepSpeed reads from the environment; call it before DeepSpeed is imported.

    - the launcher's names: DeepSpeed reads RANK, LOCAL_RANK and WORLD_SIZE with every launcher.
    - DS_ACCELERATOR: its own guess warns, and can pick a device that torch was not built for.
    """
    os.environ["RANK"] = str(environment.rank)
    os.environ["LOCAL_RANK"] = str(environment.local_rank)
    os.environ["WORLD_SIZE"] = str(environment.world_size)
    device = os.environ["DS_ACCELERATOR"] = device_type()
    # DeepSpeed asks for an address even where one process needs none.
    os.environ["MASTER_ADDR"] = environment.address
    os.environ["MASTER_PORT"] = environment.port
    if device != "cuda":
        _share_cores(environment)


def _share_cores(environment: Environment) -> None:
    """Give this process as many threads as it has cores, unless the user has chosen their number.

    torch counts the cores of the machine, also where a container may use the time of a few. With several processes
    torchrun sets one thread each, deepspeed and srun leave all cores to every process: the cores are divided instead.
    """
    import torch

    given = os.environ.get("OMP_NUM_THREADS")
    if environment.world_size == 1:
        if given is None:
            torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    elif given in (None, "1"):  # another number is a user's choice, or that of `srun --cpus-per-task`
        own = whole_number(os.environ.get("SLURM_CPUS_PER_TASK", "")) if environment.launcher == "slurm" else None
        torch.set_num_threads(own or max(1, usable_cores() // processes_on_this_machine(environment)))


# Packages that libraries import only to see whether they are installed: MLflow by DeepSpeed's autotuner, botocore by
# TensorBoard. Neither use is ours, and both take half as long as all other imports of a start.
_LOOKED_FOR = ("mlflow", "botocore")


@contextlib.contextmanager
def fewer_imports() -> Iterator[None]:
    """Context in which the packages of _LOOKED_FOR are not found, unless they are imported already; for the import of
    DeepSpeed and TensorBoard.
    """
    hidden = [name for name in _LOOKED_FOR if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: its import raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def importing_deepspeed() -> Iterator[None]:
    """Context for the import, inside a function, of what imports DeepSpeed, which takes a second; a program that began
    without it is prepared first.
    """
    if "deepspeed" not in sys.modules:
        prepare_deepspeed(read_environment())
    with fewer_imports():
        yield


def _tuned_by_user() -> bool:
    """Whether the C library's heap has settings of the user."""
    return any(name.startswith("MALLOC_") for name in os.environ)


def keep_freed_pages() -> bool:
    """Have the C library keep memory that tensors free. A user's own MALLOC_ variables win.

    Returns:
        Whether it does.
    """
    return not _tuned_by_user() and allocator.keep_freed_pages()


def share_one_arena() -> bool:
    """Have all threads share one heap. A user's own MALLOC_ variables win.

    Returns:
        Whether they do.
    """
    return not _tuned_by_user() and allocator.share_one_arena()


# oneDNN and PyTorch's layer above it each keep the last 1,024 compiled products of matrices. Batches of concatenated
# tokens hardly ever have a shape twice, so nearly all of it is never used again: the small model grew by 23 MB a step
# at first and to 3.3 GB in the end. With 32 it stays near 0.6 GB, and a step takes the same CPU time.
PRIMITIVE_CACHES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
_KEPT_PRIMITIVES = 32
# With AMX, where row counts are rounded (model/amx.py): the few sizes of some twenty products, beside those of
# attention, which are not. A process takes up to 0.5 GB more.
_KEPT_PRIMITIVES_AMX = 512


def bound_primitive_caches() -> None:
    """Limit the caches of compiled matrix products on a CPU; call it before the first product. A user's own setting
    wins.
    """
    import torch

    kept = _KEPT_PRIMITIVES_AMX if torch.cpu.get_capabilities().get("amx_bf16") else _KEPT_PRIMITIVES
    for name in PRIMITIVE_CACHES:
        os.environ.setdefault(name, str(kept))


def keep_products_deterministic() -> None:
    """Give cuBLAS workspaces of a fixed size, without which its order of sums varies; call it before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the value in cuBLAS's documentation


# What each of torch's settings of NCCL's flight recorder is called, older name last, and what it is set to
# (FlightRecorder.hpp, ProcessGroupNCCL.hpp): so many last collectives, written down when one times out.
_FLIGHT_RECORDER = (
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
_FLIGHT_RECORDER_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def record_collectives(prefix: Path) -> None:
    """Have each process write its last collectives to `prefix`RANK when one of NCCL's times out; before the processes
    join. A user's own settings win."""
    for names, value in (*_FLIGHT_RECORDER, (_FLIGHT_RECORDER_FILE, str(prefix))):
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value
