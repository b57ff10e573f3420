"""This process and its machine: environment, devices, memory, process groups, the console."""
