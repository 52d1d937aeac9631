"""What ranks keep of what they share out: every element, once in each group of copies."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import some
from tests.unit.ir.test_plan import make
from whale.engine.checkpoint.blocks import cells_of, whole
from whale.ir.homes import rank_slices, syncs
from whale.ir.keeping import kept_pieces, shared
from whale.ir.plan import Plan
from whale.ir.sharding import Piece

LAYOUTS = ("data", "data-uneven", "data-tensor", "data-tensor-uneven", "3d-uneven", "tensor")


def shared_out(layout: str, weights: tuple[int, ...] = ()) -> Plan:
    plan = make("gpt", layout)
    homes = tuple(replace(home, zero=2) for home in plan.homes)
    return replace(plan, homes=homes, state_weights=weights)


def local(whole: torch.Tensor, piece: Piece | None) -> torch.Tensor:
    """The elements of a piece, in the order a rank has them."""
    if piece is None:
        return whole.new_empty(0)
    for dim, spans in piece.dims:
        whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in spans], dim)
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_group_of_copies_keeps_each_element_once(layout: str) -> None:
    plan = shared_out(layout)
    kept = [kept_pieces(plan, rank) for rank in range(plan.num_ranks)]
    for home in plan.homes:
        numbers = torch.arange(prod(home.shape)).view(home.shape)
        for dim, span, groups in syncs(plan, home):
            low, high = span or (0, home.shape[dim])
            stretch = numbers.narrow(dim, low, high - low).flatten()
            for sync in groups:
                mine = [local(numbers, kept[rank].get(home.name)).flatten() for rank in sync.ranks]
                count = torch.isin(stretch[:, None], torch.cat(mine)).sum()
                assert count == stretch.numel(), (home.name, span, sync)
                there = torch.cat(mine)
                inside = there[torch.isin(there, stretch)]
                assert inside.numel() == stretch.numel(), (home.name, span, sync)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_kept_is_part_of_what_is_computed_with(layout: str) -> None:
    plan = shared_out(layout)
    for rank in range(plan.num_ranks):
        for name, piece in kept_pieces(plan, rank).items():
            home = plan.home(name)
            numbers = torch.arange(prod(home.shape)).view(home.shape)
            mine, all_of_it = local(numbers, piece), local(numbers, plan.piece(home, rank))
            assert torch.isin(mine, all_of_it).all()
            assert mine.dim() == len(home.shape)
            assert tuple(mine.shape) == piece.shape(home.shape)


@settings(max_examples=some(40), deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS[:4]),
    weights=st.lists(st.integers(0, 7), min_size=8, max_size=8),
)
def test_shares_follow_the_weights_and_leave_nothing_out(layout: str, weights: list[int]) -> None:
    plan = shared_out(layout)
    # Everybody of a group may not have none.
    own = tuple(w + (rank == 0) for rank, w in enumerate(weights[: plan.num_ranks]))
    plan = replace(plan, state_weights=own)
    for rank in range(plan.num_ranks):
        pieces = {h.name: p for h in plan.homes if (p := plan.piece(h, rank)) is not None}
        for piece in rank_slices(plan, rank):
            total = sum(own[r] for r in piece.sync.ranks)
            if not total:
                continue
            how = shared(plan, piece, pieces[piece.home.name])
            sizes = [how.numel(member) for member in range(len(piece.sync.ranks))]
            assert sum(sizes) == piece.numel
            each = piece.numel // how.shape[how.dim] if how.shape else 1
            for member, r in enumerate(piece.sync.ranks):
                assert abs(sizes[member] - piece.numel * own[r] / total) <= each


def test_a_lone_number_and_a_short_dim_have_a_keeper() -> None:
    plan = shared_out("data")
    home = replace(plan.homes[0], name="scale", shape=())
    wide = replace(plan.homes[0], name="wide", shape=(2, 64))
    plan = replace(plan, homes=(home, wide))
    kept = [kept_pieces(plan, rank) for rank in range(plan.num_ranks)]
    assert [list(own) for own in kept].count(["scale", "wide"]) == 1
    assert all(own["wide"].shape((2, 64))[0] == 2 for own in kept)
    assert sum(own["wide"].shape((2, 64))[1] for own in kept) == 64
    cells = cells_of((), {rank: own["scale"] for rank, own in enumerate(kept) if "scale" in own})
    assert cells == [(whole(()), (0,))]
