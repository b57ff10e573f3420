"""This process and its machine: environment, devices, memory, the other processes, the console."""
