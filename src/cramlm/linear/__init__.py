"""Linear models of text: logistic regression on n-grams and text vectors, naive Bayes; baselines and the teacher."""
