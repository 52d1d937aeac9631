"""Where receives stand: right before the compute that needs them, or one compute earlier.

Place in the flow: under `schedules.rank_actions`. A message whose receive is posted one compute
early travels while that compute runs. But a posted message occupies the device (NCCL), so a wait
for the whole device inside that compute (an allocation, a cuDNN workspace, a user's synchronize)
waits for the message too: it must not depend on that compute, and no two groups may wait for each
other so. Gradients alone come early: they flow one way, from later stages to earlier ones, and so
do the waits. Where groups have several stages, messages flow both ways, and a send may wait for a
receive that stands behind such a wait: `ir.deadlock.safe_from_device_waits` moves it up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale.ir.deadlock import safe_from_device_waits
from whale.ir.schedule import Action, Links, Schedule

Orders = Sequence[Sequence[Action]]
Posts = list[list[Action]]
"""For each compute of a group, the receives to post right before it."""
Channels = Mapping[tuple[int, int], Sequence[Action]]
"""The receives on each (source group, destination group), in the sender's order."""


def with_messages(schedule: Schedule, orders: Orders) -> tuple[tuple[Action, ...], ...]:
    """The computes of all groups with sends and receives around them."""
    links = schedule.links()
    channels = _channels(orders, links)
    late = [_late(order, links, channels) for order in orders]
    plain = _lists(orders, late, links)
    needs = _needs(orders, links)
    if needs is None:
        return plain  # It hangs: `check_schedule` says where.
    early = [_early(group, posts, needs) for group, posts in enumerate(late)]
    for lists in (_lists(orders, early, links), plain):
        safe = safe_from_device_waits(schedule, dict(enumerate(lists)))
        if safe is not None:
            return tuple(tuple(safe[group]) for group in range(len(orders)))
    return plain


def _lists(orders: Orders, posts: Sequence[Posts], links: Links) -> tuple[tuple[Action, ...], ...]:
    found = []
    for order, before in zip(orders, posts, strict=True):
        actions: list[Action] = []
        for action, due in zip(order, before, strict=True):
            actions += [*due, action, *links.sends_after(action)]
        found.append(tuple(actions))
    return tuple(found)


def _channels(orders: Orders, links: Links) -> Channels:
    channels: dict[tuple[int, int], list[Action]] = {}
    for group, order in enumerate(orders):
        for action in order:
            for send in links.sends_after(action):
                assert send.peer is not None
                channels.setdefault((group, links.group[send.peer]), []).append(send.mate)
    return channels


def _late(order: Sequence[Action], links: Links, channels: Channels) -> Posts:
    """For each compute, the receives to post for it that no earlier compute needed."""
    posted: dict[tuple[int, int], int] = {}
    position: dict[Action, int] = {}
    posts: Posts = []
    for action in order:
        due: list[Action] = []
        for receive in links.receives_before(action):
            assert receive.peer is not None
            channel = (links.group[receive.peer], links.group[receive.stage])
            messages = channels.get(channel, [])
            if channel not in posted:
                posted[channel] = 0
                position.update((message, at) for at, message in enumerate(messages))
            # A message nobody sends (a bad explicit order) is left out: check_schedule names it.
            upto = position.get(receive, -1) + 1
            due.extend(messages[posted[channel] : upto])
            posted[channel] = max(posted[channel], upto)
        posts.append(due)
    return posts


def _early(group: int, late: Posts, needs: Mapping[Action, Sequence[int]]) -> Posts:
    """Gradients one compute earlier, where none of them needs that compute of this group."""
    posts: Posts = [[] for _ in late]
    for index, due in enumerate(late):
        free = index > 0 and all(
            receive.kind == "RB" and needs[_maker(receive, needs)][group] < index for receive in due
        )
        posts[index - 1 if free else index] += due
    return posts


def _needs(orders: Orders, links: Links) -> dict[Action, list[int]] | None:
    """Of each compute, how many computes of every group come before it or are it.

    None where the groups wait for each other for ever, or for what nobody makes.
    """
    needs: dict[Action, list[int]] = {}
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for group, order in enumerate(orders):
            while at[group] < len(order):
                action = order[at[group]]
                makers = [_maker(receive, needs) for receive in links.receives_before(action)]
                if any(maker not in needs for maker in makers):
                    break
                before = needs[order[at[group] - 1]] if at[group] else [0] * len(orders)
                for maker in makers:
                    before = list(map(max, before, needs[maker]))
                at[group] += 1
                needs[action] = [*before[:group], at[group], *before[group + 1 :]]
                moved = True
    return needs if at == [len(order) for order in orders] else None


def _maker(receive: Action, known: Mapping[Action, object]) -> Action:
    """The compute whose result a message brings."""
    assert receive.peer is not None
    whole = Action(kind=receive.kind[1], stage=receive.peer, micro_batch=receive.micro_batch)
    if receive.kind == "RB" and whole not in known:
        return Action(kind="I", stage=receive.peer, micro_batch=receive.micro_batch)
    return whole
