"""What all tests share."""

import os

import hypothesis

# Read by DeepSpeed at import; the launch floor sets it in every process that it starts.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# For tiny models a second thread costs more than it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast an example is depends on who else computes on the machine.
hypothesis.settings.register_profile("any machine", deadline=None,
                                     suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")
