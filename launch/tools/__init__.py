"""The smaller commands: data, plan, export, ONNX, doctor, quickstart, runs and status."""
