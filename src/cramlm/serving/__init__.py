"""An exported model behind HTTP."""
