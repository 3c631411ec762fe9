"""Hugging Face in and out, one small adapter file a family. Start at `families.py`, the table of them."""
