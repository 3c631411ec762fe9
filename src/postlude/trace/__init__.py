"""Timelines of ranks: `spans.py` is the data, `recorder.py` records it, `chrome.py` and `svg.py` draw it."""
