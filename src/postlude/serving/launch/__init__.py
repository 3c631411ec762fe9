"""Starting servers on this machine or another, and restarting the ones that end."""
