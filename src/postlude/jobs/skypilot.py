"""SkyPilot: the job as a task, which `sky jobs launch` starts on a cloud, and again after a preemption."""

from __future__ import annotations

import shlex
from typing import Any

from postlude.jobs.job import PORT, Job, dump

CONFIG = "postlude-config.yaml"
SAVED = [138, 143]  # the exit codes of ranks that saved because a signal asked them to end


def write_job(job: Job) -> str:
    """Returns the task as YAML. Raises ValueError if SkyPilot cannot run the job."""
    job.refuse(
        "skypilot",
        ray=(job.ray, "torchrun starts the ranks, so leave it out"),
        time=(job.time, "a job ends with its run, so set steps"),
        partition=(job.partition, "SkyPilot chooses where the job runs"),
        account=(job.account, "SkyPilot uses the account of the cloud"),
    )
    if job.gpus_per_node and job.gpu is None:
        raise ValueError("skypilot needs the type of the GPUs: give --gpu, such as --gpu H100.")
    job.check_shared("--mount VOLUME:/shared, or s3://BUCKET:/shared")
    buckets = [mount for mount in job.mounts if "://" in mount.source]
    if buckets and job.nodes > 1:
        raise ValueError(
            f"--mount {buckets[0].source} is a bucket, which shows files of one node to others too late. For "
            f"{job.nodes} nodes, give a volume (`sky volumes`)."
        )
    resources: dict[str, Any] = {}
    if job.gpus_per_node:
        resources["accelerators"] = f"{job.gpu}:{job.gpus_per_node}"
    if job.cpus_per_node:
        resources["cpus"] = f"{job.cpus_per_node}+"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    if job.requeue:
        resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": SAVED}
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": job.environment_values,
        "secrets": dict.fromkeys(job.environment_names),
        "file_mounts": {mount.target: {"source": mount.source, "mode": "MOUNT_CACHED"} for mount in buckets},
        "volumes": {mount.target: mount.source for mount in job.mounts if mount not in buckets},
        "run": _run(job),
    }
    return dump({name: value for name, value in task.items() if value})


def submit_command(job: Job) -> list[str]:
    """Returns the command that submits a file with the task, whose name follows."""
    secrets = [word for name in job.environment_names for word in ("--secret", name)]
    return ["sky", "jobs", "launch", "--yes", *secrets]


def _run(job: Job) -> str:
    host = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    torchrun = job.torchrun("$head", str(PORT), "$((SKYPILOT_NODE_RANK == 0))", config=f'"$HOME/{CONFIG}"')
    config = f"cat > \"$HOME/{CONFIG}\" <<'END_OF_CONFIG'\n{job.config}END_OF_CONFIG"
    return "\n".join(["set -e", config, host, *job.setup, f"cd {shlex.quote(job.directory)}", f"exec {torchrun}", ""])
