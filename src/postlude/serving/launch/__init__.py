"""Starting inference servers and keeping them running. Start at `supervisor.py`."""
