"""Log-probs of given tokens: of prompts, of the likeliest tokens at each position, of targets that a client names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from postlude.generate.forward import score_tokens
from postlude.generate.protocol import Completion
from postlude.model import LanguageModel
from postlude.tinker.backend import PromptScores, SampleRequest, TopK

NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""An empty cell of `TopK`."""


def score_prompts(model: LanguageModel, requests: Sequence[SampleRequest], budget: int) -> list[PromptScores]:
    """Returns the scores of each request's prompt. Prompts that have something to score run as one batch."""
    with_scores = [index for index, request in enumerate(requests) if has_prompt_scores(request)]
    scores = [PromptScores()] * len(requests)
    with_targets = [index for index in with_scores if requests[index].target_prompt_tokens is not None]
    for group in ([index for index in with_scores if index not in with_targets], *([index] for index in with_targets)):
        if group:
            for index, prompt_scores in zip(
                group, _score(model, [requests[index] for index in group], budget), strict=True
            ):
                scores[index] = prompt_scores
    return scores


def score_completions(
    model: LanguageModel, request: SampleRequest, completions: Sequence[Completion], budget: int
) -> list[TopK]:
    """Returns the likeliest tokens at each position of completions, at the temperature they were sampled with."""
    prompt, k = torch.from_numpy(request.prompt.astype(np.int64)), request.topk_sample_logprobs
    sequences = [torch.cat([prompt, torch.tensor(completion.tokens)]) for completion in completions]
    values = score_tokens(model, sequences, budget, k=k, temperature=request.sampling.temperature or 1.0)
    return [
        _top(ids[len(prompt) :], logprobs[len(prompt) :], k)
        for ids, logprobs in zip(values["ids"], values["top"], strict=True)
    ]


def check_prompt_scores(request: SampleRequest, vocab_size: int) -> None:
    """Raises ValueError for a k or targets that the model does not have."""
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= vocab_size:
            raise ValueError(f"{name} is {getattr(request, name)}, but the vocabulary has {vocab_size} tokens.")
    targets = request.target_prompt_tokens
    if targets is None:
        return
    rows = len(request.prompt) - 1
    if targets.ndim != 2 or len(targets) != rows or not targets.size:
        raise ValueError(
            f"target_prompt_logprobs has shape {list(targets.shape)}, but a prompt of {rows + 1} tokens takes "
            f"[{rows}, K]: nothing predicts the first."
        )
    if targets.min() < -1 or targets.max() >= vocab_size:
        worst = targets.min() if targets.min() < -1 else targets.max()
        raise ValueError(f"target_prompt_logprobs has token {worst}, but the vocabulary is 0 to {vocab_size - 1}.")


def has_prompt_scores(request: SampleRequest) -> bool:
    """Returns whether a request asks for scores of its prompt."""
    return request.prompt_logprobs or request.topk_prompt_logprobs > 0 or request.target_prompt_tokens is not None


def _score(model: LanguageModel, requests: Sequence[SampleRequest], budget: int) -> list[PromptScores]:
    sequences = [torch.from_numpy(request.prompt.astype(np.int64)) for request in requests]
    targets = requests[0].target_prompt_tokens
    values = score_tokens(
        model,
        sequences,
        budget,
        k=max(request.topk_prompt_logprobs for request in requests),
        targets=None if targets is None else torch.from_numpy(np.pad(targets.clip(0), ((1, 0), (0, 0)))),
    )
    scores = []
    for index, request in enumerate(requests):
        length, k, last_n = len(request.prompt), request.topk_prompt_logprobs, request.prompt_logprobs_last_n
        empty = 1 if last_n is None else max(1, length - last_n)
        logprobs = values["logprobs"][index].numpy().astype(np.float32)
        logprobs[:empty] = np.nan
        top = _top(values["ids"][index], values["top"][index], k, empty=empty) if k else None
        at_targets = None
        if targets is not None:
            at_targets = np.where(targets < 0, np.nan, values["targets"][index][1:].numpy()).astype(np.float32)
        scores.append(PromptScores(logprobs if request.prompt_logprobs else None, top, at_targets))
    return scores


def _top(ids: Tensor, logprobs: Tensor, k: int, *, empty: int = 0) -> TopK:
    tokens, values = ids[:, :k].numpy().astype(np.int32), logprobs[:, :k].numpy().astype(np.float32)
    tokens[:empty], values[:empty] = NO_TOKEN, NO_LOGPROB
    return TopK(tokens, values)
