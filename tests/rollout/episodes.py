"""Steps several episodes together."""

from collections.abc import Sequence

from postlude.rollout.environments import Environment, TurnResult
from postlude.rollout.episode import AssistantTurn, Episode


def step(
    environment: Environment, episodes: Sequence[Episode], turns: Sequence[AssistantTurn | str]
) -> list[TurnResult]:
    """Gives each episode its next completion and waits for all results."""
    for episode, turn in zip(episodes, turns, strict=True):
        environment.submit(episode, AssistantTurn(turn) if isinstance(turn, str) else turn)
    results = collect(environment, len(episodes))
    return [results[id(episode)] for episode in episodes]


def collect(environment: Environment, count: int) -> dict[int, TurnResult]:
    """Waits for this number of results, and returns them by the id of their episode."""
    results: dict[int, TurnResult] = {}
    while len(results) < count:
        results |= {id(episode): result for episode, result in environment.poll(5.0)}
    return results
