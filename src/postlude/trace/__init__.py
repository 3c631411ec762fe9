"""Timelines of ranks: `spans.py` is the data, `recorder.py` records it, `svg.py` draws it."""
