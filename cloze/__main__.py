"""`python -m cloze COMMAND`, the form that torchrun and deepspeed start: the same as `cloze COMMAND`."""

import sys

from cloze.launch.cli import main

sys.exit(main())
