"""The device of this process: what the machine, the job and the user give it."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from cloze.launch.system.environment.launchers import Environment
from cloze.pipeline.errors import UserError

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


def visible_gpus() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES that select each GPU; empty where the CPU is used."""
    if device_type() == "cpu":
        return []
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(number) for number in range(torch.cuda.device_count())]
