"""What a word is, for everything that looks at words.

**Normal form** (`characters.normalise`): NFKC, case folding, NFKC. **A word** (`words.segment`) is a run of letters, digits and marks of
the normal form in scripts with spaces, and a grapheme cluster in scripts without. Everything else parts words, but for invisible
characters (joiners, soft hyphens, selectors of variants), which are taken out. **How much of a word** a cluster is (`words.word_sizes`):
half a word in Han and kana, a quarter in the others. What a character is stands in characters.py alone.

    decontamination, near-duplicates, `words_key`, telling words of a selection, checks of a corpus     `segment`
    `count_words`: corpus statistics, passages, lengths of rows     runs between white space (the length that people count: "don't" is one
                                                                    word), clusters by their size

Others need another definition, made of the same classes of characters and the same blocks:

    BM25 (retrieval/bm25/analysis.py)   the same normal form and runs; pairs or triples of characters in place of clusters, as a single
                                        character tells no document from others; hangul too, whose particles hang on the words. What Python
                                        does not know parts words there; here it is kept, so that no copy is missed
    DSIR, key phrases (ngrams.py)       NFC and lower case; punctuation is a word: as the released code has it, for equal buckets
    linear models (`word_pattern`)      NFC and lower case, runs in any script: as scikit-learn has it, whose features they must equal

Keys that say when texts are the same are no words, as markup and punctuation count: `duplicate_key` (NFC, white space collapsed),
`data.task.text_key` (lower case, white space collapsed); `linear.teacher.folds` keeps apart what differs in letters and digits.
`retrieval.filters.estimate_tokens` estimates the tokens of a passage from characters. Rules about tokens are in model/ and training/.
"""
