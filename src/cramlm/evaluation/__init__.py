"""How good a model is: scores with intervals, packed inference, and the baselines it has to beat."""
