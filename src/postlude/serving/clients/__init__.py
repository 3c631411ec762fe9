"""Clients of inference servers: one file for each kind of server. Start at `client.py`."""
