"""The loops a user runs, and the typed config each of them reads: start at `trainer.py`; from Python, at `start.py`."""

import sys
from types import ModuleType
from typing import Any

from postlude.recipes.api import RunResult, distill, dpo, evaluate, grpo, sft

__all__ = ["RunResult", "distill", "dpo", "evaluate", "grpo", "sft"]


class _Package(ModuleType):
    """Keeps `grpo` and its like functions: importing the file of that name later would put its module in the place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
