"""A DeepSpeed that the repairs were not tested with is refused, in one line."""

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from cloze.launch.engine import versions
from cloze.launch.engine.versions import check_deepspeed
from cloze.pipeline.errors import UserError


def test_the_installed_one_is_known():
    check_deepspeed()


@pytest.mark.parametrize("version", ["0.17.6", "0.20.0", "1.0.0+cu130"])
def test_a_version_out_of_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(UserError, match=r"deepspeed: found version [\d.+cu]+, expected [<>=.,\d*]+, with which Cloze"):
        check_deepspeed()


def test_a_build_of_a_known_version_passes(monkeypatch):
    monkeypatch.setattr(deepspeed, "__version__", "0.19.8+a1b2c3")
    check_deepspeed()


def test_a_repair_whose_function_has_another_name_is_not_made_silently(monkeypatch):
    monkeypatch.delattr(DeepSpeedEngine, "allreduce_and_copy")
    with pytest.raises(UserError, match="without DeepSpeedEngine.allreduce_and_copy, expected"):
        check_deepspeed()
    monkeypatch.setattr(versions.metadata, "requires", lambda name: (_ for _ in ()).throw(
        versions.metadata.PackageNotFoundError(name)))
    with pytest.raises(UserError, match="without DeepSpeedEngine.allreduce_and_copy, expected a version that Cloze"):
        check_deepspeed()
