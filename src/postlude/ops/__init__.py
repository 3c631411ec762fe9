"""Functions on tensors. They know process groups at most, never a model."""
