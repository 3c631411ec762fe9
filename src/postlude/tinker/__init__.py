"""A server for the Tinker training API: `postlude tinker MODEL...`."""
