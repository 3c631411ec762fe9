"""Checks before a run starts. Start at `preflight.py`."""
