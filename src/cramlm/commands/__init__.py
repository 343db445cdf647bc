"""The commands but `fit` and `config`, a file per kind. Each parses, calls and prints; heavy modules are imported inside."""
