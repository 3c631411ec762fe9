"""Kubernetes: the job as a PyTorchJob of Kubeflow's training operator, or with --ray as a RayJob of KubeRay.

A ConfigMap holds the config, and a PodDisruptionBudget keeps a drain of nodes from ending the run.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from postlude.jobs.job import PORT, Job, dump

Manifest = dict[str, Any]
CONFIG_DIRECTORY = "/etc/postlude"
SECRET = "postlude"
"""The Secret whose keys are the variables of `--env NAME`."""
INSTANCE = "app.kubernetes.io/instance"
GPU_TYPE = "nvidia.com/gpu.product"  # a label that NVIDIA's operator gives nodes
RESTARTS = 3  # of each node


def write_job(job: Job) -> str:
    """Returns the manifests as YAML. Raises ValueError if Kubernetes cannot run the job."""
    job.refuse("kubernetes", account=(job.account, "a namespace has its quota, so leave it out"))
    if job.image is None:
        raise ValueError("kubernetes needs --image, a container image with Postlude.")
    if job.ray and job.setup:
        raise ValueError("--setup has no place in the pods that Ray starts: build it into --image.")
    job.check_shared("--mount CLAIM:/shared, a PersistentVolumeClaim that all nodes may write (ReadWriteMany)")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(f"{job.name}-config", job),
        "data": {"config.yaml": job.config},
    }
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job.name, job),
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {INSTANCE: job.name}}},
    }
    return "---\n".join(map(dump, (config, budget, _ray_job(job) if job.ray else _pytorch_job(job))))


def submit_command(job: Job) -> list[str]:
    """Returns the command that submits a file with the manifests, whose name follows."""
    return ["kubectl", "apply", "-f"]


def _pytorch_job(job: Job) -> Manifest:
    policy: Manifest = {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS * job.nodes if job.requeue else 0}
    if job.time is not None:
        policy["activeDeadlineSeconds"] = job.time
    replicas = {"Master": _replicas(job, 1, master=True)}
    if job.nodes > 1:
        replicas["Worker"] = _replicas(job, job.nodes - 1)
    spec = {"nprocPerNode": str(job.ranks_per_node), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": _queued(job), "spec": spec}


def _replicas(job: Job, count: int, *, master: bool = False) -> Manifest:
    # The operator makes a service of this name, and RANK is the number of the node there.
    torchrun = job.torchrun(
        f"{job.name}-master-0",
        str(PORT),
        "$((RANK == 0))",
        config=f"{CONFIG_DIRECTORY}/config.yaml",
        more=' --local-addr "$POD_IP"',
    )
    container = _container("pytorch", job)
    container["command"] = ["bash", "-c", "\n".join(["set -e", *map(_literal, job.setup), f"exec {torchrun}"])]
    container["workingDir"] = job.directory
    container["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if master:  # the port of the rendezvous is open as long as torchrun lives
        container["ports"] = [{"name": "rendezvous", "containerPort": PORT}]
        probe = {"tcpSocket": {"port": "rendezvous"}, "periodSeconds": 10}
        container["startupProbe"] = probe | {"failureThreshold": 60}
        container["livenessProbe"] = probe | {"failureThreshold": 6}
    restart = "OnFailure" if job.requeue else "Never"
    return {"replicas": count, "restartPolicy": restart, "template": _template(job, container)}


def _ray_job(job: Job) -> Manifest:
    """Returns the manifest. KubeRay gives the pods their probes and adds `ray start` to the containers."""
    words = [job.python, "-m", "postlude", job.recipe, f"{CONFIG_DIRECTORY}/config.yaml", "--ray", "auto"]
    head = {"rayStartParams": {}, "template": _template(job, _container("ray", job))}
    cluster: Manifest = {"headGroupSpec": head}
    if job.nodes > 1:
        group = {"groupName": "workers", "replicas": job.nodes - 1, "minReplicas": job.nodes - 1}
        group |= {"maxReplicas": job.nodes - 1, "rayStartParams": {}}
        cluster["workerGroupSpecs"] = [group | {"template": _template(job, _container("ray", job))}]
    command = f"cd {shlex.quote(job.directory)} && {shlex.join([*words, *job.rank_options])}"
    spec: Manifest = {
        "entrypoint": f"bash -c {shlex.quote(command)}",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": RESTARTS if job.requeue else 0,
    }
    if job.time is not None:
        spec["activeDeadlineSeconds"] = job.time
    spec["rayClusterSpec"] = cluster
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _queued(job), "spec": spec}


def _template(job: Job, container: Manifest) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's; the default of 64 MiB is too small
    ]
    for index, mount in enumerate(job.mounts):
        volumes.append({"name": f"mount-{index}", "persistentVolumeClaim": {"claimName": mount.source}})
    spec: Manifest = {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": job.grace,
    }
    if job.gpu is not None:
        spec["nodeSelector"] = {GPU_TYPE: job.gpu}
    return {"metadata": {"labels": {INSTANCE: job.name}}, "spec": spec}


def _container(name: str, job: Job) -> Manifest:
    values = [{"name": name, "value": _literal(value)} for name, value in job.environment_values.items()]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": name}}} for name in job.environment_names
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        *({"name": f"mount-{index}", "mountPath": mount.target} for index, mount in enumerate(job.mounts)),
    ]
    limits: Manifest = {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {}
    limits |= {"cpu": job.cpus_per_node} if job.cpus_per_node else {}
    return {
        "name": name,
        "image": job.image,
        "env": [*values, *secrets],
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }


def _literal(text: str) -> str:
    """Returns what Kubernetes reads as this text: it replaces $(NAME) by the variable, and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _metadata(name: str, job: Job) -> Manifest:
    return {"name": name, "labels": {INSTANCE: job.name}}


def _queued(job: Job) -> Manifest:
    """Returns the metadata of a job that Kueue admits, if it is in a queue."""
    queue = {"kueue.x-k8s.io/queue-name": job.partition} if job.partition else {}
    return {"name": job.name, "labels": {INSTANCE: job.name} | queue}
