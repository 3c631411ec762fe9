"""The running ranks: how they start, where each computes, which groups they speak in, how they agree, how they stop.

Open `launcher.py` first.
"""
