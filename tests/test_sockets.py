"""A run on one machine listens where the table of docs/scale-out.md says, and nowhere else."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REWARD = """
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from tests.listening import descendants, listening_addresses


def reward(completion):
    run = int(Path({directory!r}, "pid").read_text())
    processes = [
        (Path(f"/proc/{{pid}}/cmdline").read_text().split(chr(0)), sorted(listening_addresses({{pid}})))
        for pid in [run, *descendants(run)]
    ]
    # The first call is the preflight's, before ranks and servers.
    Path({directory!r}, "sockets.json").write_text(json.dumps(processes))
    return len(completion) / 100
"""


def stated_addresses() -> dict[str, set[str]]:
    """Returns the addresses of each kind of process on one machine, as the documentation states them."""
    table = (ROOT / "docs" / "scale-out.md").read_text().split("### Sockets", 1)[1]
    addresses = defaultdict(set)
    for process, _, address, *_ in re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE
    ):
        addresses[process] |= set(re.findall(r"\d+\.\d+\.\d+\.\d+", address))
    return addresses


@pytest.mark.thorough  # two ranks and a server start; tests/test_launcher.py has the ranks, others the servers
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sockets_of_a_run_are_those_of_the_documentation(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD.format(root=str(ROOT), directory=str(tmp_path)))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(4)))
    options = {
        "run": tmp_path / "run",
        "layout": "dp_shard=2",
        "rollout": "generators",
        "environment": "dataset",
        "environment.path": tmp_path / "tasks.jsonl",
        "environment.reward": f"{tmp_path}/reward.py:reward",
        "environment.workers": 1,
        "sampling.max_new_tokens": 2,
        "steps": 1,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "evaluation.every": 0,
        "evaluation.tasks": 0,
        "loggers": "[]",
        "export": "false",
        "save_every": 0,
        "observe.metrics_port": 0,
    }
    words = [sys.executable, "-m", "postlude", "grpo", *(f"--{name}={value}" for name, value in options.items())]
    with subprocess.Popen(
        [*words, "--device", "cpu"], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        (tmp_path / "pid").write_text(str(process.pid))
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    actual: dict[str, set[str]] = defaultdict(set)
    for command, addresses in json.loads((tmp_path / "sockets.json").read_text()):
        kind = "launcher" if "grpo" in command else "launched server" if "serve" in command else "rank"
        actual[kind] |= set(addresses)
    stated = stated_addresses()
    assert actual == {kind: stated[kind] for kind in ("launcher", "rank", "launched server")}
