"""Rank, world size and address of this process, from the variables of torchrun, deepspeed, srun and mpirun."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

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


def processes_on_this_machine(environment: Environment) -> int:
    """Processes of the run on this machine by the launcher's variables; without them all processes."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    given = (os.environ.get(name, "") for name in names)
    return next((number for text in given if (number := whole_number(text))), environment.world_size)


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


def child_variables(**changes: str) -> dict[str, str]:
    """This process's environment with changes, without a launcher's variables: for a command that is a new run."""
    taken = {name for names in LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in taken} | changes
