"""`postlude tinker`: a server for the Tinker training API."""

from __future__ import annotations

import argparse
import logging
from importlib.util import find_spec

from postlude.cluster.ray_cluster import check_ray
from postlude.json_log import print_line
from postlude.layout import Layout
from postlude.recipes.run.outcome import RunFailed
from postlude.serving.http.log_lines import log_to_stderr
from postlude.world.ports import check_address

LOCAL_KEY = "tml-local"
NEEDED = ("uvloop", "google.protobuf", "zstandard")


def run(options: argparse.Namespace) -> None:
    """Serves until a signal stops it, and prints what a client needs once it is ready."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ImportError(f"`postlude tinker` needs {', '.join(missing)}: pip install 'postlude[tinker]'.")
    from postlude.tinker.engine_backend import EngineBackend
    from postlude.tinker.limits import Limits
    from postlude.tinker.server import check_key_file, read_keys, run_server, serve
    from postlude.tinker.state import StateDirectory

    if options.ray is not None:
        check_ray()
    check_address(options.host, options.port, "--host or --port")
    check_key_file(options.host, options.key_file)
    keys = read_keys(options.key_file) if options.key_file is not None else None
    models_per_key = options.max_models_per_key or -(-options.max_models // max(1, len(keys or ())))
    limits = Limits(
        models=options.max_models,
        models_per_key=models_per_key,
        full_models=options.max_full_models,
        session_seconds=options.session_timeout,
    )
    layout = Layout.parse(options.layout)
    state = StateDirectory(options.state)
    backend = EngineBackend(
        options.models,
        layout=layout,
        dtype=options.dtype,
        device=options.device,
        ray=options.ray,
        scratch=state.scratch,
        trust_remote_code=options.trust_remote_code,
    )
    log_to_stderr(logging.INFO)

    def ready(address: str) -> None:
        names = ", ".join(info.name for info in backend.base_models)
        key = LOCAL_KEY if keys is None else f"…  # a key of {options.key_file}"
        print_line(f"serving {names}; saves to {options.state}")
        print_line(f"export TINKER_BASE_URL={address}")
        print_line(f"export TINKER_API_KEY={key}")

    try:
        run_server(serve(backend, state, host=options.host, port=options.port, keys=keys, limits=limits, ready=ready))
    except (RuntimeError, ArithmeticError) as error:
        raise RunFailed(str(error)) from error
