"""log_trajectories: what a run keeps of its trajectories. Samples for the report, and all completions as a table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from math import isnan

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.recipes.run.completion_tables import CompletionRow, LoggedTurn
from postlude.recipes.run.directory import RunDirectory, Sample
from postlude.rollout.conversations import Trajectory

LOGGED_SAMPLES = 8  # trajectories per step that are written to samples.jsonl
LOGGED_TURNS = 64  # of a sample: the first half and the last
LOGGED_TEXT = 8_000  # characters of what a turn of a sample read: the first half and the last


def log_trajectories(
    run: RunDirectory, step: int, trajectories: Sequence[Trajectory], tokenizer: ChatTokenizer, *, save_all: bool
) -> None:
    """Writes a few trajectories of a step for the report, and with `save_all` all of them as a table."""
    count = min(len(trajectories), LOGGED_SAMPLES)
    chosen = [trajectories[index * len(trajectories) // count] for index in range(count)]
    run.log_samples(step, [_sample(trajectory, tokenizer) for trajectory in chosen])
    if save_all:
        run.log_completions(step, [_completion_row(step, trajectory, tokenizer) for trajectory in trajectories])


def _completion_row(step: int, trajectory: Trajectory, tokenizer: ChatTokenizer) -> CompletionRow:
    prompt, completions = trajectory.task.prompt, trajectory.completions
    return CompletionRow(
        step=step,
        group=trajectory.group,
        environment=trajectory.task.environment,
        prompt=prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        completion=_joined_text(trajectory),
        reward=None if trajectory.excluded or isnan(trajectory.reward) else trajectory.reward,
        components={name: value for name, value in trajectory.components.items() if not isnan(value)},
        truncated=trajectory.truncated,
        tokens=[token for completion in completions for token in completion.tokens],
        logprobs=[logprob for completion in completions for logprob in completion.logprobs],
        error=_error(trajectory),
        turns=[turn for turn, _, _ in _turns(trajectory, tokenizer)],
    )


def _sample(trajectory: Trajectory, tokenizer: ChatTokenizer) -> Sample:
    """Returns a row of samples.jsonl, the completions of its turns joined by "…"."""
    prompt, turns = trajectory.task.prompt, _turns(trajectory, tokenizer)
    if len(turns) > LOGGED_TURNS:
        turns = turns[: LOGGED_TURNS // 2] + turns[-LOGGED_TURNS // 2 :]
    tokens = [token for _, sampled, _ in turns for token in sampled]
    return Sample(
        prompt=prompt if isinstance(prompt, str) else str(prompt[-1]["content"]),
        completion=_joined_text(trajectory),
        reward=trajectory.reward,
        components={name: value for name, value in trajectory.components.items() if not isnan(value)},
        tokens=tokens,
        token_strings=[tokenizer.decode([token]) for token in tokens],
        logprobs=[logprob for _, _, logprobs in turns for logprob in logprobs],
        error=_error(trajectory),
        turns=[LoggedTurn(turn.sequence, _shortened(turn.read), turn.tokens) for turn, _, _ in turns],
        finish_reason=trajectory.completions[-1].finish_reason if trajectory.completions else None,
    )


def _turns(trajectory: Trajectory, tokenizer: ChatTokenizer) -> list[tuple[LoggedTurn, list[int], list[float]]]:
    """Returns what the model read and wrote in turn, with the tokens that it wrote and their log-probs."""
    turns = []
    for sequence, transcript in enumerate(trajectory.transcripts):
        start = place = 0
        for written, run in itertools.groupby(transcript.mask):
            end = place + len(list(run))
            if written:
                read = tokenizer.decode(list(transcript.tokens[start:place]), skip_special_tokens=False)
                sampled, logprobs = transcript.tokens[place:end], transcript.logprobs[place:end]
                turns.append((LoggedTurn(sequence, read, end - place), list(sampled), list(logprobs)))
                start = end
            place = end
    return turns


def _error(trajectory: Trajectory) -> str | None:
    return None if trajectory.score is None else trajectory.score.error


def _joined_text(trajectory: Trajectory) -> str:
    return "\n…\n".join(completion.text or "" for completion in trajectory.completions)


def _shortened(text: str) -> str:
    omitted = len(text) - LOGGED_TEXT
    if omitted <= 0:
        return text
    return f"{text[: LOGGED_TEXT // 2]} … {omitted} characters left out … {text[-LOGGED_TEXT // 2 :]}"
