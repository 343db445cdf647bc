"""The report of a run, or of several runs, as one self-contained HTML page."""
