"""BM25: analysis, index, exact batch search."""
