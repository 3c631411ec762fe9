"""`python launch_vllm.py ARGUMENTS…`: starts vLLM's server as its version needs it to be started.

Run as a script, it makes the modules beside it importable for vLLM's workers, whatever the interpreter's path is.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence

OPTION, EXTENSION = "--worker-extension-cls", "postlude_worker.Extension"
SHORTEST = "--worker-e"  # vLLM takes unambiguous beginnings of an option too, and _ for -


def extensions(arguments: Sequence[str]) -> Iterator[str]:
    """Yields the extensions of vLLM's workers that are asked for, in any form that vLLM takes."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name.startswith(SHORTEST) and OPTION.startswith(name):
            yield value if equals else following


if __name__ == "__main__":  # vLLM's processes import this file again
    from vllm_versions import (
        ENTRY,
        NEWEST_KNOWN,
        OLD_ENTRY,
        Feature,
        VLLMVersion,
        installed_distributions,
    )

    versions = [VLLMVersion.parse(text) for text in installed_distributions().values()]
    version = next((version for version in versions if version is not None), NEWEST_KNOWN)
    if version.has(Feature.SCALE_OUT_FLAG):
        sys.argv.append("--enable-scale-out")
    asked = set(extensions(sys.argv))
    others = sorted(asked - {EXTENSION})
    if others and (EXTENSION in asked or not version.has(Feature.WEIGHT_VERSION)):
        sys.exit(
            f"{OPTION} {others[0]} cannot be used here: vLLM's workers take one extension, and with vLLM "
            f"{version.text} this run needs its own, {EXTENSION}, for new weights. Leave {OPTION} out of "
            "rollout.arguments; or use vLLM 0.27 or newer, and rollout.sync: disk."
        )
    if not asked and not version.has(Feature.WEIGHT_VERSION):
        sys.argv += [OPTION, EXTENSION]
    module = ENTRY if version.has(Feature.ENTRY_MODULE) else OLD_ENTRY
    runpy.run_module(module, run_name="__main__", alter_sys=True)
