"""Sync of an engine's weights to servers, by a shared directory or over the network. Start with `sync.py`."""
