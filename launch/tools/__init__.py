"""The smaller commands: data, export, doctor, quick start."""
