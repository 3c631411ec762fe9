"""The commands of `postlude`, one file each: `run(options)` returns the exit code, if it is not 0.

`cli.py` imports a file when its command is run.
"""
