"""The command line."""

import os

# pydantic looks for plugins in the metadata of all installed packages when the first model is defined: 0.05 CPU seconds.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
