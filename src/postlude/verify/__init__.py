"""Proof that a layout computes what one rank computes. Start at `compare.py`."""
