"""Answers from servers: `engine.py` is what a recipe holds; each kind of server has a file with its api."""
