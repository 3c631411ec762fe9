"""Worker pools: a function called in other processes, where a call may raise, hang or crash.

Start at `worker_pool.py`.
"""
