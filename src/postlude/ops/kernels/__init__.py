"""Every Triton kernel. `capabilities.py` says which of them run on this device."""
