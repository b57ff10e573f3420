"""The Dockerfile as far as it can be tried without a daemon: its instructions, what it copies, what it runs."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import subprocess

import pytest
import yaml

from cloze.launch.system.environment.launchers import child_variables
from tests.launching import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# Each with the words behind it, continued lines joined and comments left out.
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line.strip()
]


def of(kind: str) -> list[str]:
    return [words for name, words in INSTRUCTIONS if name == kind]


def test_its_instructions_are_known_and_in_an_order_that_builds():
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}
    names = [name for name, _ in INSTRUCTIONS]
    assert set(names) <= known and names[:2] == ["ARG", "FROM"] and names.count("FROM") == 1
    assert names[-1] == "CMD" and isinstance(yaml.safe_load(of("CMD")[0]), list)
    # An argument is known from its line on, and one before FROM only there.
    declared = {words.partition("=")[0] for name, words in INSTRUCTIONS[2:] if name == "ARG"}
    used = set(re.findall(r"\$\{(\w+)\}", "".join(" ".join(each) for each in INSTRUCTIONS[2:])))
    assert used - {"PATH"} == declared and of("FROM") == ["${BASE}"]


def test_it_copies_what_there_is_and_the_context_has_it():
    """The last pattern of .dockerignore that fits decides, as in docker."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    copied = set()
    for words in of("COPY"):
        *sources, target = words.split()
        assert target == "./" or sources == [target]  # at the same place as in the repository
        for source in sources:
            assert (ROOT / source).exists(), source
            ignored = True
            for pattern in patterns[1:]:
                if fnmatch.fnmatch(source, pattern.removeprefix("!")):
                    ignored = not pattern.startswith("!")
            assert not ignored, f"{source} is not in the build's context"
            copied.add(source)
    # What the installation and the links in cloze/ need.
    assert {
        os.path.basename(os.readlink(ROOT / "cloze" / name))
        for name in os.listdir(ROOT / "cloze")
        if (ROOT / "cloze" / name).is_symlink()
    } <= copied
    assert {"cloze", "setup.cfg", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= copied


def test_it_is_what_the_jobs_start():
    (folder,) = of("WORKDIR")
    for name in ("kubernetes-job.yaml", "kubernetes-pytorchjob.yaml"):
        text = (ROOT / "launch" / "clusters" / name).read_text(encoding="utf-8")
        assert re.findall(r"workingDir: (\S+)", text) == [folder]
        (image,) = set(re.findall(r"image: (\S+)", text))
        assert f"-t {image} " in TEXT
        for config in re.findall(r"--config=(\S+)", text):
            assert (ROOT / config).is_file() and config.split("/")[0] in " ".join(of("COPY")).split()
    assert int(of("USER")[-1]) > 0 and f"--uid {of('USER')[-1]} " in TEXT  # not root, by number


@pytest.mark.parametrize("command", of("RUN"))
def test_a_step_is_a_command_of_the_shell(command):
    assert subprocess.run(["sh", "-n", "-c", command], capture_output=True).returncode == 0


def test_it_installs_as_ci_does():
    """CI runs `make env`, without bytecode, which an image keeps; the extras are some of setup.cfg's."""
    (ours,) = [shlex.split(line) for line in of("RUN") if ".ci/install.py" in line]
    recipe = (ROOT / "Makefile").read_text().splitlines()
    (cis,) = [shlex.split(line.strip().removeprefix("@$(BIN)/")) for line in recipe if ".ci/install.py" in line]
    cis = [word for word in cis if word != "--no-compile"]
    assert ours[:-1] == cis[:-1] and (ours[-1], cis[-1]) == (".[${EXTRAS}]", ".[test]")
    (extras,) = [words.removeprefix("EXTRAS=") for words in of("ARG") if words.startswith("EXTRAS=")]
    section = (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2].partition("[options.entry")[0]
    assert all(re.search(rf"^{extra} =$", section, re.MULTILINE) for extra in extras.split(","))


@pytest.mark.parametrize("torch", [True, False])
def test_a_torch_that_the_base_brings_is_kept(tmp_path, torch):
    """The step itself, with a Python that has torch or none."""
    (step,) = [line for line in of("RUN") if "import torch" in line]
    (tmp_path / "constraints.txt").write_text("torch-optimi==0.3.3\ntorch==2.13.0\ntornado==6.6\n")
    (tmp_path / "python").write_text(f"#!/bin/sh\nexit {0 if torch else 1}\n")
    (tmp_path / "python").chmod(0o755)
    variables = child_variables()
    subprocess.run(
        ["sh", "-c", step], cwd=tmp_path, check=True, env=variables | {"PATH": f"{tmp_path}:{variables['PATH']}"}
    )
    kept = (tmp_path / "constraints.txt").read_text().split()
    assert kept == ["torch-optimi==0.3.3", *([] if torch else ["torch==2.13.0"]), "tornado==6.6"]


def test_what_must_be_in_the_environment_comes_first():
    """python3 without venv, as Debian has it, is fixed by the same step; the rest runs in the environment."""
    steps = of("RUN")
    assert "python3-venv" in steps[0] and steps[1] == "python3 -m venv --system-site-packages /opt/cloze"
    assert "PATH=/opt/cloze/bin:${PATH}" in of("ENV")
    assert steps[-1] == "cloze --version" and INSTRUCTIONS.index(("USER", of("USER")[0])) == len(INSTRUCTIONS) - 3
