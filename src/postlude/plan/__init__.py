"""Estimates of a layout before it runs: memory, bubble and time, from the same schedule that ranks run."""
