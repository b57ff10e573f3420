"""`cloze evaluate`: a model measured on a suite."""
