"""write_json: writes every JSON reply of the servers."""

from __future__ import annotations

import json
import math
from typing import Any


def write_json(value: Any) -> bytes:
    """Returns a value as JSON. A number that JSON does not have, such as infinity, is null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
