"""Levels: the groups of a two-level all-to-all, inside nodes and between them.

Place in the flow: the planner lists them among a plan's process groups, `expand` names them in the
schedule, and `engine.lower` finds them again.
"""

from __future__ import annotations

from collections.abc import Iterator


def level_groups(
    ranks: tuple[int, ...], per_node: int, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(inside its node, between nodes) of a rank; nodes are consecutive parts of `ranks`."""
    node, place = divmod(ranks.index(rank), per_node)
    return ranks[node * per_node : (node + 1) * per_node], ranks[place::per_node]


def all_level_groups(ranks: tuple[int, ...], per_node: int) -> Iterator[tuple[int, ...]]:
    """Every group of both levels, in an order all ranks agree on."""
    for low in range(0, len(ranks), per_node):
        yield ranks[low : low + per_node]
    for place in range(per_node):
        yield ranks[place::per_node]
