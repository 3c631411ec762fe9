"""`postlude serve`: the native generator behind HTTP, with the routes of OpenAI's and Anthropic's APIs."""
