"""Rows of datasets for the supervised recipes."""
