"""A model behind HTTP: the operations of `launch/predicting/`, batched across requests."""
