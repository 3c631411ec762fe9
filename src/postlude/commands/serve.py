"""`postlude serve`: a model's generator behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket

import torch

from postlude.generate.generator import Generator
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import end_tokens, read_generation, read_model
from postlude.model import LanguageModel
from postlude.recipes.run.outcome import RunFailed
from postlude.serving.server.generation_server import GenerationServer
from postlude.world.devices import check_device, default_device
from postlude.world.ports import is_loopback

KEY = "POSTLUDE_API_KEY"


def run(options: argparse.Namespace) -> None:
    """Serve until a signal stops it. One line reports the address when it is ready."""
    check_device(options.device)
    check_address(options.host, options.port)
    key = options.api_key or os.environ.get(KEY)
    check_key(options.host, key)
    device = torch.device(options.device or default_device())
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    if options.empty:
        with torch.device("meta"):
            model = LanguageModel(read_model(options.model)[1], dtype=dtype or torch.float32)
        model = model.to_empty(device=device)
    else:
        model = load_model(options.model, dtype=dtype, device=device)
    limits = {
        name: getattr(options, name)
        for name in ("max_sequences", "max_batch_tokens", "max_prefill_tokens")
        if getattr(options, name) is not None
    }
    eos_tokens = end_tokens(read_generation(options.model), tokenizer.eos_token_id)
    generator = Generator(model.eval(), tokenizer, eos_tokens=eos_tokens, **limits)
    version = None if options.empty else "default"
    server = GenerationServer(generator, options.name or options.model, version, key=key)
    try:
        asyncio.run(_serve(server, options))
    except (RuntimeError, ArithmeticError) as error:
        raise RunFailed(str(error)) from error


def check_key(host: str, key: str | None) -> None:
    """Refuse to listen to other machines without a key: a client can have the server load any weights."""
    if not key and not is_loopback(host):
        raise ValueError(
            f"--host {host} is reached from other machines, which could have it read any weights. Set a key that they "
            f"must send, by {KEY} (or --api-key), or listen at 127.0.0.1."
        )


def check_address(host: str, port: int) -> None:
    """Refuse an address that is not free, before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            trial.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"cannot listen at {host}, port {port}: {reason}. Give another --host or --port.") from error


async def _serve(server: GenerationServer, options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(
        options.host, options.port, lambda address: print(f"serving {server.name} at {address}", flush=True)
    )
