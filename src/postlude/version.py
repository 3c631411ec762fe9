"""Which Postlude this is: the one place that says so, installed or run from its sources."""

__version__ = "0.1.0"
