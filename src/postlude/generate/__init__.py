"""The native inference engine: continuous batching on the trainer's own model and weights. Start at `generator.py`."""
