"""Text to shards to batches."""

if __name__ != "cloze.pipeline":
    raise ImportError(
        f"found an import of {__name__!r}, expected cloze.pipeline: under two names each class would exist twice"
    )
