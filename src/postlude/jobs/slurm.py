"""Slurm: the job as a script for sbatch, with one task on each node, which is torchrun."""

from __future__ import annotations

import shlex
from pathlib import Path

from postlude.jobs.job import PORT, Job

PORTS = 1000  # jobs that share a node have other ports
NOTICED = 600  # seconds in which Slurm notices a lost node (SlurmdTimeout, 300 by default), and requeues its job
HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
REQUEUE = r"""
# 138 and 143: the ranks were asked to end, and have saved. The job continues there: after its time, or a preemption.
job=$(scontrol show job "$SLURM_JOB_ID")
if [[ $code == 138 ]] || [[ $code == 143 && $job =~ PreemptTime=[0-9] ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def write_job(job: Job) -> str:
    """Returns the script. Raises ValueError if Slurm cannot run the job."""
    job.refuse("slurm", ray=(job.ray, "torchrun starts the ranks, so leave it out"))
    if job.mounts and job.image is None:
        raise ValueError("--mount needs --image: without a container, a job sees the directories of its nodes.")
    if job.time is not None and job.time <= job.grace:
        raise ValueError(
            f"--time is {job.time} s, of which --grace takes {job.grace} s to save. Raise --time or lower --grace."
        )
    return "\n".join([*_options(job), "", *_environment(job), *_body(job)])


def submit_command(job: Job) -> list[str]:
    """Returns the command that submits a file with the script, whose name follows."""
    return ["sbatch"]


def _options(job: Job) -> list[str]:
    values = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": (f"{job.gpu}:" if job.gpu else "") + str(job.gpus_per_node) if job.gpus_per_node else None,
        "cpus-per-task": job.cpus_per_node,
        "time": None if job.time is None else _time(job.time),
        "partition": job.partition,
        "account": job.account,
        "chdir": job.workdir or Path.cwd(),
        "output": "%x-%j.out",
        "open-mode": "append",  # a job that starts again continues its file
        "signal": f"B:USR1@{job.grace}",
    }
    for name, value in values.items():
        if "\n" in str(value):
            raise ValueError(f"--{name} is {str(value)!r}: the line of a script cannot have a line break. Use another.")
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    lines += [] if job.cpus_per_node else ["#SBATCH --exclusive"]  # else a task gets one CPU
    return ["#!/bin/bash", *lines, f"#SBATCH --{'' if job.requeue else 'no-'}requeue"]


def _environment(job: Job) -> list[str]:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.environment_values.items()]
    return lines + [f': "${{{name}:?has no value where sbatch was called}}"' for name in job.environment_names]


def _body(job: Job) -> list[str]:
    command = job.torchrun("$head", "$port", "$((SLURM_NODEID == 0))", more=' --rdzv-id "$SLURM_JOB_ID"')
    container = [f"--container-image={job.image}"] if job.image else []  # options of pyxis
    if job.mounts:
        container += ["--container-mounts=" + ",".join(f"{mount.source}:{mount.target}" for mount in job.mounts)]
    container += [f"--container-workdir={job.workdir}"] if job.image and job.workdir else []
    cpus = [] if job.cpus_per_node is None else [f"--cpus-per-task={job.cpus_per_node}"]
    step = shlex.join(
        [
            "srun",
            "--kill-on-bad-exit=0",
            f"--wait={max(NOTICED, job.grace)}",
            *cpus,
            *container,
            "bash",
            "-c",
            "run_node",
        ]
    )
    return [
        HEAD,
        f"port=$(({PORT} + SLURM_JOB_ID % {PORTS}))",
        "export head port",
        "",
        "run_node() {",
        *(f"    {line}" for line in ("set -e", *job.setup) if job.setup),
        f"    exec {command}",  # as it is: a quoted argument may have several lines
        "}",
        "export -f run_node",
        "",
        "# Slurm sends SIGUSR1 here before the time is over, and SIGTERM to all when it preempts or cancels the job.",
        "trap 'kill -USR1 \"$step\"' USR1",
        "trap : TERM  # the ranks have it too",
        f"{step} &",
        "step=$!",
        'while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done',
        *(REQUEUE.splitlines() if job.requeue else []),
        'exit "$code"',
        "",
    ]


def _time(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"
