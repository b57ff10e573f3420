"""A DeepSpeed that the repairs were not tested with is refused, in one line."""

import configparser
import re
from importlib import metadata

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from cloze.launch.engine import versions
from cloze.launch.engine.versions import check_deepspeed
from cloze.pipeline.errors import UserError
from cloze.version import DISTRIBUTION
from tests.launching import ROOT


@pytest.mark.parametrize("version", [deepspeed.__version__, "0.18.0", "0.18.9", "0.19.0", "0.19.8", "0.19.8+a1b2c3"])
def test_the_installed_one_and_others_of_the_range_pass(monkeypatch, version):
    """Also a build of one's own."""
    monkeypatch.setattr(deepspeed, "__version__", version)
    check_deepspeed()


def test_the_ranges_hold_two_minor_versions_and_what_ci_installs():
    """Clusters bring their own torch: what setup.cfg asks for is a range; constraints.txt pins one of it."""
    asked = {each.name: each.specifier for each in map(Requirement, metadata.requires(DISTRIBUTION))}
    pinned = dict(
        line.split(";")[0].strip().split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if line
    )
    for name, tried in {
        "torch": ("2.12.0", "2.12.1", "2.13.0+cpu", "2.14.1", "2.15.0+cu132"),
        "deepspeed": ("0.18.0", "0.18.9", "0.19.8"),
    }.items():
        assert all(asked[name].contains(version) for version in (*tried, pinned[name])), name
    page = (ROOT / "docs/install.md").read_text()
    assert all(f"`{asked[name]}`" in page for name in ("torch", "deepspeed")), "the page tells the ranges"


def test_every_place_tells_the_same_range_of_pythons():
    told = configparser.ConfigParser()
    told.read(ROOT / "setup.cfg")
    range_ = SpecifierSet(told["options"]["python_requires"])
    versions = [f"3.{minor}" for minor in range(30) if range_.contains(f"3.{minor}.0")]
    assert versions[0] == "3.10" and len(versions) > 1, "not without an end: an interpreter of tomorrow was not tried"
    assert re.findall(r"Python :: (3\.\d+)", told["metadata"]["classifiers"]) == versions
    said = f"Python {versions[0]} to {versions[-1]}"
    assert said in (ROOT / "README.md").read_text() and said in (ROOT / "Makefile").read_text()
    page = (ROOT / "docs/install.md").read_text()
    assert f"| Python | {versions[0]} to {versions[-1]} |" in page
    assert all(re.search(rf"[|,] {each}[ .]", page) for each in versions), "each has a row, or CI has it"


@pytest.mark.parametrize("version", ["0.17.6", "0.20.0", "1.0.0+cu130"])
def test_a_version_out_of_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(UserError, match=r"deepspeed: found version [\d.+cu]+, expected [<>=.,\d*]+, with which Cloze"):
        check_deepspeed()


def test_a_repair_whose_function_has_another_name_is_not_made_silently(monkeypatch):
    monkeypatch.delattr(DeepSpeedEngine, "allreduce_gradients")
    without = "without DeepSpeedEngine.allreduce_gradients, expected"
    with pytest.raises(UserError, match=without):
        check_deepspeed()
    monkeypatch.setattr(
        versions.metadata, "requires", lambda name: (_ for _ in ()).throw(versions.metadata.PackageNotFoundError(name))
    )
    with pytest.raises(UserError, match=f"{without} a version that Cloze"):
        check_deepspeed()
