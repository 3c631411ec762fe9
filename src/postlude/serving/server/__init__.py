"""Postlude's own inference server. Start at `generation_server.py`."""
