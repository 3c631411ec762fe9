"""DraftSwitch: turns drafting off while it does not pay, by the tokens per second of both ways in the run itself.

It reads the clock, and drafts change the last bits of log-probs by rounding. So a run that has to be repeatable to the
bit uses it only where results do not depend on the batch.
"""

from __future__ import annotations

RETRY_ROUNDS = 50  # with one way, until the other is tried again
TRIAL_ROUNDS = 2  # of which the first warms up, such as by capturing CUDA graphs, and is not counted


class DraftSwitch:
    """Says in which rounds to draft. A round is what is sampled between two updates of the weights.

    The first rounds draft, the next ones do not, and then the faster way stays. When the tokens per second with drafts
    fall below those without, drafting is turned off. After `RETRY_ROUNDS` the other way is tried again. Speeds are
    compared at about equal numbers of unfinished completions, since few completions gain more than many.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._finished_rounds = -1  # with the current way
        # With drafts and without: tokens and seconds, by the number of bits of the number of unfinished completions.
        self._measured: dict[bool, dict[int, tuple[float, float]]] = {True: {}, False: {}}

    def add(self, completions: int, tokens: int, seconds: float) -> None:
        """Counts some time of this round, in which so many tokens of unfinished completions were sampled."""
        if self._finished_rounds > 0:
            by_size, size = self._measured[self.drafting], completions.bit_length()
            tokens_before, seconds_before = by_size.get(size, (0.0, 0.0))
            by_size[size] = tokens_before + tokens, seconds_before + seconds

    @property
    def speedup(self) -> float | None:
        """Tokens per second with drafts over those without; None before both were measured."""
        drafted, plain = self._measured[True], self._measured[False]
        pairs = [(drafted[size], plain[size]) for size in drafted.keys() & plain.keys() if plain[size][0]]
        seconds = sum(drafted_seconds for (_, drafted_seconds), _ in pairs)
        if not seconds:
            return None
        return sum(tokens * plain_seconds / count for (tokens, _), (count, plain_seconds) in pairs) / seconds

    def next_round(self) -> bool:
        """Begins a round, and returns whether to draft in it."""
        self._finished_rounds += 1
        if self._finished_rounds >= TRIAL_ROUNDS:
            pays = self.speedup is None or self.speedup >= 1.0
            if self.drafting:
                change = not pays or not self._measured[False]
            else:
                change = pays and self._finished_rounds == TRIAL_ROUNDS
            if change or self._finished_rounds >= RETRY_ROUNDS:
                self.drafting, self._finished_rounds = not self.drafting, 0
                self._measured[self.drafting] = {}
            elif self.drafting:  # what was measured with earlier weights counts less and less
                self._measured[True] = {
                    size: (tokens / 2, seconds / 2) for size, (tokens, seconds) in self._measured[True].items()
                }
        return self.drafting
