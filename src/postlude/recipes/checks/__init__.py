"""What is checked before a run starts. Start at `preflight.py`."""
