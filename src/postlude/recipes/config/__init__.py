"""A run's typed config: what it can hold (`configs.py`), and how it is read and written (`reading.py`)."""
