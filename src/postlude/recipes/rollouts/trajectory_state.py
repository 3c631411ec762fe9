"""trajectory_state: a finished trajectory as JSON, for a checkpoint. `restore_trajectory` makes it again."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy
import torch

from postlude.generate.protocol import Completion, VersionSpan
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task

UNUSED = ("routing", "top_logprobs")  # of a completion: the transcript has the routing
COMPLETION = [field.name for field in fields(Completion) if field.name not in UNUSED]
TRANSCRIPT = [field.name for field in fields(Transcript) if field.name not in ("prompt", "routing")]


def trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    assert trajectory.score is not None
    return {
        "score": vars(trajectory.score) | {"components": dict(trajectory.score.components)},
        "completions": [
            {name: getattr(entry, name) for name in COMPLETION} | {"sampling_mask": _masks(entry.sampling_mask)}
            for entry in trajectory.completions
        ],
        "transcripts": [
            {name: list(getattr(entry, name)) for name in ("prompt", *TRANSCRIPT)}
            | {"sampling_mask": _masks(entry.sampling_mask), "routing": _routing_state(entry)}
            for entry in trajectory.transcripts
        ],
    }


def restore_trajectory(task: Task, state: Mapping[str, Any]) -> Trajectory:
    """Returns the trajectory of this task. It has no group yet."""
    completions = [
        Completion(**entry | {"versions": tuple(VersionSpan(*span) for span in entry["versions"])})
        for entry in state["completions"]
    ]
    transcripts = [_transcript(entry) for entry in state["transcripts"]]
    return Trajectory(task, 0, transcripts, completions, Score(**state["score"]), done=True)


def _transcript(state: Mapping[str, Any]) -> Transcript:
    transcript = Transcript(state["prompt"])
    for name in TRANSCRIPT:
        setattr(transcript, name, state[name])
    if (routing := state["routing"]) is not None:
        experts = numpy.frombuffer(base64.b64decode(routing["experts"]), numpy.int16).copy()
        transcript.routing = torch.from_numpy(experts).reshape(routing["shape"])
    return transcript


def _masks(masks: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    return None if masks is None else [list(mask) for mask in masks]  # generators give arrays, which JSON lacks


def _routing_state(transcript: Transcript) -> dict[str, Any] | None:
    if transcript.routing is None:
        return None
    experts = base64.b64encode(transcript.routing.numpy().tobytes()).decode()
    return {"shape": list(transcript.routing.shape), "experts": experts}
