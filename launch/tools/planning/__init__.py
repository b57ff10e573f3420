"""What `cloze plan` knows: kernels of a step, machines, assumptions, and the estimate made of them."""
