"""The folder of a run: configuration, status, lock, metrics, heartbeats, preemption."""
