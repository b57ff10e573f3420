"""Fine-tuning: tasks and their files, examples as batches, what is learned from them and how it is measured."""
