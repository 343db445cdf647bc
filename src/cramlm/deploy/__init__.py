"""The finished model in use: the exported folder, its card, and the predictor that reads it."""
