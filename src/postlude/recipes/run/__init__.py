"""A run on disk: its directory and all that is kept there. Open `directory.py` first."""
