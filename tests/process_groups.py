"""Process groups of the shared ranks, reused by the next call that makes the same ones.

A gloo group has three threads that wake a hundred times a second as long as it lives, about a millisecond of CPU time
a second. The groups of forty runs would take a tenth of a core on every rank, also while nobody uses them. They cannot
be destroyed after a call: what DTensor remembers of an equal mesh names its groups.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

Key = tuple[Any, ...]


class CallGroups:
    """The groups that calls made, by their ranks and options, in the order of a call.

    Groups of the same ranks in one call stay different ones: they may be in use at the same time.
    """

    def __init__(self) -> None:
        self.groups: defaultdict[Key, list[Any]] = defaultdict(list)
        self.used: Counter[Key] = Counter()
        self.make = dist.new_group

    def begin_call(self) -> None:
        """Frees the groups of the previous call, which every rank has completed."""
        self.used.clear()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Lets `dist.new_group` return groups of earlier calls."""
        with patch.object(dist, "new_group", self._group):
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Makes groups in the context that later calls do not reuse; the caller keeps them."""
        with patch.object(dist, "new_group", self.make):
            yield

    def _group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        key = (None if ranks is None else tuple(ranks), *sorted(options.items()))
        groups, index = self.groups[key], self.used[key]
        self.used[key] += 1
        if index == len(groups):
            groups.append(self.make(ranks, **options))
        elif not exists(groups[index]):
            groups[index] = self.make(ranks, **options)
        return groups[index]


def exists(group: Any) -> bool:
    """Returns whether a group was not destroyed; True if this rank is not in it."""
    try:
        dist.get_rank(group)
    except ValueError:
        return False
    return True


CALL_GROUPS = CallGroups()
