"""From the user's files to a corpus and a task: strict readers, passages, splits, and a look for held-out text where it must not be."""
