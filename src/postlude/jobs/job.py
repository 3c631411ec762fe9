"""Job: a recipe on the nodes of a cluster, as every scheduler needs it described."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from postlude.pool.limits import is_secret_name
from postlude.recipes.config.rollout import rollout_of

PORT = 29400  # of torchrun's rendezvous
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")  # a name of a service of Kubernetes too
VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Mount:
    """Storage of the cluster, at a directory of the job's nodes."""

    source: str
    """Slurm: a directory; SkyPilot: a bucket, such as s3://NAME; Kubernetes: a PersistentVolumeClaim."""
    target: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Reads SOURCE:DIRECTORY."""
        source, _, target = text.rpartition(":")
        if not source or not target.startswith("/"):
            raise ValueError(f"--mount is {text!r}; write SOURCE:DIRECTORY, such as data:/shared.")
        return cls(source, target)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of a recipe on several nodes. Each starts the same number of ranks."""

    name: str
    recipe: str
    arguments: tuple[str, ...]
    """What follows the recipe's name on its command line: the config, and keys that override it."""
    rank_options: tuple[str, ...]
    """Options of the recipe's command that are no keys of the config, such as --device."""
    config: str
    """The whole config as YAML, for nodes that do not see its file; else empty."""
    run: Path
    """The run directory."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """The files and models that the config names, by key, for nodes that see mounts only."""
    ranks: int
    nodes: int
    gpus_per_node: int
    gpu: str | None = None
    """Type of the GPUs."""
    cpus_per_node: int | None = None
    time: int | None = None
    """Seconds that the job may take."""
    grace: int = 600
    """Seconds that the ranks have to finish a step and save, before the job is killed."""
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    workdir: str | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """None is the value that the variable has where the job is submitted, or of a secret."""
    mounts: tuple[Mount, ...] = ()
    setup: tuple[str, ...] = ()
    """Shell commands that each node runs first."""
    python: str = "python"
    requeue: bool = True
    """Whether the job starts again after it was preempted, or its time was over."""
    ray: bool = False
    """Whether Ray places the ranks, instead of torchrun."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"--name is {self.name!r}; use up to 40 lower-case letters, digits and dashes, a letter first, as in "
                f"{self.recipe}-1."
            )
        for name, value in self.environment.items():
            if not VARIABLE.fullmatch(name):
                raise ValueError(f"--env is {name!r}; write NAME=VALUE, or NAME for a secret.")
            if value is not None and is_secret_name(name):
                raise ValueError(f"--env {name}=… would write a secret into the job's file; give --env {name} alone.")

    @property
    def ranks_per_node(self) -> int:
        """Ranks that torchrun starts on a node."""
        return self.ranks // self.nodes

    @property
    def environment_values(self) -> dict[str, str]:
        """The variables whose value is written into the job."""
        return {name: value for name, value in self.environment.items() if value is not None}

    @property
    def environment_names(self) -> list[str]:
        """The variables whose value the job gets from elsewhere."""
        return [name for name, value in self.environment.items() if value is None]

    def torchrun(self, host: str, port: str, is_host: str, *, config: str | None = None, more: str = "") -> str:
        """Returns the shell command that each node runs.

        `host`, `port` and `is_host` are shell words: the first node's name, a port there, and 1 on that node, else 0.
        They are found through torch's c10d rendezvous, which needs no rank of a node. `config` is where a node has the
        config, if not where `arguments` say.
        """
        words = [self.python, "-m", "postlude.world.torchrun", "--nnodes", str(self.nodes)]
        words += ["--nproc-per-node", str(self.ranks_per_node), "--rdzv-backend", "c10d"]
        arguments = shlex.join(self.arguments) if config is None else config
        after = " ".join(filter(None, ("-m -- postlude", self.recipe, arguments, shlex.join(self.rank_options))))
        return (
            f'{shlex.join(words)} \\\n    --rdzv-endpoint "{host}:{port}" --rdzv-conf "is_host={is_host}"{more} \\\n'
            f"    {after}"
        )

    @property
    def directory(self) -> str:
        """The working directory on nodes that have no other storage than mounts."""
        return self.workdir or next((mount.target for mount in self.mounts), ".")

    def check_shared(self, option: str) -> None:
        """Raises a ValueError if the run directory would be lost with a node."""
        run = Path(self.directory, self.run)
        if not any(run.is_absolute() and run.is_relative_to(mount.target) for mount in self.mounts):
            mounted = ", ".join(mount.target for mount in self.mounts) or "there is none"
            raise ValueError(
                f"the run directory {run} is in no --mount ({mounted}), so checkpoints would be lost with the nodes. "
                f"Give {option}, and --run or --workdir a directory in it."
            )

    @property
    def unmounted(self) -> str:
        """A sentence about inputs with an absolute path that no mount holds; "" if there is none."""
        seen = [self.directory, *(mount.target for mount in self.mounts)]
        missing = [
            f"{key} is {path}"
            for key, path in self.inputs.items()
            if path.startswith("/") and not any(Path(path).is_relative_to(directory) for directory in seen)
        ]
        if not missing:
            return ""
        return (
            f"{', '.join(missing)}: in no --mount ({', '.join(seen[1:])}) and not below the working directory "
            f"{seen[0]}, so nodes have it only if their image or --setup puts it there."
        )

    def refuse(self, scheduler: str, **options: tuple[object, str]) -> None:
        """Raises a ValueError for an option that the scheduler has no use for: its value, and what to do instead."""
        for name, (value, advice) in options.items():
            if value:
                raise ValueError(f"--{name.replace('_', '-')} is no option of {scheduler}: {advice}.")


def job_ranks(config: Any, nodes: int, gpus_per_node: int | None, *, ray: bool, cpu: bool) -> tuple[int, int]:
    """Returns the ranks of a config, and the GPUs of a node, or raises a ValueError if they do not fit.

    `gpus_per_node` None is what ranks and servers need. Without Ray, a run starts its servers on the first node.
    """
    rollout = rollout_of(config)
    servers = getattr(rollout, "count", 0) * getattr(rollout, "gpus", 0.0)
    layout = getattr(config, "layout", None)
    alone = nodes * max(1, (gpus_per_node or 1) - int(servers))  # `eval` has no layout: each rank samples alone
    ranks = alone if layout is None else layout.world_size
    if not ray and ranks % nodes:
        raise ValueError(
            f"the layout has {ranks} rank(s), which {nodes} nodes cannot share equally. Change --nodes or --layout."
        )
    per_rank = config.cluster.gpus_per_rank if ray else 1.0
    needed = (0 if cpu else ranks * per_rank) + servers
    if gpus_per_node is None:
        gpus_per_node = -(-int(needed + 0.999) // nodes)
    total = nodes * gpus_per_node
    first = -(-ranks // nodes) + servers  # GPUs of the first node, without Ray
    if needed > total or (not ray and not cpu and first > gpus_per_node):
        where = "" if needed > total else f", {first:g} of them on the first node, which has the servers"
        raise ValueError(
            f"the config needs {needed:g} GPUs ({ranks} ranks, {servers:g} for servers{where}), but {nodes} node(s) "
            f"with {gpus_per_node} have {total}. Change --nodes, --gpus-per-node, --layout or rollout.count."
            + ("" if needed > total else " With --ray, servers may be on any node.")
        )
    if total - needed >= 1:
        raise ValueError(
            f"{nodes} node(s) with {gpus_per_node} GPUs have {total}, but the config uses {needed:g} ({ranks} ranks, "
            f"{servers:g} for servers). Lower --nodes or --gpus-per-node, or raise --layout."
        )
    return ranks, gpus_per_node


def parse_time(text: str) -> int:
    """Returns the seconds of HH:MM:SS, or DAYS-HH:MM:SS."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ValueError(f"--time is {text!r}; write HH:MM:SS, such as 04:00:00, or DAYS-HH:MM:SS.")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
