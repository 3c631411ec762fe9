"""A run's typed config: its fields (`recipe_configs.py`, `policy_configs.py`), and how it is read (`load.py`)."""
