"""Answers sampled from a model: a native generator on the model's own weights, and engines outside the process.

Start at `protocol.py`: what every engine takes and gives.
"""
