"""Rank and world size from each launcher's variables."""

import pytest

from cloze.launch.system.environment.launchers import Environment, first_host, read_environment
from cloze.pipeline.errors import UserError

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_one_process_by_hand():
    environment = read_environment({})
    assert (environment.rank, environment.world_size, environment.launcher) == (0, 1, "single")


def test_torchrun_srun_and_mpirun():
    torchrun = read_environment({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **ADDRESS})
    assert (torchrun.rank, torchrun.local_rank, torchrun.world_size, torchrun.launcher) == (3, 1, 4, "torchrun")
    assert not torchrun.is_main
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
    srun = read_environment({**slurm, **ADDRESS})
    assert (srun.rank, srun.launcher) == (2, "slurm")
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert read_environment({**mpi, **ADDRESS}).launcher == "mpi"


def test_mpirun_needs_no_address_on_one_machine():
    """Each job meets at a port of its own. What MPICH and Intel MPI set tells no job: they want an address."""
    mpi = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-node1-17@1",
    }
    found = [read_environment(mpi), read_environment({**mpi, "PMIX_NAMESPACE": "prterun-node1-18@1"})]
    assert {environment.address for environment in found} == {"127.0.0.1"}
    assert len({environment.port for environment in found}) == 2
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not set"):
        read_environment({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    hydra = {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert read_environment({**hydra, **ADDRESS}) == Environment(1, 1, 2, "hydra", "node1", "29500")
    with pytest.raises(UserError, match="hydra started 2 processes but MASTER_ADDR and MASTER_PORT are not set"):
        read_environment(hydra)


def test_mpirun_inside_a_slurm_job_and_srun_that_speaks_pmi():
    """Daemons of mpirun are tasks of srun: theirs are other ranks. With --mpi=pmi2 srun sets PMI_RANK by itself."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
    assert (read_environment({**slurm, **mpi, **ADDRESS}).rank, read_environment({**slurm, **ADDRESS}).rank) == (5, 0)
    assert read_environment({**slurm, "PMI_RANK": "0", "PMI_SIZE": "2", **ADDRESS}).launcher == "slurm"


def test_srun_needs_no_address():
    """Slurm says where task 0 is; each step of a job meets at a port of its own; what is exported counts more."""
    variables = {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1",
    }
    environment = read_environment(variables)
    assert (environment.address, environment.port) == ("gpu07", "23457")
    assert read_environment({**variables, **ADDRESS}).address == "node1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("gpu2,gpu3", "gpu2"),
        ("gpu[07-09,12]", "gpu07"),
        ("r[1-2]n[3,5]-ib,x", "r1n3-ib"),
        ("a-b[004]", "a-b004"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, first):
    assert first_host(nodes) == first


def test_torchrun_inside_a_slurm_job_counts_as_torchrun():
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "2",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        **ADDRESS,
    }
    environment = read_environment(variables)
    assert (environment.rank, environment.world_size, environment.launcher) == (5, 8, "torchrun")


def test_plain_python_inside_an_sbatch_script_is_one_process():
    variables = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
    environment = read_environment(variables)
    assert (environment.world_size, environment.launcher) == (1, "single")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "LOCAL_RANK"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "found 'x'"),
        ({"RANK": "²", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "found '²'"),
        ({"RANK": "1" * 5000, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "expected a whole number"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **ADDRESS}, "must be less than the world size"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
    ],
)
def test_incomplete_variables_are_named(variables, expected):
    with pytest.raises(UserError, match=expected):
        read_environment(variables)
