"""Rank, world size, device and scheduler, read from the environment: the only file that touches os.environ."""

import codecs
import contextlib
import ctypes
import errno
import locale
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cloze.launch.system.cores import usable_cores
from cloze.pipeline import allocator
from cloze.pipeline.bounds import whole_number
from cloze.pipeline.errors import UserError

# Variables that name (rank, local rank, world size), by launcher, the most specific first: in a job of Slurm mpirun has
# its daemons started by srun.
LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # also `deepspeed`
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    "hydra": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),  # MPICH, Intel MPI
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # srun
}
# Without these variables the others are ignored: a plain `python` inside an sbatch script sees SLURM_PROCID too, and
# only srun also sets SLURM_STEP_ID; srun itself may set PMI_RANK.
_MARKS = {"slurm": "SLURM_STEP_ID", "hydra": "MPI_LOCALRANKID"}


def open_standard_streams() -> None:
    """Open what a wrapper or a daemon has closed (`>&-`) as the null device: the next file that is opened would take
    its place, and what is printed would be written into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def read_and_write_utf8() -> None:
    """Begin again in Python's UTF-8 mode where the locale has another encoding, as en_US without .UTF-8 on some
    clusters: what is printed (bars, tokens, other scripts) and read (configurations) is UTF-8. PYTHONUTF8=0 keeps the
    locale's.
    """
    if "PYTHONUTF8" not in os.environ and codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@dataclass(frozen=True)
class Environment:
    """This process among all processes of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "single"
    """torchrun, mpi, hydra, slurm, or single: one process, started by hand."""
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: str = "0"
    """Port on which rank 0 listens for the others."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Environment of this process.

    Raises:
        UserError: a launcher's variables are incomplete or contradict each other.
    """
    variables = os.environ if variables is None else variables
    for launcher, names in LAUNCHERS.items():
        if names[0] not in variables or _MARKS.get(launcher, names[0]) not in variables:
            continue
        values = []
        for name in names:
            text = variables.get(name, "")
            number = whole_number(text)
            if number is None:
                raise UserError(
                    f"environment variable {name}: found {text!r}, expected a whole number, since "
                    f"{names[0]} is set; start with torchrun, deepspeed or srun, or unset {names[0]}"
                )
            values.append(number)
        rank, local_rank, world_size = values
        if rank >= world_size:
            raise UserError(
                f"environment variables {names[0]}={rank} and {names[2]}={world_size}: the rank must be "
                "less than the world size; check the launcher's command line"
            )
        if launcher == "slurm" and world_size == 1:
            break
        address, port = _meeting_point(launcher, world_size, variables)
        return Environment(rank, local_rank, world_size, launcher, address, port)
    return Environment()


def _meeting_point(launcher: str, world_size: int, variables: Mapping[str, str]) -> tuple[str, str]:
    """Host and port of rank 0: from MASTER_ADDR and MASTER_PORT, else from Slurm, or on one machine from Open MPI;
    empty for a single process.
    """
    known = {"address": Environment.address, "port": Environment.port} if world_size == 1 else {}
    hosts = variables.get("SLURM_STEP_NODELIST")
    if launcher == "slurm" and hosts:
        # Task 0 runs on the first host. Steps of one job, and most jobs on one host, get ports of their own, below
        # those that Linux gives to outgoing connections (32768 and above).
        numbers = [whole_number(variables.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
        known = {"address": first_host(hosts), "port": str(20000 + sum(filter(None, numbers)) % 10000)}
    job = variables.get("PMIX_NAMESPACE")
    if launcher == "mpi" and world_size > 1 and job and variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(world_size):
        known = {"address": "127.0.0.1", "port": str(20000 + zlib.crc32(job.encode()) % 10000)}
    address = variables.get("MASTER_ADDR") or known.get("address")
    port = variables.get("MASTER_PORT") or known.get("port")
    if not address or not port:
        raise UserError(
            f"{launcher} started {world_size} processes but MASTER_ADDR and MASTER_PORT are not set; "
            "export both, the host of rank 0 and a free port there, or start with torchrun"
        )
    return address, port


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation: `gpu[07-09,12],cpu1` begins with gpu07."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


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


# The variable with the id of the process that started this one as a rank and at whose end this one ends.
_PARENT = "CLOZE_PARENT"
# Variables of ranks whose parent process watches over them: torchrun's agent, deepspeed's launcher of a machine. (srun
# and mpirun end the ranks of a lost launcher themselves.)
_TORCHRUN, _DEEPSPEED = "TORCHELASTIC_RUN_ID", "CROSS_RANK"
_PR_SET_PDEATHSIG = 1  # prctl(2)
# What becomes of this process's launcher: the process that watches over it, and whether that was left alone itself.
_WATCHING: dict[str, int] = {}
_LEFT_ALONE = threading.Event()
# The threads of a killed launcher end one after another. At the end of the one that has started a rank the kernel sends
# the signal, while another one is still the rank's parent.
_DYING_SECONDS = 0.5
_LOOK_SECONDS = 1.0  # between two looks at the `deepspeed` that has started the launcher


def end_with(process: int) -> dict[str, str]:
    """Environment variables for a child process that must stop when `process` ends, for whatever reason."""
    return {_PARENT: str(process)}


def end_with_parent() -> None:
    """Stop this process, as by SIGTERM, when the process that started it as a rank ends, even if that was killed; on
    Linux only. Otherwise ranks would train on without anybody who waits for them, and hold their run.
    """
    parent = whole_number(os.environ.pop(_PARENT, ""))  # not inherited by processes that this one starts
    launchers = {_TORCHRUN, _DEEPSPEED} & os.environ.keys() if "LOCAL_RANK" in os.environ else set()
    if not (parent or launchers) or not sys.platform.startswith("linux"):
        return
    _WATCHING["parent"] = parent or os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended already. Without torchrun's agent or deepspeed's launcher the ranks can't meet then.
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
    if _DEEPSPEED in launchers and not parent:
        launcher = os.getppid()
        threading.Thread(target=_stop_when_orphaned, args=(launcher, _parent_of(launcher)), daemon=True).start()


def _stop_when_orphaned(launcher: int, parent: int | None) -> None:
    """Stop this process when its launcher has lost its own parent: deepspeed's does not end with the `deepspeed` (or
    the ssh session) that has started it.
    """
    while (now := _parent_of(launcher)) == parent and now is not None:
        time.sleep(_LOOK_SECONDS)
    if now is not None:  # otherwise the launcher has ended, and the kernel has sent SIGTERM
        _LEFT_ALONE.set()
        os.kill(os.getpid(), signal.SIGTERM)


def has_lost_launcher() -> bool:
    """Whether the process that has started this one as a rank is gone, and has caused a SIGTERM by that. Waits a while
    if there is a launcher, which may be about to end.
    """
    end = time.monotonic() + _DYING_SECONDS
    while not _LEFT_ALONE.is_set() and os.getppid() == _WATCHING.get("parent"):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return _LEFT_ALONE.is_set() or "parent" in _WATCHING


def _parent_of(process: int) -> int | None:
    """The parent of a process; None if it has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def forbid_pickled_code() -> None:
    """Let torch load nothing but tensors in this process, also where DeepSpeed hard-codes weights_only=False."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"


# The oldest driver, by its main number, of each main version of CUDA (CUDA's release notes, "minor version
# compatibility").
_OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}


def device_type() -> str:
    """`cuda` where torch finds a GPU, else `cpu`; DS_ACCELERATOR=cpu keeps everything off the GPU.

    Raises:
        UserError: a torch with CUDA finds none although the machine or the job has some.
    """
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    built = torch.version.cuda
    sign = gpu_sign() if built else None
    if built and sign:
        needs = _OLDEST_DRIVERS.get(built.split(".")[0])
        raise UserError(
            f"{sign}: found no GPU that torch {torch.__version__} can use (driver {_driver() or 'unknown'}), expected "
            f"one, with the driver that CUDA {built} needs{f' ({needs} or newer)' if needs else ''}; update the driver "
            "or install a torch that is built for it, or DS_ACCELERATOR=cpu to use the CPU"
        )
    return "cpu"


def gpu_sign(variables: Mapping[str, str] | None = None, devices: Path = Path("/dev")) -> str | None:
    """What says that this process has a GPU of NVIDIA: a variable of the user or of Slurm, or a device file that it may
    open; None without such a sign, or where CUDA_VISIBLE_DEVICES hides all of them.
    """
    variables = os.environ if variables is None else variables
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        hidden = visible.strip() in ("", "-1", "NoDevFiles")  # the last one by Slurm, to steps without a GPU
        return None if hidden else f"CUDA_VISIBLE_DEVICES={visible}"
    if variables.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        return f"SLURM_GPUS_ON_NODE={variables['SLURM_GPUS_ON_NODE']}"
    for path in sorted(devices.glob("nvidia[0-9]*")):
        try:
            os.close(os.open(path, os.O_RDWR))
        except PermissionError as error:
            if error.errno == errno.EPERM:  # a job of another user has it: the files of all are seen, its own opened
                continue
        except OSError:  # there, and not in order
            pass
        return str(path)
    return None


def _driver() -> str | None:
    """Version of the kernel's driver of NVIDIA, or None."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return None


def device_index(environment: Environment, num_devices: int) -> int:
    """Index of this process's GPU among those that it sees: the only one, or the one of its local rank.

    Raises:
        UserError: there are more processes than GPUs on this machine.
    """
    if environment.local_rank < num_devices:
        return environment.local_rank
    if num_devices == 1 and environment.launcher in ("slurm", "mpi", "hydra"):
        return 0  # `srun --gpus-per-task=1` shows each process its own GPU alone
    raise UserError(
        f"local rank {environment.local_rank}: found {num_devices} GPUs on this machine, expected one for "
        "each process; start fewer processes, or DS_ACCELERATOR=cpu to train on the CPU"
    )


def processes_on_this_machine(environment: Environment) -> int:
    """Processes of the run on this machine by the launcher's variables; without them all processes."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    given = (os.environ.get(name, "") for name in names)
    return next((number for text in given if (number := whole_number(text))), environment.world_size)


def visible_gpus() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES that select each GPU; empty where the CPU is used."""
    if device_type() == "cpu":
        return []
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(number) for number in range(torch.cuda.device_count())]


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


# Workers in which Inductor compiles at most, for each rank: a layer has some 30 kernels.
_MOST_COMPILE_WORKERS = 4


def bound_compile_workers(environment: Environment) -> None:
    """Let Inductor's workers of all processes of a machine be no more than its cores, and few: each process would
    start as many as it sees cores, up to 32, of half a gigabyte each. A user's own setting stays.
    """
    workers = max(1, min(_MOST_COMPILE_WORKERS, usable_cores() // processes_on_this_machine(environment)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))


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


def job_end_time() -> float:
    """When the scheduler ends this job, in seconds since 1970 (set by Slurm 23.02 and newer).

    Raises:
        UserError: the scheduler does not report it.
    """
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    seconds = whole_number(text)
    if seconds is None:
        raise UserError(
            f"train.stop_before_seconds: found SLURM_JOB_END_TIME={text!r} in the environment, expected "
            "the end of the job in seconds since 1970; before Slurm 23.02 export it in the job script, as "
            "launch/clusters/ does, or leave the field at null"
        )
    return float(seconds)


def cache_folder() -> Path:
    """The user's cache folder (XDG base directories).

    Raises:
        UserError: the environment names none, and the user has no home folder, as one of a number alone in a container.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "cloze"
    home = os.path.expanduser("~")
    if home == "~":
        raise UserError(
            f"HOME: found none in the environment, and no user of the number {os.getuid()}, expected a folder for "
            "caches; set HOME or XDG_CACHE_HOME"
        )
    return Path(home) / ".cache" / "cloze"


_EXTENSIONS = "TORCH_EXTENSIONS_DIR"


def extensions_folder() -> Path:
    """Where what torch.utils.cpp_extension compiles is kept: a user's own choice, or the cache folder."""
    given = os.environ.get(_EXTENSIONS)
    return Path(given) if given else cache_folder() / "extensions"


@contextlib.contextmanager
def extensions_in(folder: Path) -> Iterator[None]:
    """Context in which torch.utils.cpp_extension compiles in a folder, and loads from it."""
    given = os.environ.get(_EXTENSIONS)
    os.environ[_EXTENSIONS] = str(folder)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_EXTENSIONS]
        else:
            os.environ[_EXTENSIONS] = given


def child_variables(**changes: str) -> dict[str, str]:
    """This process's environment with changes, without a launcher's variables: for a command that is a new run."""
    taken = {name for names in LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in taken} | changes
