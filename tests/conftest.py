"""What all tests share."""

import os

# Read by DeepSpeed and torch at import; the launch floor sets them in every process that it starts.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
