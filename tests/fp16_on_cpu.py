"""`python -m tests.fp16_on_cpu pretrain …`: cloze in fp16 on a CPU, which computes it as a GPU does, only slowly."""

import sys

from launch.cli import main
from launch.environment import prepare_deepspeed, read_environment

if __name__ == "__main__":
    prepare_deepspeed(read_environment())
    from deepspeed.accelerator import get_accelerator

    from launch import engine

    engine._check_fp16 = lambda config, device: None
    get_accelerator().is_fp16_supported = lambda: True
    sys.exit(main())
