"""The version of Postlude, installed or run from its sources."""

__version__ = "0.1.0"
