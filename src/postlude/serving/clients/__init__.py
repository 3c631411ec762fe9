"""Clients of servers. `client.py` is the one that callers use; each kind of server has a file with its HTTP API."""
