"""Processes, clusters and runs: the floor that meets the outside."""

__version__ = "0.1.0"
