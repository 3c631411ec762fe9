"""Ray: a run's ranks, workers and servers as actors on a cluster's nodes. Start with `driver.py`.

Only this package imports `ray`, and only when it is used.
"""
