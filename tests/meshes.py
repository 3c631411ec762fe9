"""Meshes of the long-lived ranks, made once a layout."""

from __future__ import annotations

import functools

from postlude.layout import Layout
from postlude.world.mesh import Mesh


@functools.cache
def mesh(layout: Layout) -> Mesh:
    return Mesh(layout)
