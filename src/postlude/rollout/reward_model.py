"""ModelReward: scores completions with a reward model, all that wait together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from math import isfinite

import torch

from postlude.data import pack
from postlude.data.chat import EncodedSequence, Encoder
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import check_value_head, context_length, read_model
from postlude.model import LanguageModel
from postlude.objectives.preference import sequence_scores
from postlude.rollout.episode import AssistantTurn, Episode
from postlude.rollout.reward import WAIT_SECONDS, Reward, Scored
from postlude.rollout.rewards import FailureCounter, Score
from postlude.rollout.tasks import Task


class ModelReward(FailureCounter, Reward):
    """The score that a reward model gives prompt and completion, or all turns of an episode and the observations.

    It scores completions without their thoughts. The reward model has its own tokenizer and chat template, and encodes
    them as `postlude rm` does. It is loaded by the process that first scores a completion. A completion that it cannot
    encode, or that is longer than `budget` or its context length with its prompt, counts as a failed call.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str | None = None,
        budget: int = 8192,
        trust_remote_code: bool = False,
        failed_reward: float | None = None,
    ) -> None:
        super().__init__(f"the reward model {model}", failed_reward)
        self.source, self.budget, self.trust_remote_code = model, budget, trust_remote_code
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._waiting: list[Episode] = []

    @cached_property
    def model(self) -> LanguageModel:
        """The reward model, in bf16 on a GPU and in fp32 elsewhere."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return load_model(self.source, dtype=dtype, device=self.device, value_head=True).eval()

    @cached_property
    def encoder(self) -> Encoder:
        """Encodes a prompt with its completion."""
        length = context_length(read_model(self.source)[1]) or self.budget
        tokenizer = load_tokenizer(self.source, trust_remote_code=self.trust_remote_code)
        return Encoder(tokenizer=tokenizer, max_length=min(self.budget, length))

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Loads the reward model and scores one completion. Raises ValueError if that fails."""
        check_value_head(self.source)
        (score,) = self._scores([self._encode(Episode(task, [turn]))])
        if not isfinite(score):
            raise ValueError(f"{self.name} gives {task.name} a score of {score}. Check its weights.")

    def close(self) -> None:
        self.__dict__.pop("model", None)

    def submit(self, episode: Episode) -> None:
        self._waiting.append(episode)

    def poll(self, timeout: float | None = 0.0) -> Scored:
        episodes, self._waiting = self._waiting, []
        if not episodes:
            time.sleep(WAIT_SECONDS if timeout is None else min(timeout, WAIT_SECONDS))
            return []
        encoded: dict[int, EncodedSequence] = {}
        results: dict[int, Score] = {}
        for index, episode in enumerate(episodes):
            try:
                encoded[index] = self._encode(episode)
            except ValueError as error:
                results[index] = self.invalid(ValueError(f"could not encode a completion: {error}"))
        scores = dict(zip(encoded, self._scores(list(encoded.values())), strict=True)) if encoded else {}
        for index, score in scores.items():
            results[index] = self._score(score, episodes[index].task.name)
        return [(episode, results[index]) for index, episode in enumerate(episodes)]

    def _encode(self, episode: Episode) -> EncodedSequence:
        task, transcript = episode.task, episode.transcript(thoughts=False)
        if isinstance(task.prompt, str):
            return self.encoder.completion(task.prompt, [message["content"] for message in transcript], task.name)
        return self.encoder.completion([*task.prompt, *transcript[:-1]], transcript[-1:], task.name)

    def _score(self, score: float, row: str) -> Score:
        if not isfinite(score):
            return self.invalid(ValueError(f"returned {score} for {row}, but a reward is finite."))
        return Score(score)

    @torch.no_grad()
    def _scores(self, sequences: Sequence[EncodedSequence]) -> list[float]:
        scores: dict[int, float] = {}
        for microbatch in pack([sequence.tokens for sequence in sequences], budget=self.budget):
            values = self.model(microbatch.to(self.device), output_processor=lambda inputs, _: sequence_scores(inputs))
            scores |= dict(zip(microbatch.sequences, values.tolist(), strict=True))
        return [scores[index] for index in range(len(sequences))]
