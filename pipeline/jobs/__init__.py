"""Offline jobs: prepare and vocabulary with their stages, inspect, verify."""
