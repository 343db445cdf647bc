"""Settings of a run as frozen pydantic models; reading and writing TOML.

Each name is imported from the module that defines it: the run and its parts from run.py, phases from phase.py, their loss terms and masking
from terms.py, heads and prompts from head.py, retrievers from retriever.py, budgets and counts as text from base.py.
"""
