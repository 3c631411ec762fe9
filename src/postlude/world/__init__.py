"""The running ranks: launching, devices, process groups, decisions of rank 0, failure reports.

Open `launcher.py` first.
"""
