"""What `rollout/sandbox.py` runs programs with: supervisors, limits, and the command lines of each kind of sandbox."""
