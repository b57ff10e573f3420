"""Cloze in fp16 on a CPU, which computes it as a GPU does, only slowly."""

from collections.abc import Callable

from cloze.launch import cli
from cloze.launch.system.environment.launchers import read_environment
from cloze.launch.system.environment.process import prepare_deepspeed


def fp16_main(command: list[str], main: Callable[[list[str]], int] = cli.main) -> int:
    """The command in a process whose CPU counts as a device that trains in fp16."""
    prepare_deepspeed(read_environment())
    from deepspeed.accelerator import get_accelerator

    from cloze.launch.engine import building as engine

    engine._check_fp16 = lambda config, device: None
    get_accelerator().is_fp16_supported = lambda: True
    return main(command)
