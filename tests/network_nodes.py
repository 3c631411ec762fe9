"""Machines for tests: namespaces of this one, each with its own address, host name, /etc/hosts and processes."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
BOOT = "hostname {name} && mount --bind {hosts} /etc/hosts && ip link set lo up && echo up && exec cat"


def why_no_namespaces() -> str | None:
    """Returns why this user cannot make network namespaces that are connected; None if they can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    test = "ip link add name bridge0 type bridge && ip link add a0 type veth peer name a1"
    done = subprocess.run([*UNSHARE, "sh", "-c", test], capture_output=True, check=False)
    return None if done.returncode == 0 else "may not make network namespaces here (root, or CAP_SYS_ADMIN)"


class NetworkNode:
    """One machine. Its processes end with it, and it ends with the tests, whose end closes its standard input."""

    def __init__(self, name: str, address: str, hosts: Path) -> None:
        self.name, self.address = name, address
        script = BOOT.format(name=name, hosts=shlex.quote(str(hosts)))
        self._holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n", f"node {name} did not start"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text())
        """The first process of the machine."""

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on this machine."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--wd=.", *words]

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(words), capture_output=True, text=True, check=True, **options)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a process in a session of its own."""
        return subprocess.Popen(self.command(words), text=True, start_new_session=True, **options)

    def kill(self) -> None:
        """Kills every process of this machine at once, as a loss of power does. Its network stays."""
        subprocess.run(self.command(["kill", "-9", "-1"]), capture_output=True, check=False)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class NodeNetwork:
    """Machines that reach each other by name, and nothing else."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        hosts = directory / "hosts"
        addresses = {name: f"10.77.0.{index + 1}" for index, name in enumerate(names)}
        lines = [f"{address} {name}" for name, address in addresses.items()]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._stack = ExitStack()
        self.nodes: dict[str, NetworkNode] = {}
        with ExitStack() as failed:
            for name, address in addresses.items():
                self.nodes[name] = NetworkNode(name, address, hosts)
                failed.callback(self.nodes[name].close)
            switch = self.nodes[names[0]]  # it has the bridge of all
            switch.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            switch.run("ip", "addr", "add", f"{switch.address}/24", "dev", "bridge0")
            switch.run("ip", "link", "set", "bridge0", "up")
            for index, name in enumerate(names[1:]):
                node, port = self.nodes[name], f"port{index}"
                ends = (port, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
                subprocess.run(
                    ["nsenter", "--target", str(switch.pid), "--net", "ip", "link", "add", *ends], check=True
                )
                switch.run("ip", "link", "set", port, "master", "bridge0", "up")
                node.run("ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
                node.run("ip", "link", "set", "eth0", "up")
            self._stack = failed.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
