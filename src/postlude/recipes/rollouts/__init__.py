"""Rollouts of a recipe: prompts, the rollout engine, sampling and the queue. Start with `sampler.py`."""
