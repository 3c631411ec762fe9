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
    results = environment.collect(len(episodes), None)
    return [results[id(episode)][1] for episode in episodes]
