"""Ray: a run's ranks, workers and servers as actors on a cluster's nodes. `driving.py` is where a command comes in.

`ray` is imported here alone, and only when it is asked for.
"""
