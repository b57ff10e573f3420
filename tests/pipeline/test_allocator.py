"""Memory that glibc keeps."""

import os
import platform
import resource
import subprocess
import sys

import pytest
import torch

from cloze.launch.system.environment.process import keep_freed_pages
from tests.forked import ForkedRun
from tests.launching import finish


def faults(arguments: list[str]) -> int:
    """Print whether freed pages are kept, and the page faults of ten tensors of 11,719 pages each."""
    print(int(keep_freed_pages()) if arguments == ["keep"] else "-")
    before = 0
    for turn in range(20):
        if turn == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(12_000_000)  # 48 MB: above what glibc ever keeps by itself
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_pages_are_kept_and_the_users_own_settings_win():
    done, count = finish(ForkedRun(["keep"], main=faults)).split()
    assert done == "1" and int(count) < 1000
    assert int(finish(ForkedRun(["leave"], main=faults)).split()[1]) > 1000
    code = "from cloze.launch.system.environment.process import keep_freed_pages; print(int(keep_freed_pages()))"
    given = os.environ | {"MALLOC_TRIM_THRESHOLD_": "1000000"}  # read when a process starts
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, env=given).stdout == b"0\n"
