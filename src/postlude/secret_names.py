"""Which names stand for secrets: of settings, environment variables, arguments and parts of a URL."""

from __future__ import annotations

import re

SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase"}
)
SECRET_WORDS |= {
    "credential",
    "credentials",
    "auth",
    "authorization",
    "bearer",
    "cookie",
    "cookies",
    "signature",
    "sig",
}
PLURALS = frozenset({"keys", "tokens"})  # of anything: a secret only after one of these words
OF_SECRETS = frozenset(["api", "access", "auth", "bearer", "hf", "private", "refresh", "secret"])


def is_secret_name(name: str) -> bool:
    """Returns whether the name stands for a secret, by its last words: api_key, hfToken, X-API-Keys; not max_tokens."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
    return words[-1] in SECRET_WORDS or (words[-1] in PLURALS and len(words) > 1 and words[-2] in OF_SECRETS)
