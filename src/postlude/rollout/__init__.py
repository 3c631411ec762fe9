"""Rollouts: tasks, environments, rewards, and conversations that sample trajectories. Start at `conversations.py`."""
