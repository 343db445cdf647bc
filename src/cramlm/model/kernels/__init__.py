"""What an encoder computes between its linear layers, for PyTorch and compiled for the CPU."""
