"""Garbage collections during runs of agents do not go through what was there before, and are as before afterwards."""

from __future__ import annotations

import gc
import weakref

from postlude.recipes.rollouts.sampler import FROZEN_AT_START, YOUNG_OBJECTS, short_collections


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_goes_through_new_objects_alone() -> None:
    before, old = gc.get_threshold(), Cycle()
    with short_collections():
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        frozen, new = gc.get_freeze_count(), Cycle()
        assert frozen > FROZEN_AT_START
        with short_collections():
            assert gc.get_freeze_count() == frozen
        ends = [weakref.ref(old), weakref.ref(new)]
        del old, new
        gc.collect()
        assert [end() is None for end in ends] == [False, True]
    gc.collect()
    assert ends[0]() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= FROZEN_AT_START
