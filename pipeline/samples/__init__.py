"""Samples of documents, and their masks."""
