"""open_pool: a function in, a pool that calls it out."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postlude.pool.limits import DEFAULT_LIMITS, WorkerLimits
from postlude.pool.process_pool import WORKER_VARIABLE, ProcessPool
from postlude.pool.worker import prepare
from postlude.pool.worker_pool import InlinePool, PoolFactory, WorkerError, WorkerPool
from postlude.user_code import UserCodeError, load_callable, pickle_function


def open_pool(
    function: str | Callable[..., Any],
    *,
    count: int,
    timeout: float,
    pool_factory: PoolFactory | None = None,
    name: str | None = None,
    limits: WorkerLimits | None = DEFAULT_LIMITS,
) -> WorkerPool:
    """Opens a pool of `count` workers that call `function`. With count=0 this process calls it, without a time limit.

    `function` can be pickled, or is named path/to/file.py:name. Its method `prepare`, if it has one, is called once in
    each worker before the first call. It should depend on its arguments alone, since any worker may get any call;
    hashes are equal in all workers. A call that takes more than `timeout` seconds is ended with its process and all
    processes it started. `pool_factory` opens a pool elsewhere; by default workers are processes on this machine.
    `name` is what messages call the function; by default its own. `limits` is what workers may use; None, for code of
    ours, lets them use all that this process may, and gives them its whole environment.
    """
    if count < 0:
        raise ValueError(f"workers is {count}, but the minimum is 0: call the function in this process.")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
    name = name or function_name(function)
    if count == 0:
        return InlinePool(prepare(load_callable(function) if isinstance(function, str) else function), name)
    if WORKER_VARIABLE in os.environ:
        raise WorkerError(
            f"a worker process is about to start workers of its own for {name}. A file with a function for "
            f'workers is run in each: put what it does itself under `if __name__ == "__main__":`.'
        )
    return (pool_factory or ProcessPool)(pack_function(function, name, limits), name, count, timeout)


def pack_function(
    function: str | Callable[..., Any], name: str | None = None, limits: WorkerLimits | None = DEFAULT_LIMITS
) -> bytes:
    """Packs a function for workers: pickled, by its file, or both, with this process's import path and their limits."""
    file = function if isinstance(function, str) else function_file(function)
    pickled: bytes | None = None
    if not isinstance(function, str) and getattr(function, "__module__", None) != "__main__":
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(function)
    if pickled is None and file is None:
        try:
            pickled = pickle_function(function)
        except UserCodeError as error:
            raise WorkerError(f"{name or function_name(function)}: {error} Or use workers=0.") from error
    sys_path = [path or str(Path.cwd()) for path in sys.path]
    return pickle.dumps({"sys_path": sys_path, "pickled": pickled, "file": file, "limits": limits})


def function_name(function: str | Callable[..., Any]) -> str:
    """Returns the name of a function in messages: that of its class if it has none."""
    if isinstance(function, str):
        return function
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def function_file(function: Callable[..., Any]) -> str | None:
    """Returns path/to/file.py:name of a function at the top of a file."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    name = getattr(function, "__qualname__", "")
    return f"{file}:{name}" if file and str(file).endswith(".py") and name.isidentifier() else None
