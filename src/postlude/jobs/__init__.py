"""Jobs of a scheduler that run a recipe: `job.py` describes one, and each other file writes it for one scheduler.

`postlude launch` calls them. Nothing here imports torch.
"""
