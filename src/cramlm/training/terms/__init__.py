"""The terms of a phase's loss, one file each.

A file defines one subclass of `TextTerm` or `LabelTerm` and registers it for its settings (config/terms.py) by `implements`. All files of
this folder are imported here, so that a new term is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
