"""Sampling of models whose weights are all trained. One copy on the device samples the weights of one after another."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from postlude.generate.protocol import SamplingUsage
from postlude.hf.load import init_or_load_weights
from postlude.hf.read_model import read_model
from postlude.tinker.rank_sampler import RankSampler, SampleCall, SampleEvents

LOG = logging.getLogger("postlude")


class ModelSampler:
    """Samples the weights of directories by name.

    The calls that wait run in order of arrival. All calls of the weights on the device run as one batch, until a call
    of other weights waits; when the batch is finished, the copy on the device is overwritten.
    """

    def __init__(self, make_sampler: Callable[[], RankSampler]) -> None:
        self._make_sampler = make_sampler
        self._sampler: RankSampler | None = None
        self._on_device: str | None = None
        self._directories: dict[str, Path] = {}
        self._waiting: list[SampleCall] = []
        self._errors: dict[int, Exception] = {}
        """The errors of calls that failed since the last step, by call."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._errors) or (self._sampler is not None and self._sampler.busy)

    def load(self, name: str, directory: Path) -> None:
        """Adds a model directory, which is read when a call needs it."""
        self._directories[name] = directory

    def remove(self, name: str) -> None:
        """Removes a model. Its calls fail. Without models, the copy on the device is freed."""
        self._directories.pop(name, None)
        self._fail_waiting(name, _closed(name))
        if name == self._on_device and self._sampler is not None:
            self._errors |= dict.fromkeys(self._sampler.fail_all(), _closed(name))
            self._on_device = None
        if not self._directories:
            self._sampler = self._on_device = None

    def add(self, calls: Sequence[SampleCall]) -> None:
        """Adds calls. Those of a model that was removed since they were sent fail."""
        self._waiting += calls
        for name in {call.weights.model for call in calls} - self._directories.keys():
            self._fail_waiting(name, _closed(name))

    def cancel(self, call_ids: Sequence[int]) -> None:
        for call_id in call_ids:
            self._errors.pop(call_id, None)
        self._waiting = [call for call in self._waiting if call.call_id not in call_ids]
        if self._sampler is not None:
            self._sampler.cancel(call_ids)

    def step(self) -> SampleEvents:
        self._start_calls()
        events = SampleEvents({}, [], busy=False) if self._sampler is None else self._sampler.step()
        errors, self._errors = self._errors, {}
        usage = events.usage + SamplingUsage(waiting=sum(call.request.num_samples for call in self._waiting))
        return SampleEvents({**errors, **events.finished}, events.progress, self.busy, usage)

    def fail_all(self) -> list[int]:
        """Drops all calls after a step that failed. Returns their ids. The weights are read again."""
        calls = [call.call_id for call in self._waiting]
        calls += self._errors
        self._waiting, self._errors, self._on_device = [], {}, None
        return calls + (self._sampler.fail_all() if self._sampler is not None else [])

    def _start_calls(self) -> None:
        """Gives the first waiting calls, all of the same weights, to the sampler once it has these weights."""
        if not self._waiting:
            return
        name = self._waiting[0].weights.model
        assert name is not None
        if name != self._on_device:
            if self._sampler is not None and self._sampler.busy:
                return
            try:
                self._read(name)
            except (OSError, ValueError) as error:
                LOG.exception("the weights of %s cannot be read", name)
                self._fail_waiting(name, RuntimeError(f"the weights of sampler {name} cannot be read: {error}"))
                return
        assert self._sampler is not None
        calls = list(itertools.takewhile(lambda call: call.weights.model == name, self._waiting))
        del self._waiting[: len(calls)]
        self._sampler.add(calls)

    def _fail_waiting(self, name: str | None, error: Exception) -> None:
        self._errors |= {call.call_id: error for call in self._waiting if call.weights.model == name}
        self._waiting = [call for call in self._waiting if call.weights.model != name]

    def _read(self, name: str) -> None:
        """Overwrites the copy on the device."""
        self._on_device = None
        if self._sampler is None:
            self._sampler = self._make_sampler()
        directory = self._directories[name]
        model = self._sampler.generator.model
        family, _ = read_model(directory, blocks=model.block_types)
        init_or_load_weights(model, directory, family, seed=0)
        self._sampler.generator.weights_changed()
        self._on_device = name


def _closed(name: str | None) -> RuntimeError:
    return RuntimeError(f"sampler {name} was closed.")
