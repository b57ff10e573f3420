"""`cloze finetune`: tasks, their files and examples, losses, metrics, reports."""
