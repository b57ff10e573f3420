"""A model behind HTTP: the operations of `launch/predict/`, batched across requests."""
