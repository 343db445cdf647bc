"""Build a corpus and a task from files: passages, parts, labels, splits, validation, decontamination."""
