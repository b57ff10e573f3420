"""`python -m launch COMMAND`, the form that torchrun and deepspeed start: the same as `cloze COMMAND`."""

import sys

from launch.cli import main

sys.exit(main())
