"""Every kind of schedule over many shapes: legal, within its limits, and as fast as theory says."""

from __future__ import annotations

from itertools import product

import pytest

from whale.errors import ScheduleError
from whale.ir.deadlock import check_schedule, safe_from_device_waits
from whale.ir.schedule import Action, Schedule
from whale.planner.schedules import (
    SCHEDULES,
    canonical_kind,
    compute_order,
    peak_in_flight,
    rank_actions,
)

Edges = tuple[tuple[int, int], ...]
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}
KINDS = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def pipeline(
    kind: str, num_groups: int, num_stages: int, num_micro_batch: int, edges: Edges | None = None
) -> Schedule:
    """Stages dealt round robin; a chain unless `edges` says otherwise."""
    chain = tuple((stage, stage + 1) for stage in range(num_stages - 1))
    return Schedule(
        kind=kind,
        num_micro_batch=num_micro_batch,
        groups=tuple(tuple(range(g, num_stages, num_groups)) for g in range(num_groups)),
        edges=chain if edges is None else edges,
    )


def check(schedule: Schedule) -> None:
    check_schedule(schedule, {g: rank_actions(schedule, g) for g in range(len(schedule.groups))})


def survives_device_waits(schedule: Schedule, columns: dict[int, list[Action]]) -> bool:
    return safe_from_device_waits(schedule, columns) == columns


def makespan(schedule: Schedule) -> int:
    """Ticks until all is done when each group runs its order as soon as the inputs are there."""
    links = schedule.links()
    orders = {g: compute_order(schedule, g) for g in range(len(schedule.groups))}
    clock = dict.fromkeys(orders, 0)
    end: dict[tuple[str, int, int], int] = {}

    def needs(action: Action) -> list[tuple[str, int, int]]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "F":
            return [("F", producer, micro_batch) for producer in links.producers[stage]]
        if action.kind == "W":
            return [("B", stage, micro_batch)]
        consumers = [("B", consumer, micro_batch) for consumer in links.consumers[stage]]
        return [("F", stage, micro_batch), *consumers]

    while any(orders.values()):
        ready = [g for g, o in orders.items() if o and all(n in end for n in needs(o[0]))]
        assert ready, "the orders wait for each other"
        for group in ready:
            action = orders[group].pop(0)
            start = max([clock[group], *(end[n] for n in needs(action))])
            clock[group] = start + COSTS[action.kind]
            kind = "B" if action.kind == "I" else action.kind
            end[kind, action.stage, action.micro_batch] = clock[group]
    return max(clock.values())


@pytest.mark.parametrize(("kind", "num_groups"), list(product(KINDS, range(1, 6))))
def test_every_shape_is_legal(kind: str, num_groups: int) -> None:
    for num_stages in range(num_groups, 3 * num_groups + 1):
        for num_micro_batch in range(1, 10):
            check(pipeline(kind, num_groups, num_stages, num_micro_batch))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_stages", "edges"),
    [
        (3, ((0, 1), (1, 2), (0, 2))),
        (6, ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (1, 3), (0, 2))),
        (5, ((0, 2), (1, 2), (2, 3), (2, 4), (0, 4))),
        (4, ()),
        (7, ((0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6))),
    ],
)
def test_skip_edges_and_towers_are_legal(kind: str, num_stages: int, edges: Edges) -> None:
    for num_groups, num_micro_batch in product(range(1, num_stages + 1), (1, 2, 3, 5, 8)):
        check(pipeline(kind, num_groups, num_stages, num_micro_batch, edges))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 3)),
        ((0, 1, 2), (3,)),
        ((2, 3), (0, 1)),
        ((0, 3), (1, 2)),
        ((3,), (0, 1, 2)),
    ],
)
def test_groups_that_are_not_round_robin_are_legal(
    kind: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    for num_micro_batch in range(1, 8):
        check(
            Schedule(
                kind=kind,
                num_micro_batch=num_micro_batch,
                groups=groups,
                edges=((0, 1), (1, 2), (2, 3), (0, 3)),
            )
        )


def test_orders_in_full() -> None:
    def order(kind: str, group: int, num_stages: int = 2) -> str:
        return " ".join(map(str, compute_order(pipeline(kind, 2, num_stages, 3), group)))

    assert order("gpipe", 0) == "0F0 0F1 0F2 0B0 0B1 0B2"
    assert order("1f1b", 0) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert order("1f1b", 1) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert order("interleaved", 0) == order("1f1b", 0)
    assert order("zero-bubble", 1) == "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"


def test_messages_in_full() -> None:
    schedule = pipeline("1f1b", 2, 2, 2)
    assert " ".join(map(str, rank_actions(schedule, 0))) == (
        "0F0 0SF0>1 0RB0<1 0F1 0SF1>1 0RB1<1 0B0 0B1"
    )
    assert " ".join(map(str, rank_actions(schedule, 1))) == (
        "1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0"
    )


def test_a_gradient_that_needs_the_compute_before_it_is_not_received_earlier() -> None:
    schedule = pipeline("1f1b", 2, 2, 1)
    assert " ".join(map(str, rank_actions(schedule, 0))) == "0F0 0SF0>1 0RB0<1 0B0"


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (3, 4), (5, 9)])
def test_computes_may_wait_for_their_device(kind: str, p: int, m: int) -> None:
    schedule = pipeline(kind, p, p, m)
    columns = {group: rank_actions(schedule, group) for group in range(p)}
    assert survives_device_waits(schedule, columns)
    early = 0
    for column in columns.values():
        order = [action for action in column if action.is_compute]
        for at, action in enumerate(column):
            if action.is_receive:
                done = sum(other.is_compute for other in column[:at])
                kinds = "F" if action.kind == "RF" else "BI"
                user = next(
                    i
                    for i, compute in enumerate(order)
                    if compute.kind in kinds
                    and (compute.stage, compute.micro_batch) == (action.stage, action.micro_batch)
                )
                assert user - done in ((0,) if action.kind == "RF" else (0, 1))
                early += user - done
    assert early > 0 or m == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("groups", "chunks", "m"), [(2, 2, 4), (3, 2, 5), (4, 2, 8), (2, 3, 1)])
@pytest.mark.parametrize("skip", [False, True])
def test_several_stages_per_group_may_wait_too(
    kind: str, groups: int, chunks: int, m: int, skip: bool
) -> None:
    """Messages flow both ways there: receives are moved up where two sends would wait for them."""
    count = groups * chunks
    edges = tuple((s, s + 1) for s in range(count - 1)) + (((0, count - 1),) if skip else ())
    schedule = pipeline(kind, groups, count, m, edges)
    columns = {group: rank_actions(schedule, group) for group in range(groups)}
    check_schedule(schedule, columns)
    assert survives_device_waits(schedule, columns)
    for group, column in columns.items():
        assert [a for a in column if a.is_compute] == compute_order(schedule, group)


def test_interleaved_could_hang_with_every_receive_late() -> None:
    schedule = pipeline("interleaved", 2, 4, 4)
    links, late = schedule.links(), {}
    for group in range(2):
        late[group] = []
        for action in rank_actions(schedule, group):
            if action.is_compute:
                late[group] += links.receives_before(action)
            late[group] += [] if action.is_receive else [action]
    check_schedule(schedule, late)
    assert not survives_device_waits(schedule, late)


def test_computes_that_wait_in_a_circle_cannot_be_helped() -> None:
    schedule = explicit("0F0 0B0", "1B0 1F0")
    columns = {group: rank_actions(schedule, group) for group in range(2)}
    assert safe_from_device_waits(schedule, columns) is None


def test_two_groups_that_receive_early_could_wait_for_each_other() -> None:
    """Why activations come no earlier: both receive during a compute that the other waits for."""
    schedule = pipeline("1f1b", 2, 2, 3)
    columns = {group: rank_actions(schedule, group) for group in range(2)}
    last = [str(action) for action in columns[1]]
    assert last[4:8] == ["1RF1<0", "1F1", "1B1", "1SB1>0"]
    hoisted = [*columns[1]]
    hoisted.insert(6, hoisted.pop(8))
    assert str(hoisted[6]) == "1RF2<0"
    both = {0: columns[0], 1: hoisted}
    check_schedule(schedule, both)
    assert not survives_device_waits(schedule, both)


def test_receives_follow_the_senders_order_but_are_not_all_posted_at_once() -> None:
    schedule = pipeline("interleaved", 2, 4, 8)
    columns = [rank_actions(schedule, group) for group in range(2)]
    for source, destination in ((0, 1), (1, 0)):
        sent = [action.mate for action in columns[source] if action.is_send]
        assert sent == [action for action in columns[destination] if action.is_receive]
    for column in columns:
        waiting = peak = 0
        for action in column:
            waiting += action.is_receive
            waiting -= len(schedule.links().receives_before(action)) if action.is_compute else 0
            peak = max(peak, waiting)
        assert peak <= 4


@pytest.mark.parametrize(("p", "m"), list(product(range(1, 6), range(1, 10))))
def test_in_flight_is_limited(p: int, m: int) -> None:
    for group in range(p):
        assert peak_in_flight(pipeline("gpipe", p, p, m), group) == m
        for kind in ("1f1b", "interleaved"):
            assert peak_in_flight(pipeline(kind, p, p, m), group) == min(m, p - group)
        assert peak_in_flight(pipeline("zero-bubble", p, p, m), group) == min(m, p - group)


@pytest.mark.parametrize(("p", "v", "m"), list(product(range(1, 6), (2, 3), range(1, 10))))
def test_interleaved_in_flight_is_megatrons_warm_up(p: int, v: int, m: int) -> None:
    for kind, num_stages in product(("interleaved", "zero-bubble"), (p * v, p * v - p + 1)):
        schedule = pipeline(kind, p, num_stages, m)
        for group in range(p):
            limit = 2 * (p - group - 1) + (v - 1) * p + 1
            held = len(schedule.groups[group]) * m
            peak = peak_in_flight(schedule, group)
            assert peak <= min(limit, held)
            if kind == "interleaved" and m % p == 0 and num_stages == p * v:
                assert peak == min(limit, held)


@pytest.mark.parametrize(("p", "m"), list(product(range(1, 6), range(1, 10))))
def test_time_of_gpipe_and_1f1b(p: int, m: int) -> None:
    assert makespan(pipeline("gpipe", p, p, m)) == (m + p - 1) * 3
    assert makespan(pipeline("1f1b", p, p, m)) == (m + p - 1) * 3


@pytest.mark.parametrize(("p", "v", "rounds"), list(product(range(1, 6), (1, 2, 3, 4), (1, 2, 3))))
def test_interleaved_bubble_shrinks_by_the_number_of_chunks(p: int, v: int, rounds: int) -> None:
    # A chunk is 1/v of a stage, so (p-1)*3 ticks of chunks are (p-1)*3/v of whole stages.
    m = rounds * p
    assert makespan(pipeline("interleaved", p, p * v, m)) == m * v * 3 + (p - 1) * 3


@pytest.mark.parametrize(("p", "v", "m"), list(product(range(2, 6), (2, 3), range(1, 10))))
def test_interleaved_beats_1f1b_for_any_micro_batches(p: int, v: int, m: int) -> None:
    assert makespan(pipeline("interleaved", p, p * v, m)) <= (m + p - 1) * 3 * v


@pytest.mark.parametrize(("p", "extra"), list(product(range(2, 6), range(6))))
def test_zero_bubble_takes_the_weight_gradients_out_of_the_drain(p: int, extra: int) -> None:
    m = p + extra
    assert makespan(pipeline("zero-bubble", p, p, m)) == m * 3 + (p - 1) * 2
    assert makespan(pipeline("zero-bubble", p, p, m)) < makespan(pipeline("1f1b", p, p, m))


@pytest.mark.parametrize(("p", "v", "rounds"), list(product(range(2, 6), (2, 3), (1, 2))))
def test_zero_bubble_beats_interleaved(p: int, v: int, rounds: int) -> None:
    zero_bubble = pipeline("zero-bubble", p, p * v, rounds * p)
    assert makespan(zero_bubble) < makespan(pipeline("interleaved", p, p * v, rounds * p))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((kind, kind) for kind in KINDS),
        ("1F1B", "1f1b"),
        ("PreferForward", "gpipe"),
        ("preferBackward", "1f1b"),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert canonical_kind(name) == kind
    assert compute_order(pipeline(name, 2, 2, 3), 0) == compute_order(pipeline(kind, 2, 2, 3), 0)


@pytest.mark.parametrize(
    ("name", "near"),
    [("zerobubble", "zero-bubble"), ("interleave", "interleaved"), ("preferforwards", "gpipe")],
)
def test_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ScheduleError, match="allowed: gpipe, 1f1b, interleaved, zero-bubble") as e:
        compute_order(pipeline(name, 2, 2, 3), 0)
    assert repr(near) in str(e.value.hint)
    assert list(SCHEDULES) == KINDS


def explicit(*orders: str, num_micro_batch: int = 2) -> Schedule:
    return Schedule(
        kind="by hand",
        num_micro_batch=num_micro_batch,
        groups=((0, 2), (1,)),
        edges=((0, 1), (1, 2), (0, 2)),
        orders=tuple(tuple(order.split()) for order in orders),
    )


def test_explicit_orders_override_the_generator() -> None:
    schedule = explicit("0F1 0F0 2F1 2B1 2F0 2B0 0B1 0B0", "1F1 1F0 1B1 1B0")
    assert [str(action) for action in compute_order(schedule, 1)] == ["1F1", "1F0", "1B1", "1B0"]
    check(schedule)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 1B0"), "runs F of stage 1, micro-batch 1"),
        (("0F0 0F1 2F0 2B1 2F1 2B0 0B0 0B1", "1F0 1F1 1B0 1B1"), "stuck at 2B1: it needs 2F1"),
        (("0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1", "1F0 1F1 1B0 1B1"), "deadlock"),
    ],
)
def test_bad_explicit_orders_are_refused(orders: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as error:
        check(explicit(*orders))
    assert "-->" in str(error.value)


def test_a_put_off_weight_gradient_counts_as_in_flight() -> None:
    schedule = explicit("0F0 2F0 2I0 2W0 0I0 0F1 2F1 2I1 0I1 0W0 0W1 2W1", "1F0 1B0 1F1 1B1")
    check(schedule)
    assert peak_in_flight(schedule, 0) == 3
    assert peak_in_flight(schedule, 1) == 1


def test_messages_in_explicit_orders_are_refused() -> None:
    with pytest.raises(ScheduleError, match="holds the message 0SF0>1"):
        compute_order(explicit("0F0 0SF0>1", "1F0"), 0)
