"""Rank, world size, device and scheduler, read from the environment: the only file that touches os.environ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import UserError

# Variables that name (rank, local rank, world size), by launcher, the most specific first.
LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE"),  # also `deepspeed`
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),  # srun
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


@dataclass(frozen=True)
class Environment:
    """Where this process stands among all processes of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "single"
    """torchrun, slurm, mpi, or single: one process, started by hand."""
    scheduler: str = "none"
    """slurm, kubernetes or none: who may take the machine away."""
    rendezvous: str | None = None
    """`host:port` of rank 0; None for a single process, which needs none."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Environment of this process.

    Raises:
        UserError: a launcher's variables are incomplete or contradict each other.
    """
    variables = os.environ if variables is None else variables
    scheduler = (
        "slurm" if "SLURM_JOB_ID" in variables else
        "kubernetes" if "KUBERNETES_SERVICE_HOST" in variables else "none"
    )
    for launcher, names in LAUNCHERS.items():
        # A plain `python` inside an sbatch script sees SLURM_PROCID too: only srun sets SLURM_STEP_ID with it.
        if names[0] not in variables or (launcher == "slurm" and "SLURM_STEP_ID" not in variables):
            continue
        values = []
        for name in names:
            text = variables.get(name, "")
            if not text.isdigit():
                raise UserError(f"environment variable {name}: found {text!r}, expected a whole number, since "
                                f"{names[0]} is set; start with torchrun, deepspeed or srun, or unset {names[0]}")
            values.append(int(text))
        rank, local_rank, world_size = values
        if rank >= world_size:
            raise UserError(f"environment variables {names[0]}={rank} and {names[2]}={world_size}: the rank must be "
                            "less than the world size; check the launcher's command line")
        if launcher == "slurm" and world_size == 1:
            break
        host = variables.get("MASTER_ADDR")
        port = variables.get("MASTER_PORT")
        if world_size > 1 and not (host and port):
            raise UserError(f"{launcher} started {world_size} processes but MASTER_ADDR and MASTER_PORT are not set; "
                            "export both (see launch/clusters/) or start with torchrun")
        rendezvous = f"{host}:{port}" if host and port else None
        return Environment(rank, local_rank, world_size, launcher, scheduler, rendezvous)
    return Environment(scheduler=scheduler)


def protect_process() -> None:
    """Set what every command wants, before torch, DeepSpeed or tokenizers are imported.

    - TORCH_FORCE_WEIGHTS_ONLY_LOAD: DeepSpeed hard-codes weights_only=False in its loads; this forbids pickled code.
    - TOKENIZERS_PARALLELISM: threads of `tokenizers` deadlock in forked children (datasets#620).
    """
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def prepare_deepspeed(environment: Environment) -> None:
    """Set what DeepSpeed reads from the environment; call before importing it.

    - the launcher's names: DeepSpeed reads RANK, LOCAL_RANK and WORLD_SIZE whoever started the process.
    - DS_ACCELERATOR: its own guess warns, and can pick a device that torch was not built for.
    """
    import torch

    os.environ["RANK"] = str(environment.rank)
    os.environ["LOCAL_RANK"] = str(environment.local_rank)
    os.environ["WORLD_SIZE"] = str(environment.world_size)
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    if environment.world_size == 1:
        # DeepSpeed asks for an address even where one process needs none.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    elif not on_gpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # torchrun sets one thread for any number of processes, deepspeed and srun leave every process all cores:
        # share them out instead. A user who sets another number means it.
        names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        processes_here = next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()),
                              environment.world_size)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes_here))


def child_variables(**changes: str) -> dict[str, str]:
    """This process's variables with changes, without what names a rank: for a command started as a new run."""
    taken = {name for names in LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in taken} | changes
