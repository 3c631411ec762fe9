"""Hugging Face in and out, one small adapter file per family. Start at `families.py`, the table of them."""
