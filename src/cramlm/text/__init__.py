"""Normalisation, segmentation into words, passages and n-grams, for all scripts.

**Normal form** (`characters.normalise`): NFKC, case folding, NFKC. **A word** (`words.segment`) is a run of letters, digits and marks of
the normal form in scripts with spaces, and a grapheme cluster in scripts without. All other characters separate words, except invisible
characters (joiners, soft hyphens, variation selectors), which are removed. **The size of a cluster** (`words.word_sizes`) is half a word in
Han and kana, a quarter in other scripts without spaces. Character classes are defined in characters.py only.

    decontamination, near-duplicates, `words_key`, frequent words of a selection, checks of a corpus    `segment`
    `count_words`: corpus statistics, passages, row lengths    runs between white space ("don't" is one word), clusters by their size

Other definitions, with the same character classes and blocks:

    BM25 (retrieval/bm25/terms.py)      the same normal form and runs; pairs or triples of characters instead of clusters, because single
                                        characters do not discriminate; also in Hangul, where particles are attached to words. Characters
                                        unknown to Python separate words there; here they are kept, so that no copy is missed
    DSIR, key phrases (ngrams.py)       NFC and lower case; punctuation forms words, as in the released code, for equal buckets
    linear models (`word_pattern`)      NFC and lower case, runs in scripts with spaces as in scikit-learn, clusters in those without
    segments between markers (markers.py)   NFC and lower case, runs between white space, clusters (`split_runs`)

Keys for equal texts are not based on words, because markup and punctuation count: `duplicate_key` (NFC, white space collapsed),
`data.task.text_key` (lower case, white space collapsed); `linear.cross_validation.folds` separates texts by letters and digits.
`retrieval` estimates the tokens of a passage from its characters. Rules about tokens are in model/ and training/.
"""
