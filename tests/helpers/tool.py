"""Files of tools/, which is no package, as modules."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from helpers.paths import TOOLS


def load_tool(name: str) -> ModuleType:
    """tools/NAME.py, which finds its neighbors as it does when it is run."""
    if str(TOOLS) not in sys.path:
        sys.path.insert(0, str(TOOLS))
    return importlib.import_module(name)
