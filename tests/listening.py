"""The addresses that processes listen on, as /proc says."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path


def listening_addresses(pids: set[int]) -> set[str]:
    """Returns the addresses on which processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{os.getpid()}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                digits = bytes.fromhex(words[1].partition(":")[0])
                # Words are little-endian.
                parts = [digits[start : start + 4][::-1] for start in range(0, len(digits), 4)]
                addresses.add(str(ipaddress.ip_address(b"".join(parts))))
    return addresses


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process started, and those that they did."""
    children = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            children += [int(child) for child in (thread / "children").read_text().split()]
    return [*children, *(other for child in children for other in descendants(child))]
