"""Pipelines: `schedule.py` says which action when, as plain data; `executor.py` runs it."""

from postlude.pipeline.executor import Executor

__all__ = ["Executor"]
