"""Rank and world size from each launcher's variables."""

import contextlib
import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cloze.launch.system import environment as environment_module
from cloze.launch.system.devices import bf16_slowdown
from cloze.launch.system.environment import (
    PRIMITIVE_CACHES,
    Environment,
    bound_primitive_caches,
    device_index,
    device_type,
    first_host,
    gpu_sign,
    read_environment,
)
from cloze.model.amx import extra_rows
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import ROOT, finish, wait_until

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


def test_each_process_has_a_gpu_of_its_own():
    assert device_index(Environment(rank=5, local_rank=1, world_size=8, launcher="torchrun"), 4) == 1
    assert device_index(Environment(rank=3, local_rank=3, world_size=8, launcher="slurm"), 1) == 0
    with pytest.raises(UserError, match="found 1 GPUs on this machine"):
        device_index(Environment(rank=1, local_rank=1, world_size=2, launcher="torchrun"), 1)


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


def resident_mb() -> float:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1]) / 1024


def grows(arguments: list[str]) -> int:
    """Print by how many MB products of ever new shapes let a process grow."""
    (mode,) = arguments  # leave; bound: as a run does; capacity: without rounding row counts
    for name in PRIMITIVE_CACHES:  # of a test before this one in the process that has forked this one
        os.environ.pop(name, None)
    if mode == "capacity":
        os.environ.update(ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024", LRU_CACHE_CAPACITY="1024")
    if mode != "leave":
        bound_primitive_caches()
    torch.set_num_threads(1)
    linear = torch.nn.Linear(256, 1024).bfloat16()
    before = 0.0
    for number in range(210):
        if number == 10:
            before = resident_mb()
        count = 1000 + number
        count += extra_rows(count, False) if mode == "bound" else 0
        linear(torch.ones(count, 256, dtype=torch.bfloat16)).sum().backward()
    print(resident_mb() - before)
    return 0


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is read from /proc")
def test_products_of_ever_new_shapes_do_not_fill_the_memory():
    if bf16_slowdown(torch.device("cpu")) > 10:
        pytest.skip("this processor has no products of bf16 to compile, and takes minutes for these")
    unbounded, bound, capacity = (
        float(finish(ForkedRun([mode], main=grows))) for mode in ("leave", "bound", "capacity")
    )
    if unbounded < 30:
        pytest.skip("this processor keeps no compiled products of bf16")
    assert bound < unbounded / 2 < capacity


@pytest.mark.parametrize(
    "given",
    [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}],
)
def test_segments_expand_before_torch_is_imported_unless_the_user_has_set_the_allocator(given):
    code = (
        "import os, sys; from cloze.launch.system.environment import protect_process; protect_process(); "
        "from cloze.launch import cli; assert 'torch' not in sys.modules; "
        "import json; print(json.dumps({name: os.environ[name] for name in os.environ if 'ALLOC_CONF' in name}))"
    )
    variables = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name} | given
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_trace_does_not_slow_the_steps_after_it_unless_the_user_says_so(monkeypatch):
    for given, expected in ((None, "1"), ("0", "0")):
        monkeypatch.setattr(os, "environ", {} if given is None else {"TEARDOWN_CUPTI": given})
        environment_module.protect_process()
        assert os.environ["TEARDOWN_CUPTI"] == expected


@pytest.fixture
def devices(tmp_path):
    """A folder like /dev, of a machine with one GPU."""
    for name in ("nvidia0", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_gpus_that_the_job_or_the_machine_has(devices, tmp_path, monkeypatch):
    """Variables come before devices, and no GPU is expected where the user or Slurm hides them."""
    assert gpu_sign({}, devices) == str(devices / "nvidia0")
    assert gpu_sign({}, tmp_path / "none") is None
    assert gpu_sign({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path / "none") == "CUDA_VISIBLE_DEVICES=2,3"
    assert gpu_sign({"SLURM_GPUS_ON_NODE": "8"}, tmp_path / "none") == "SLURM_GPUS_ON_NODE=8"
    for hidden in ("", "-1", "NoDevFiles"):
        assert gpu_sign({"CUDA_VISIBLE_DEVICES": hidden, "SLURM_GPUS_ON_NODE": "8"}, devices) is None

    def refuse(number):
        def opened(path, flags):
            raise OSError(number, os.strerror(number))

        return opened

    monkeypatch.setattr(environment_module.os, "open", refuse(errno.EPERM))
    assert gpu_sign({}, devices) is None, "control groups give the GPU to another job"
    monkeypatch.setattr(environment_module.os, "open", refuse(errno.EIO))
    assert gpu_sign({}, devices) == str(devices / "nvidia0"), "a GPU that is broken is one"


def test_a_driver_too_old_is_an_error_and_no_run_on_the_cpu(monkeypatch):
    """A build with CUDA that finds no GPU where the job has some; DS_ACCELERATOR=cpu says that the CPU is meant."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert device_type() == "cpu", "a build for the CPU was installed on purpose"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(environment_module, "_driver", lambda: "535.104.05")
    with pytest.raises(UserError, match=r"^CUDA_VISIBLE_DEVICES=0: .*driver 535\.104\.05.*CUDA 13\.0 needs \(580"):
        device_type()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device_type() == "cpu"


# Each starts the next one, to the last one, a rank, which says what it is and then what stops it.
CHAIN = """
import os, signal, subprocess, sys, time
from cloze.launch.system import environment
links, folder = int(sys.argv[2]), sys.argv[3]
open(f"{folder}/{links}", "w").write(str(os.getpid()))
if links:
    sys.exit(subprocess.call([sys.executable, "-c", sys.argv[1], sys.argv[1], str(links - 1), folder]))
def stop(number, frame):
    open(f"{folder}/stopped", "w").close()
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
environment._LOOK_SECONDS = 0.05
environment.end_with_parent()
open(f"{folder}/ready", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("variable", "killed", "stops"),
    [
        ("TORCHELASTIC_RUN_ID", 1, True),
        ("CROSS_RANK", 1, True),  # deepspeed's launcher
        ("CROSS_RANK", 2, True),  # the `deepspeed` that has started it
        ("BY_HAND", 1, False),  # a shell that may end before what it has started
    ],
)
def test_a_rank_stops_when_its_launcher_is_killed(tmp_path, variable, killed, stops):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", variable: "1"}
    command = [sys.executable, "-c", CHAIN, CHAIN, str(killed), str(tmp_path)]
    first = subprocess.Popen(command, env={**os.environ, **variables}, cwd=ROOT)
    try:
        wait_until((tmp_path / "ready").exists)
        first.kill()
        first.wait()
        if stops:
            wait_until((tmp_path / "stopped").exists)
        else:
            time.sleep(0.3)
            assert not (tmp_path / "stopped").exists()
    finally:
        for path in tmp_path.glob("[0-9]"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def test_the_memory_of_a_job_has_room_for_the_workers_that_compile(monkeypatch):
    """Eight ranks on a machine of 192 cores would start 32 workers each."""
    monkeypatch.setattr(environment_module, "usable_cores", lambda: 192)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    environment_module.bound_compile_workers(Environment(world_size=8))
    workers = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
    assert workers == 4
    needed = 8 * (5 + workers * 0.5)  # GB of a rank, and of a worker, which has imported torch
    needed += 2 * 16  # of a model of a billion parameters while it is saved: pinned blocks are powers of two
    for name in ("multi-node", "multi-node-store", "single-node"):
        text = (Path(environment_module.__file__).parents[1] / f"clusters/slurm-{name}.sbatch").read_text()
        given = re.search(r"--mem=(\d+)G", text)
        assert given is not None and int(given[1]) >= 1.5 * needed, "with as much again for the page cache of shards"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    environment_module.bound_compile_workers(Environment(world_size=8))
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    """As one of a number alone in a container; a folder named ~ below the working folder would be no cache."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/of/user")
    assert environment_module.cache_folder() == Path("/of/user/.cache/cloze")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match="HOME: found none in the environment, .*set HOME or XDG_CACHE_HOME"):
        environment_module.cache_folder()
