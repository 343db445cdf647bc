"""Linear models of text: logistic regression on TF-IDF and co-occurrence vectors, naive Bayes; baselines and the teacher."""
