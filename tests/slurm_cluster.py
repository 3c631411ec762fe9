"""A Slurm cluster for tests: a controller and two nodes on machines of `network_nodes.py`, with munge between them."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.conftest import PATIENCE
from tests.network_nodes import NodeNetwork, why_no_namespaces

CONFIG = """
ClusterName=tests
SlurmctldHost=login
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=n1,n2 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF State=UP
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NEEDED_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def why_no_slurm() -> str | None:
    """Returns why no cluster can be started here; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=NEEDED_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return why_no_namespaces()


class SlurmCluster:
    """Nodes n1 and n2, and the machine `login`, from which jobs are submitted. Partition `high` preempts `low`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "slurm.conf").write_text(CONFIG.format(directory=directory))
        (directory / "state").mkdir()
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": NEEDED_PATH}
        self.network = NodeNetwork(directory, ["login", "n1", "n2"])

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.network.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.network.__exit__()

    def _start(self) -> None:
        key, socket = self.directory / "munge.key", self.directory / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.directory}/munge.{name}" for name in ("pid", "log", "seed")]
        self._daemon("login", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *files)
        self.wait(socket.exists, "munged does not answer")
        self._daemon("login", "slurmctld", "-D")
        for name in ("n1", "n2"):
            self.start_node(name)
        self.wait(
            lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N").split() == ["n1", "n2"],
            "the nodes do not come up",
            40,
        )

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node, as its boot does."""
        (self.directory / f"spool-{name}").mkdir(exist_ok=True)
        self._daemon(name, "slurmd", "-D", "-N", name)

    def _daemon(self, node: str, *words: str) -> None:
        output = (self.directory / f"{words[0]}-{node}.out").open("w")
        self.network.nodes[node].start(*words, env=self.environment, stdout=output, stderr=output)

    def run(self, *words: str, environment: Mapping[str, str] | None = None, **options: Any) -> str:
        """Runs a command on the login machine and returns its output."""
        command = self.network.nodes["login"].command(words)
        variables = self.environment | dict(environment or {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, **options)
        assert done.returncode == 0 or words[0] == "sinfo", f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Returns what the controller knows of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, condition: Callable[[], bool], complaint: str, seconds: float = PATIENCE) -> None:
        """Waits until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, complaint
            time.sleep(0.2)

    def wait_for_state(self, number: str, *states: str, seconds: float = PATIENCE) -> dict[str, str]:
        self.wait(lambda: self.job(number)["JobState"] in states, f"job {number} is not {' or '.join(states)}", seconds)
        return self.job(number)
