"""Several methods, settings, seeds and numbers of labels on one task: runs that share what they can, one table, one picture."""
