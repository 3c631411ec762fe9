"""Layout is a value: it round-trips through text, and invalid layouts are refused with clear errors."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from postlude import Layout, Stage
from postlude.hf.read_model import model_from_hf, read_description
from postlude.world.mesh import Mesh
from tests.process_groups import CALL_GROUPS

AXES = ("pp", "vpp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@given(st.fixed_dictionaries({}, optional={axis: st.integers(1, 4) for axis in AXES}))
def test_parse_equals_the_constructor(degrees: dict[str, int]) -> None:
    text = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    try:
        expected = Layout(**degrees)
    except ValueError:
        with pytest.raises(ValueError, match="Layout"):
            Layout.parse(text)
        return
    assert Layout.parse(text) == expected
    assert Layout.parse(str(expected).removeprefix("Layout(").removesuffix(")")) == expected
    pp, dp = degrees.get("pp", 1), degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    assert expected.world_size == pp * dp * degrees.get("cp", 1) * degrees.get("tp", 1)
    assert expected.stages == pp * degrees.get("vpp", 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp_shrad=2", "'dp_shrad' is not an axis; did you mean 'dp_shard'"),
        ("zebra=2", "the axes are pp, vpp"),
        ("pp", "'pp' is not of the form pp=N"),
        ("pp=two", "'pp=two' is not of the form"),
        ("pp=²", "is not of the form"),
        ("pp=2,pp=2", "'pp' is given twice"),
        ("tp=0", "at least 1"),
        ("vpp=2", "need pp of at least 2"),
        ("ep=3,tp=2", "ep=3 does not divide dp_shard·cp·tp = 1·1·2 = 2"),
    ],
)
def test_invalid_layouts_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Layout.parse(text)


def test_stages_count_from_zero() -> None:
    assert Stage().first
    assert Stage().last
    assert not Stage(1, 3).first
    assert not Stage(1, 3).last
    with pytest.raises(ValueError, match="stage 3 of 3 does not exist"):
        Stage(3, 3)


def created_groups(group: Any, layout: str) -> list[list[int]]:
    """Returns the ranks of every group that a second mesh creates."""
    Mesh(Layout.parse(layout))
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        Mesh(Layout.parse(layout))
    return [call.args[0] for call in new_group.call_args_list]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp_shard=2", []),
        ("dp_shard=2,ep=2", [[0, 1]]),
        ("tp=2", [[0, 1]]),
        ("cp=2", [[0, 1]]),
        ("cp=2,tp=2", [[0, 2], [1, 3], [0, 1], [2, 3], [0, 2], [1, 3]]),
        ("pp=2", [[0, 1], [0, 1]]),
    ],
)
def test_mesh_creates_each_group_once_and_no_unused_ones(ranks: Any, layout: str, expected: list[list[int]]) -> None:
    """The world group and that of each rank alone exist already; a gloo group keeps three threads running."""
    assert ranks(Layout.parse(layout).world_size, created_groups, layout)[0] == expected


def made_after_another_group_was_destroyed(group: Any) -> None:
    with CALL_GROUPS.kept():
        others = [dist.new_group(backend="gloo") for _ in range(3)]
        Mesh(Layout(pp=2))  # three groups
        for other in others:
            dist.destroy_process_group(other)
        Mesh(Layout(pp=2))


def test_meshes_are_made_after_other_groups_were_destroyed(ranks: Any) -> None:
    """torch names a group of one rank by the number of groups, which is then one that was used."""
    ranks(2, made_after_another_group_was_destroyed)


def shared_groups(group: Any, layout: str) -> list[str]:
    """Returns axes that move tokens and share a group with another axis or with weights."""
    mesh = Mesh(Layout.parse(layout))
    groups = [(name, getattr(mesh, name).group) for name in ("cp", "tp", "ep")]
    groups += [("F or B", channel) for channel in mesh.channels.values()]
    for shards in (mesh.fsdp_mesh, mesh.expert_fsdp_mesh):
        groups += [("weights", group) for group in shards.get_all_groups()]
    return [
        f"{name} and {other_name}"
        for place, (name, group) in enumerate(groups)
        for other_name, other_group in groups[place + 1 :]
        if group is not None and group is other_group and name != "weights"
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2,ep=2",
        "cp=2",
        "cp=2,ep=2",
        "tp=2",
        "tp=2,ep=2",
        "pp=2",
        pytest.param("dp_shard=2,tp=2,ep=2", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,tp=2,ep=2", marks=pytest.mark.slow),
        pytest.param("pp=2,dp_shard=2,ep=2", marks=pytest.mark.slow),
    ],
)
def test_weights_and_each_token_exchange_have_separate_groups(ranks: Any, layout: str) -> None:
    """Even over the same ranks: in one group, a weight gather would wait for a token exchange."""
    assert ranks(Layout.parse(layout).world_size, shared_groups, layout)[0] == []


@pytest.mark.parametrize(
    ("model", "layout", "sentence"),
    [
        ("tiny-dense", "tp=3", r"8 heads and 4 key heads, which tp=3 ranks cannot share: .* Use tp=2 or 4\."),
        ("tiny-dense", "tp=16", r"which tp=16 ranks cannot share: .* Use tp=8\."),
        ("tiny-dense", "pp=3,vpp=2", r"its 4 layers cannot fill pp·vpp = 6 stages\. Use 4 stages or fewer"),
        ("tiny-moe", "dp_shard=3,ep=3", r"8 experts, which ep=3 ranks cannot share evenly\. Use ep=2 or 4\."),
    ],
)
def test_error_suggests_the_nearest_layout_that_divides_the_model(model: str, layout: str, sentence: str) -> None:
    _, config = model_from_hf(read_description(model))
    with pytest.raises(ValueError, match=sentence):
        config.check_layout(Layout.parse(layout))
