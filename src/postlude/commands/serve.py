"""`postlude serve`: a model's generator behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal

from postlude.commands.loading import load_generator, warn_of_endless_turns
from postlude.json_log import print_line
from postlude.recipes.run.outcome import RunFailed
from postlude.serving.http.log_lines import log_to_stderr
from postlude.serving.server.generation_server import GenerationServer
from postlude.world.ports import check_address, is_loopback

KEY = "POSTLUDE_API_KEY"


def run(options: argparse.Namespace) -> None:
    """Serves until a signal stops it. One line reports the address when it is ready."""
    check_address(options.host, options.port, "--host or --port")
    key = options.api_key or os.environ.get(KEY)
    check_key(options.host, key)
    log_to_stderr(logging.WARNING)
    limits = ("context_length", "max_sequences", "max_batch_tokens", "max_prefill_tokens")
    generator, tokenizer = load_generator(options, limits, empty=options.empty)
    warn_of_endless_turns(tokenizer)
    version = None if options.empty else "default"
    server = GenerationServer(generator, options.name or options.model, version, key=key)
    try:
        asyncio.run(_serve(server, options))
    except (RuntimeError, ArithmeticError) as error:
        raise RunFailed(str(error)) from error


def check_key(host: str, key: str | None) -> None:
    """Refuses to listen to other machines without a key: a client can have the server load any weights."""
    if not key and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines, which could have it read any weights. Set a key that they "
            f"must send, by {KEY} (or --api-key), or listen at 127.0.0.1."
        )


async def _serve(server: GenerationServer, options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(options.host, options.port, lambda address: print_line(f"serving {server.name} at {address}"))
