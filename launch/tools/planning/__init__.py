"""The estimate of `cloze plan`: kernels of a step, machines, assumptions."""
