"""Generator: samples answers from a LanguageModel with its own weights, many at once, without padding.

Every step is one forward over packed tokens: the newest token of each running answer, with a guess of the next where
tokens are drafted, and the whole prompts of those that join. Answers join as others finish.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.generate.completion_state import Admission, CompletionState, PrefillState, PromptState, Schedule
from postlude.generate.counter_rng import rng_key
from postlude.generate.cuda_graphs import graph_obstacle
from postlude.generate.draft import Drafter
from postlude.generate.forward import logits_at, packed
from postlude.generate.protocol import Completion
from postlude.generate.routing_record import RoutingRecord, check_routing_record
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings, draw
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.scheduler import DecodeBuffers, Need, PagedRun
from postlude.generate.stop_strings import Detokenizer, StopStrings, completion_text
from postlude.model import LanguageModel, ModelConfig
from postlude.ops.cpu_matmul import blas_fp32_matmul

Draft = Literal["mtp"]


class Generator:
    """Samples from `model` as it is at the time of the call, so that sampling and training agree to rounding.

    `max_batch_tokens` bounds the key/value cache: running answers times the tokens of the longest, prompt included.
    `max_sequences` bounds how many run at once, `max_prefill_tokens` how many tokens of new prompts join a step (a
    longer prompt joins alone). `eos_tokens` end an answer, and default to the tokenizer's; `hf.reading.end_tokens`
    gives all that a model's files name.

    With `draft="mtp"` the model's first multi-token-prediction depth guesses a token ahead, and a step that finds the
    guess right gives two tokens of an answer. The answers are the same, whatever the guesses. With `routing` answers
    tell which experts their tokens were sent to.

    On a GPU a model of `cuda_graphable` blocks, whole on its rank, takes recorded steps: the device draws tokens
    and ends answers by itself, and the host reads them a step or two later. The cache and the recording are left
    to the next call; see `release`.

    Under tensor parallelism every rank makes the same call and gets the same answers. Under data parallelism each rank
    brings prompts of its own; where they share weights they step together until the last is done, so all must call.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Detokenizer | None = None,
        *,
        max_batch_tokens: int = 65_536,
        max_sequences: int = 256,
        max_prefill_tokens: int = 8_192,
        eos_tokens: Sequence[int] | None = None,
        draft: Draft | None = None,
        routing: bool = False,
    ) -> None:
        for name, value in (
            ("max_batch_tokens", max_batch_tokens),
            ("max_sequences", max_sequences),
            ("max_prefill_tokens", max_prefill_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: the least is 1.")
        if model.stage.count > 1:
            raise ValueError(
                f"the model is stage {model.stage.index} of {model.stage.count}, but a generator needs all of it on "
                "every rank. Use a layout with pp=1."
            )
        for block in model.blocks:
            if not block.supports_decoding:
                raise ValueError(
                    f"{block.name} ({type(block).__name__}) does not say how it goes on from earlier tokens, so its "
                    "answers would be wrong. Set generates=True on a block that takes each token by itself, or that "
                    "keeps what it needs in context.decode_state."
                )
        if draft is not None:
            check_draft(draft, model.config)
        if routing:
            check_routing_record(model.config)
        self.model = model
        self.tokenizer = tokenizer
        self.draft = draft
        self.routing = routing
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.max_prefill_tokens = max_prefill_tokens
        if eos_tokens is None and tokenizer is not None and tokenizer.eos_token_id is not None:
            eos_tokens = (tokenizer.eos_token_id,)
        self.eos_tokens = frozenset(eos_tokens or ())
        self._slots: DecodeBuffers | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """Give `n` answers to each prompt of token ids, in the caller's order. A prompt passes the model once.

        `sampling` is one for all, or one a prompt. Answers are numbered from `first`. See `Completion` for what the
        log-probs are of. Where an answer fails, the others are finished, and then its error is raised.
        """
        if n < 1:
            raise ValueError(f"n={n}: give at least 1 answer a prompt.")
        samplings = sampling_per_prompt(sampling, len(prompts))
        apart = isinstance(sampling, SamplingParams)  # one seed for all: their places tell prompts apart
        groups = [
            self.answers(f"prompt {place}", tokens, own, n, apart=place if apart else 0, first=first)
            for place, (tokens, own) in enumerate(zip(prompts, samplings, strict=True))
        ]
        answers = [answer for group in groups for answer in group]
        with self.stepping():
            (self._recorded(answers) if answers and self.graph_obstacle() is None else _Run(self, answers)).finish()
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [[self.completion(answer) for answer in group] for group in groups]

    def begin(self, answers: Sequence[CompletionState]) -> PagedRun | _Run:
        """A run of these answers that others may be added to, on one rank: what a `Session` steps."""
        if self.graph_obstacle() is not None:
            return _Run(self, answers)
        need = Need.of_any(self.max_batch_tokens, self.max_sequences)
        stops = max(need.stops, *(len(answer.stop_tokens) for answer in answers))
        return self._recorded(answers, replace(need, stops=stops))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """What holds around steps."""
        with torch.no_grad(), _evaluating(self.model), blas_fp32_matmul(self.model.embedding.weight.dtype):
            yield

    def graph_obstacle(self) -> str | None:
        """Why steps cannot be recorded once and replayed, as they are on a GPU; None if they can.

        What a recorded step has no place for takes the other way, where the host makes every step: same answers, later.
        """
        if self.draft is not None:
            return f"draft={self.draft!r} makes steps of several tokens"
        if self.routing:
            return "routing=True keeps what routers choose"
        return graph_obstacle(self.model)

    def release(self, *, small: bool = True) -> None:
        """Let go of what a call leaves to the next: on a GPU the key/value cache and recorded steps.

        With `small=False` only where the cache is more than an eighth of the device's memory.
        """
        if self._slots is not None and (small or not self._slots.small):
            self._slots = None

    def _recorded(self, answers: Sequence[CompletionState], need: Need | None = None) -> PagedRun:
        need = need or Need.of(answers, self.max_batch_tokens, self.max_sequences)
        if self._slots is None or not self._slots.fit(need):
            self.release()
            self._slots = DecodeBuffers(self.model, need, next(self.model.parameters()).device)
        return PagedRun(self.model, self._slots, answers, self.max_sequences, self.max_prefill_tokens)

    def answers(
        self, name: str, tokens: Sequence[int], sampling: SamplingParams, n: int, *, apart: int = 0, first: int = 0
    ) -> list[CompletionState]:
        """`n` answers to the prompt called `name`, numbered from `first`, that have not begun; or a sentence."""
        tokens = [int(token) for token in tokens]
        size = self.model.config.vocab_size
        if not tokens:
            raise ValueError(f"{name} is empty; give at least one token, such as the one that begins a text.")
        worst = min(tokens) if min(tokens) < 0 else max(tokens)
        if not 0 <= worst < size:
            raise ValueError(f"{name} has token {worst}, but the vocabulary goes from 0 to {size - 1}.")
        if len(tokens) + sampling.max_new_tokens > self.max_batch_tokens:
            raise ValueError(
                f"{name} has {len(tokens)} tokens and may get {sampling.max_new_tokens} more, but max_batch_tokens is "
                f"{self.max_batch_tokens}. Shorten either, or raise max_batch_tokens."
            )
        for token in sampling.stop_tokens:
            if not 0 <= token < size:
                raise ValueError(f"stop token {token} of {name} is not in the vocabulary, 0 to {size - 1}.")
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} needs text to look in; give the Generator a tokenizer.")
        ends = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else self.eos_tokens)
        prompt = PromptState(tokens, sampling, not_begun=n)
        return [
            CompletionState(prompt, rng_key(sampling.seed, apart, first + number), ends, self._stop_strings(sampling))
            for number in range(n)
        ]

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        return StopStrings(self.tokenizer, sampling.stop) if sampling.stop and self.tokenizer is not None else None

    def completion(self, answer: CompletionState) -> Completion:
        """An answer that is finished, as it is given to who asked."""
        assert answer.finish_reason is not None
        text = None if self.tokenizer is None else completion_text(self.tokenizer, answer.tokens, answer.stopped_by)
        return Completion(
            answer.tokens,
            answer.logprobs,
            answer.sampled_logprobs,
            answer.finish_reason,
            text,
            drafted=answer.drafted,
            accepted=answer.accepted,
            routing=answer.routing,
            versions=tuple(answer.versions),
        )


@dataclass(frozen=True)
class _Drafts:
    """Guesses of the next tokens of the first n rows, [n], and the logits after them [n, vocab], if they are right."""

    tokens: Tensor
    logits: Tensor


class _Run:
    """The cache and the schedule, stepped until every answer is finished; others may be added meanwhile."""

    def __init__(self, generator: Generator, answers: Sequence[CompletionState]) -> None:
        self.model = generator.model
        self.device = next(generator.model.parameters()).device
        self.schedule = Schedule(
            answers,
            generator.max_batch_tokens,
            generator.max_sequences,
            generator.max_prefill_tokens,
            drafted=0 if generator.draft is None else 1,
        )
        self.cache = RowCache(self.device)
        self.settings: SamplerSettings | None = None  # of the running answers; None once they have changed
        self.together = _stepping_together(generator.model)
        self.record = RoutingRecord(self.model, self.cache) if generator.routing else None
        self.drafter = None
        if generator.draft is not None:
            self.drafter = Drafter(self.model, self.cache, self.device, together=self.together is not None)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.schedule.waiting or self.schedule.running)

    @property
    def waiting(self) -> Sequence[CompletionState]:
        """Those that have not joined."""
        return self.schedule.waiting

    def room_for(self, answer: CompletionState) -> bool:
        """Whether it would ever have room, which there is for any that a generator takes."""
        return True

    def add(self, answers: Sequence[CompletionState]) -> None:
        """More answers, which join when there is room."""
        self.schedule.add(answers)

    def restart(self) -> None:
        """Let all pass the model anew: what is cached of them is forgotten."""
        self.schedule.restart()
        self.settings = None

    def withdraw(self, answer: CompletionState) -> None:
        """Nobody wants this one any more."""
        self.cache.copy(self.schedule.withdraw(answer))
        self.settings = None

    def finish(self) -> None:
        """Step until this rank, and all that step together with it, have nothing left."""
        while self._anyone(self.busy):
            self.step()

    def step(self) -> None:
        """One forward and a token for every running answer, or two where the second was guessed right."""
        schedule = self.schedule
        before = len(schedule.running)
        self.cache.copy(schedule.evict())
        decoded = len(schedule.running)
        admission = schedule.admit()
        if decoded < before or len(schedule.running) > decoded:
            self.settings = None
        self.cache.resize(schedule.rows, schedule.capacity)
        guesses = self._guess(decoded)
        logits, later = self._forward(schedule.running[:decoded], guesses, admission.prefilled)
        if schedule.running:  # else the forward was for other ranks alone
            drafts = None if guesses is None else _Drafts(guesses, later)
            self._advance(self._begin(logits, admission, decoded), drafts)

    def _guess(self, decoded: int) -> Tensor | None:
        """What the next tokens of the first rows may be, [decoded]; None where nobody guesses."""
        if self.drafter is None:
            return None
        return self.drafter.guess(self.schedule.running[:decoded], self._all_settings().first(decoded))

    def _forward(
        self, decoded: Sequence[CompletionState], guesses: Tensor | None, prefilled: Sequence[CompletionState]
    ) -> tuple[Tensor, Tensor]:
        """The newest token of each answer in `decoded` and all tokens of each in `prefilled` -> the logits after each.

        [answers, vocab]; and those after the guesses, where there are any, [decoded, vocab].
        """
        count, answers = len(decoded), len(decoded) + len(prefilled)
        newest = torch.tensor([answer.tokens[-1] for answer in decoded], dtype=torch.int64, device=self.device)
        going_on = newest[:, None] if guesses is None else torch.stack((newest, guesses), 1)
        each = going_on.shape[1]
        beginning = [[*answer.prompt.tokens, *answer.tokens] for answer in prefilled]
        ends = [answer.length + each - 1 for answer in decoded]
        microbatch = packed(self.cache, self.model.mesh.tp, going_on, ends, beginning)
        places = microbatch.cu_seqlens[1 : answers + 1].long() - 1
        if guesses is not None:
            places = torch.cat((places[:count] - 1, places[count:], places[:count]))
        logits, states = self.model(
            microbatch, output_processor=logits_at, output_processor_context=places, decode_state=self.cache
        )
        if self.record is not None:
            self.record.keep()
        if self.drafter is not None:
            self.drafter.follow(states, count, prefilled)
        return logits[:answers], logits[answers:]

    def _begin(self, logits: Tensor, admission: Admission, decoded: int) -> Tensor:
        """Give the answers whose prompt was cached already what is kept of it, and its logits: [running, vocab]."""
        for row, answer in enumerate(admission.prefilled, start=decoded):
            if not answer.tokens:
                self._open(answer.prompt, logits[row], row)
        moves = [
            (source, target, len(answer.prompt.tokens))
            for target, (answer, source) in enumerate(admission.copied, start=len(logits))
        ]
        self.cache.copy(moves)
        firsts = [self._begin_in(row, answer) for row, (answer, _) in enumerate(admission.copied, start=len(logits))]
        return torch.cat((logits, torch.stack(firsts))) if firsts else logits

    def _open(self, prompt: PromptState, logits: Tensor, row: int) -> None:
        """Its first answer begins in this row; keep what others need, if there are any."""
        prompt.begin()
        if prompt.not_begun:
            prompt.opening = PrefillState(
                logits.clone(), self.cache.states(row)
            )  # its own memory, not the whole step's

    def _begin_in(self, row: int, answer: CompletionState) -> Tensor:
        """One more answer begins in a row that has its prompt's keys: the logits of its first token."""
        opening = answer.prompt.opening
        assert opening is not None
        answer.prompt.begin()
        self.cache.set_states(row, opening.states)
        return opening.logits

    def _advance(self, logits: Tensor, drafts: _Drafts | None) -> None:
        """A token for every running answer. The finished ones leave, or hand their rows to others of their prompt."""
        schedule = self.schedule
        finished = self._draw(schedule.running, logits, self._all_settings(), drafts)
        left: list[int] = []
        self._tell_routing(finished)
        while heirs := schedule.inherit(self._without_failed(finished)):
            left += set(finished) - set(heirs)
            answers = [schedule.running[row] for row in heirs]
            firsts = torch.stack([self._begin_in(row, schedule.running[row]) for row in heirs])
            finished = [heirs[place] for place in self._draw(answers, firsts, self._settings(answers))]
            self._tell_routing(finished)
            self.settings = None
        left += finished
        if left:
            self.cache.copy(schedule.retire(left))
            self.settings = None

    def _without_failed(self, rows: Sequence[int]) -> list[int]:
        """Those of these rows whose answer did not fail. Keys of the others may not be finite, so they are cleared."""
        failed = [row for row in rows if self.schedule.running[row].error is not None]
        self.cache.clear(failed)
        return [row for row in rows if row not in failed]

    def _tell_routing(self, rows: Sequence[int]) -> None:
        """Give the answers that are finished in these rows their record, before the rows are used again."""
        if self.record is not None:
            for row in rows:
                answer = self.schedule.running[row]
                answer.routing = self.record.of(row, answer.length)

    def _all_settings(self) -> SamplerSettings:
        """Those of the running answers."""
        if self.settings is None:
            self.settings = self._settings(self.schedule.running)
        return self.settings

    def _settings(self, answers: Sequence[CompletionState]) -> SamplerSettings:
        samplings, keys = [answer.prompt.sampling for answer in answers], [answer.key for answer in answers]
        return SamplerSettings.of(samplings, keys, self.model.config.vocab_size, self.device)

    def _draw(
        self,
        answers: Sequence[CompletionState],
        logits: Tensor,
        settings: SamplerSettings,
        drafts: _Drafts | None = None,
    ) -> list[int]:
        """One token for each of `answers` from its row of `logits` [answers, vocab]; which of them it finishes.

        The first of them get a second token, where the first is the one that was drafted.
        """
        counts = torch.tensor([len(answer.tokens) for answer in answers], device=self.device)
        drawn = draw(logits, settings, counts)
        told = [torch.stack([part.double() for part in drawn], 1)]
        guessed = 0 if drafts is None else len(drafts.tokens)
        if drafts is not None:
            right = drawn[0][:guessed] == drafts.tokens
            self.cache.settle(1 + right.long())
            tokens, *logprobs = draw(drafts.logits, settings.first(guessed), counts[:guessed] + 1)
            told.append(torch.stack([part.double() for part in (tokens.where(right, -1), *logprobs)], 1))
        rows = (torch.cat(told) if len(told) > 1 else told[0]).tolist()  # the one wait for the device
        finished = []
        for place, (answer, first) in enumerate(zip(answers, rows[: len(rows) - guessed], strict=True)):
            taken = [first]
            if place < guessed:
                second = rows[len(answers) + place]
                taken += [second] if second[0] >= 0 else []
                answer.drafted += 1
                answer.accepted += len(taken) - 1
            answer.unseen = 0
            for token, logprob, sampled in taken:
                answer.unseen += 1
                if answer.add(int(token), logprob, sampled):
                    finished.append(place)
                    break
        return finished

    def _anyone(self, busy: bool) -> bool:
        """Whether any rank that steps together with this one has work left."""
        if self.together is None:
            return busy
        flag = torch.tensor([float(busy)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.together)
        return bool(flag.item())


def check_draft(draft: str, config: ModelConfig) -> None:
    """Refuse to draft by something else than a depth of multi-token prediction, or with a model that has none."""
    if draft not in get_args(Draft):
        raise ValueError(f'draft={draft!r}: give "mtp", or None to draft nothing.')
    if not config.pattern.mtp:
        raise ValueError(
            f'draft="mtp" guesses tokens by a multi-token-prediction depth, but pattern {config.pattern} has none. '
            f"Leave draft out, or give it one: {config.pattern}/[*-], or mtp in a recipe."
        )


def _stepping_together(model: LanguageModel) -> dist.ProcessGroup | None:
    """The data-parallel ranks, where a forward of one needs the others: they share its weights or hold its experts."""
    layout, mesh = model.layout, model.mesh
    return mesh.dp.group if layout.dp_shard > 1 or layout.ep > layout.tp * layout.cp else None


@contextlib.contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    """Evaluation mode inside, whatever mode it was in outside."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
