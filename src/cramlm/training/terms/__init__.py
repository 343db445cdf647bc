"""The terms of a phase's loss, one file each.

A file defines one subclass of `TextTerm` or `LabelTerm` and registers it for its settings (config/terms.py) by `implements`. Every file of
this folder is imported here, so that adding a term is adding a file.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
