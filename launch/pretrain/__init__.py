"""`cloze pretrain`: objectives, phases, the search for a micro-batch."""
