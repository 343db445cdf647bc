"""The operations around linear layers: interface in PyTorch, compiled loops for the CPU, dropout."""
