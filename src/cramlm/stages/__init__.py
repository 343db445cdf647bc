"""What each stage of a run reads, builds and leaves: text.py up to the tokenizer, model.py from the schedule to the export.

Each function returns what the next ones need, from a fresh folder if there is one. A stage's key holds the fingerprints of what it
reads and the config sections it obeys, so the fields of a key are exactly the reasons for which it may run again.
"""
