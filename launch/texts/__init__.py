"""Texts and tables to model inputs, and model outputs to places in the texts."""
