"""The loops a user runs, and the typed config each of them reads: start at `trainer.py`."""
