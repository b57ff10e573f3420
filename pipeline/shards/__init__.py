"""Shards on disk, and the manifest of a prepared folder."""
