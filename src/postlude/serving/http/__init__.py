"""HTTP of both servers, `postlude serve` and `postlude tinker`, on Starlette and uvicorn: limits, keys and replies."""
