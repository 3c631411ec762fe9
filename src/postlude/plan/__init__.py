"""What a layout will cost before it runs: memory, bubble and time, from the same schedule that ranks run."""
