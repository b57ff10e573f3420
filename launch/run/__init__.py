"""The folder of a run: whose it is, curves, heartbeats, and what asks it to stop."""
