"""`cloze evaluate`: minimal pairs, held-out lines, GLUE."""
