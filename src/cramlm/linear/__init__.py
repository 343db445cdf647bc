"""Linear models of text: TF-IDF, co-occurrence vectors, logistic regression; baselines of every comparison and the teacher."""
