"""The cluster files against the official models of Kubernetes and Kubeflow and the parsers of their tools."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cloze.launch.commands import parse
from cloze.launch.system.environment.launchers import child_variables
from tests.launching import ROOT

CLUSTERS = ROOT / "launch" / "clusters"


def misfits(value, kind: str, model, path: str = "") -> list[str]:
    """What in a parsed YAML does not fit the official model: unknown fields, wrong types, missing required ones.

    Args:
        kind: a type in the notation of the generated clients: V1PodSpec, list[V1Container], dict(str, str), int.
        model: the class of a name, or None.
    """
    if kind.startswith("list["):
        if not isinstance(value, list):
            return [f"{path}: found {value!r}, expected a list"]
        return [one for i, part in enumerate(value) for one in misfits(part, kind[5:-1], model, f"{path}[{i}]")]
    if kind.startswith(("dict(", "dict[")):
        inner = kind[5:-1].split(", ", 1)[1]
        return [one for name, part in value.items() for one in misfits(part, inner, model, f"{path}.{name}")]
    simple = {"str": str, "int": int, "bool": bool, "float": float, "object": object}
    if kind in simple:
        # YAML's numbers and truth values must be quoted where text is expected, as in "8".
        fits = isinstance(value, simple[kind]) and not (kind == "int" and isinstance(value, bool))
        return [] if fits else [f"{path}: found {value!r}, expected {kind}"]
    cls = model(kind)
    assert cls is not None, f"{path}: no model named {kind}"
    names = {cls.attribute_map[own]: own for own in cls.openapi_types}
    found = [f"{path}.{name}: unknown to {kind}" for name in value.keys() - names.keys()]
    for name in value.keys() & names.keys():
        found += misfits(value[name], cls.openapi_types[names[name]], model, f"{path}.{name}")
    try:
        cls(**{names[name]: value[name] for name in value.keys() & names.keys()})  # refuses what lacks a required field
    except (ValueError, TypeError) as error:
        found.append(f"{path}: {error}")
    return found


def kubernetes_model(kind: str):
    """A class of Kubernetes' or Kubeflow's generated client."""
    import kubernetes.client
    from kubeflow.training import models

    return getattr(kubernetes.client, kind, None) or getattr(models, kind, None)


def manifest(name: str) -> dict:
    return yaml.safe_load((CLUSTERS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kubernetes-job.yaml", "V1Job"),
        ("kubernetes-pytorchjob.yaml", "KubeflowOrgV1PyTorchJob"),
        ("kubernetes-pytorchjob-store.yaml", "KubeflowOrgV1PyTorchJob"),
    ],
)
def test_kubernetes_files_fit_the_official_models(name, kind):
    pytest.importorskip("kubernetes")
    pytest.importorskip("kubeflow.training")
    content = manifest(name)
    assert misfits(content, kind, kubernetes_model) == []
    # The check is one: a misspelt, a mistyped and a missing field are found.
    spec = content["spec"] if kind == "V1Job" else content["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = spec["template"]["spec"]["containers"][0]
    container["resource"] = container["resources"]
    container["workingDir"] = 7
    del container["volumeMounts"][0]["mountPath"]
    found = "\n".join(misfits(content, kind, kubernetes_model))
    assert "resource: unknown to V1Container" in found and "found 7, expected str" in found and "mount_path" in found


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("kubernetes-job.yaml", "/shared/shards"),
        ("kubernetes-pytorchjob.yaml", "/shared/shards"),
        ("kubernetes-pytorchjob-store.yaml", "s3://bucket/shards"),
    ],
)
def test_what_the_containers_run_is_a_command_of_ours(name, data, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = manifest(name)["spec"]
    templates = (
        [spec["template"]]
        if "template" in spec
        else [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    )
    for template in templates:
        (container,) = template["spec"]["containers"]
        command = container["command"]
        assert command[0] == "torchrun" and command[-3:] == ["-m", "cloze", "pretrain"]
        assert parse("pretrain", container["args"]).data == data
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
        # The ranks get their time to save: torchrun ends them before Kubernetes ends torchrun.
        assert int(command[command.index("--shutdown-timeout") + 1]) < template["spec"]["terminationGracePeriodSeconds"]


def test_what_skypilot_runs_is_a_command_of_ours(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(manifest("skypilot-spot.yaml")["run"].replace("\\\n", " "))
    config = parse("pretrain", words[words.index("pretrain") + 1 :])
    assert words[0] == "torchrun" and (config.data, config.output) == (
        "s3://bucket/shards",
        "s3://bucket/runs/bert-base",
    )


def test_the_hostfile_is_what_deepspeed_reads():
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(str(CLUSTERS / "hostfile")) == {"gpu01": 8, "gpu02": 8}


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.sbatch")), ids=lambda path: path.name)
def test_sbatch_files_are_bash(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    # sbatch reads no further than the first command.
    assert all(line.startswith("#") for line in lines[: directives[-1]])


@pytest.mark.parametrize(
    ("before", "written", "died", "requeued", "code"),
    [
        (None, "requeue", 137, True, 0),  # a process that died at the very end
        (None, "requeue", 75, True, 0),
        ("requeue", None, 2, False, 1),  # a start that failed
        (None, "complete", 137, False, 0),
        (None, "failed", 2, False, 1),
    ],
)
def test_several_machines_go_on_by_what_the_run_has_written(tmp_path, before, written, died, requeued, code):
    run, programs = tmp_path / "run", tmp_path / "bin"
    run.mkdir()
    programs.mkdir()
    if before:
        (run / "status.json").write_text(f'{{"state": "{before}"}}')
    write = f"""echo '{{"state": "{written}"}}' > {run}/status.json"""
    scripts = {"srun": f"{write if written else ''}\nexit {died}", "scontrol": f"echo $* > {run}/asked"}
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(CLUSTERS / "slurm-multi-node.sbatch"), str(run)],
        env=child_variables(
            PATH=f"{programs}:{os.environ['PATH']}", SLURM_JOB_ID="7", SLURM_JOB_END_TIME="1", SLURM_CPUS_PER_TASK="1"
        ),
    )
    assert done.returncode == code and (run / "asked").exists() is requeued
    assert not requeued or (run / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("element", "state"), [("3", "RUNNING node-7"), ("4", "RUNNING node-7"), ("4", "COMPLETED node-7")]
)
def test_the_elements_that_prepare_meet_where_the_first_one_runs(tmp_path, element, state):
    """At an address that the queue tells, not through a file: no disk is shared. The others are workers only."""
    programs, folder = tmp_path / "bin", tmp_path / "empty"
    programs.mkdir()
    folder.mkdir()
    for name in ("dask", "cloze", "python", "sleep"):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/called\n')
    with open(programs / "cloze", "a") as script:  # when it ends, the scheduler and the worker beside it are killed
        called = f'"$(grep -c ^dask {tmp_path}/called)"'
        script.write(f"for n in {{1..3000}}; do [ {called} -ge 2 ] && break; {shutil.which('sleep')} 0.01; done\n")
    queue = f'echo "$@" >> {tmp_path}/asked; [ "$(wc -l < {tmp_path}/asked)" -lt 2 ] && echo PENDING || echo {state}'
    (programs / "squeue").write_text(f"#!/bin/bash\n{queue}\n")
    for path in programs.iterdir():
        path.chmod(0o755)
    job = {"SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": element, "SLURM_ARRAY_TASK_MIN": "3"}
    done = subprocess.run(
        ["bash", str(CLUSTERS / "slurm-prepare.sbatch"), "s3://bucket/shards", "--tokenizer", "s3://bucket/vocab"],
        env=child_variables(PATH=f"{programs}:{os.environ['PATH']}", SLURM_CPUS_PER_TASK="2", **job),
        cwd=folder,
    )
    called = (tmp_path / "called").read_text()
    assert done.returncode == 0 and not list(folder.iterdir())
    assert "--job 12345_3 --states=all" in (tmp_path / "asked").read_text()
    if state.startswith("COMPLETED"):
        assert called == "sleep 2\n"
        return
    assert "dask worker tcp://node-7:22345 --nworkers 2 --nthreads 1" in called
    command = (
        "cloze prepare --output s3://bucket/shards --executor dask --scheduler tcp://node-7:22345 --tokenizer s3://"
    )
    assert (command in called) == ("dask scheduler --port 22345" in called) == (element == "3")


def test_docs_explain_every_field():
    """Every directive of Slurm and every key of the YAML files stands in docs/clusters.md."""
    text = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    fields = {
        match
        for path in CLUSTERS.glob("*.sbatch")
        for match in re.findall(r"^#SBATCH (--[a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }

    def keys(value) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()

    for path in CLUSTERS.glob("*.yaml"):
        fields |= keys(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert not {field for field in fields if f"`{field}" not in text}, "undocumented"
    assert all(f"`{path.name}`" in text for path in CLUSTERS.iterdir() if Path(path).is_file())
