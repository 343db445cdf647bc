"""Retrieval: BM25, DSIR, dense vectors, random text; from a ranking to a published selection."""
