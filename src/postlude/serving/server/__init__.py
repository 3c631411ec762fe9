"""`postlude serve`: the native generator behind HTTP, with OpenAI's routes."""
