"""`cloze serve`: the operations of `launch/predict/` over HTTP, batched across requests."""
