"""Generation over HTTP: clients of servers, our own server, launching servers, and sending them new weights.

Start with `engine.py`, the rollout engine of a training run that uses servers.
"""
