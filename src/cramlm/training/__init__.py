"""From token sequences to a trained model: batches, masks, the objective, the optimizer, checkpoints and the one training loop."""
