"""The recipes: training loops and their typed configs. Read `training_run.py` first, then `grpo.py`."""

import sys
from types import ModuleType
from typing import Any

from postlude.recipes.api import RunResult, distill, dpo, evaluate, grpo, kto, ppo, rm, sft

__all__ = ["RunResult", "distill", "dpo", "evaluate", "grpo", "kto", "ppo", "rm", "sft"]


class _Package(ModuleType):
    """Keeps `grpo` and the others functions: importing the module of that name would otherwise replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
