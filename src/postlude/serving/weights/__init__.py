"""How the trainer's weights reach inference servers. Start at `sync.py`."""
