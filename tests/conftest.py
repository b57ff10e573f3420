"""What all tests share."""

import os

import hypothesis

# Read by DeepSpeed and torch at import; the launch floor sets them in every process that it starts.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
# For tiny models a second thread costs more than it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast an example is depends on who else computes on the machine.
hypothesis.settings.register_profile("any machine", deadline=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")
