"""Action and Schedule as data, and the checker's refusals of hand-made bad action lists."""

from __future__ import annotations

import json

import pytest

from whale.errors import ScheduleError
from whale.ir.deadlock import check_schedule
from whale.ir.schedule import Action, Schedule, grid

TWO = Schedule(kind="1f1b", num_micro_batch=2, groups=((0,), (1,)), edges=((0, 1),))
LOOP = Schedule(
    kind="1f1b", num_micro_batch=2, groups=((0, 2), (1,)), edges=((0, 1), (1, 2), (0, 2))
)
GOOD = {
    0: "0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1",
    1: "1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1I1 1SB1>0 1W1",
}


def parse(columns: dict[int, str]) -> dict[int, list[Action]]:
    return {group: [Action.parse(t) for t in text.split()] for group, text in columns.items()}


@pytest.mark.parametrize(
    ("text", "kind", "stage", "micro_batch", "peer"),
    [
        ("2F0", "F", 2, 0, None),
        ("12B34", "B", 12, 34, None),
        ("0I7", "I", 0, 7, None),
        ("0W7", "W", 0, 7, None),
        ("0SF3>2", "SF", 0, 3, 2),
        ("2RF3<0", "RF", 2, 3, 0),
        ("2SB3>0", "SB", 2, 3, 0),
        ("0RB13<12", "RB", 0, 13, 12),
    ],
)
def test_text_round_trip(
    text: str, kind: str, stage: int, micro_batch: int, peer: int | None
) -> None:
    action = Action(kind=kind, stage=stage, micro_batch=micro_batch, peer=peer)
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2F0>1", "0SF3", "0SF3<2", "2RF3>0", "-1F0", " 2F0", "2F0\n"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action") as error:
        Action.parse(text)
    assert "2F0" in str(error.value.hint)


@pytest.mark.parametrize(("kind", "peer"), [("X", None), ("F", 1), ("SF", None), ("", None)])
def test_bad_action_is_refused(kind: str, peer: int | None) -> None:
    with pytest.raises(ScheduleError, match="action kind"):
        Action(kind=kind, stage=0, micro_batch=0, peer=peer)


def test_mates() -> None:
    for send, receive in (("0SF3>2", "2RF3<0"), ("2SB3>0", "0RB3<2")):
        assert str(Action.parse(send).mate) == receive
        assert str(Action.parse(receive).mate) == send


@pytest.mark.parametrize("orders", [None, (("0F0", "0B0"), ("1F0", "1B0"))])
def test_dict_round_trip_through_json(orders: tuple[tuple[str, ...], ...] | None) -> None:
    schedule = Schedule(
        kind="1f1b", num_micro_batch=1, groups=((0,), (1,)), edges=((0, 1),), orders=orders
    )
    again = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert hash(again) == hash(schedule)


def test_dict_does_not_grow_with_micro_batches() -> None:
    sizes = [
        len(
            json.dumps(Schedule(kind="1f1b", num_micro_batch=m, groups=((0,),), edges=()).to_dict())
        )
        for m in (1, 9)
    ]
    assert sizes[0] == sizes[1]


def test_unknown_and_missing_keys_are_refused() -> None:
    data = TWO.to_dict()
    with pytest.raises(ScheduleError, match="extra"):
        Schedule.from_dict({**data, "extra": 1})
    del data["edges"]
    with pytest.raises(ScheduleError, match="edges"):
        Schedule.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_micro_batch": 0}, "num_micro_batch is 0"),
        ({"groups": ((0,), (0,))}, "each once"),
        ({"groups": ((0,), (2,))}, "each once"),
        ({"groups": ()}, "each once"),
        ({"edges": ((1, 0),)}, r"edge \(1, 0\)"),
        ({"edges": ((0, 5),)}, r"edge \(0, 5\)"),
        ({"edges": ((0, 1), (0, 1))}, r"edge \(0, 1\)"),
        ({"orders": (("0F0",),)}, "1 orders for 2"),
    ],
)
def test_bad_schedules_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_dict({**TWO.to_dict(), **change})


def test_helpers() -> None:
    assert LOOP.num_stages == 3
    assert [LOOP.group_of(stage) for stage in range(3)] == [0, 1, 0]
    with pytest.raises(ScheduleError, match="no stage 3"):
        LOOP.group_of(3)
    links = LOOP.links()
    assert [str(a) for a in links.sends_after(Action.parse("0F1"))] == ["0SF1>1"]
    assert [str(a) for a in links.receives_before(Action.parse("1I1"))] == ["1RB1<2"]
    assert links.receives_before(Action.parse("2B1")) == []
    assert links.sends_after(Action.parse("1W1")) == []


def test_grid() -> None:
    columns = parse({0: "0F0 0F1 0B0", 1: "1F0"})
    assert grid(columns, {0: 1, 1: 1}).splitlines() == [
        "step  group 0  group 1",
        "0         0F0      1F0",
        "1     --> 0F1  --> (end)",
        "2         0B0",
    ]


def test_grid_shows_the_rows_around_the_arrows_only() -> None:
    columns = parse({0: " ".join(f"0F{m}" for m in range(100))})
    assert [line.split()[0] for line in grid(columns, {0: 50}, context=1).splitlines()] == [
        "step", "...", "49", "50", "51", "...",
    ]  # fmt: skip
    assert len(grid(columns).splitlines()) == 101


def test_good_actions_pass() -> None:
    check_schedule(TWO, parse(GOOD))


def test_every_group_is_asked_for() -> None:
    with pytest.raises(ScheduleError, match="2 device groups"):
        check_schedule(TWO, {0: parse(GOOD)[0]})


# What is replaced in GOOD, the message, and the marked steps.
BAD = [
    (1, "1F1 1I1 1SB1>0 1W1", "", "runs nothing of stage 1, micro-batch 1", ["(end)"]),
    (1, "1B0 ", "", "runs F of stage 1, micro-batch 0", ["(end)"]),
    (1, " 1W1", "", "runs F I of stage 1, micro-batch 1", ["(end)"]),
    (1, "1W1", "1W1 1B1", "runs F B I W of stage 1, micro-batch 1", ["(end)"]),
    (0, "0F1 ", "0F1 0F1 ", "0F1 twice", ["0F1"]),
    (0, "0SF1>1", "0SF1>1 0SF1>1", "0SF1>1 twice", ["0SF1>1"]),
    (0, "0F1 ", "1F1 0F1 ", "only has the stages", ["1F1"]),
    (0, "0B1", "0B1 0F2", "micro-batches are 0 to 1", ["0F2"]),
    (0, "0B1", "0B1 0SF0>0", "no edge", ["0SF0>0"]),
    (0, "0B1", "0B1 0SB0>1", "no edge", ["0SB0>1"]),
    (1, "1F0 1B0", "1B0 1F0", "stuck at 1B0: it needs 1F0", ["1B0"]),
    (1, "1I1 1SB1>0 1W1", "1W1 1I1 1SB1>0", "stuck at 1W1: it needs 1I1", ["1W1"]),
    (0, "0F0 0SF0>1", "0SF0>1 0F0", "stuck at 0SF0>1: it needs 0F0", ["0SF0>1"]),
    (1, "1B0 1SB0>0", "1SB0>0 1B0", "stuck at 1SB0>0: it needs 1B0", ["1SB0>0"]),
    (1, "1RF0<0 1F0", "1F0 1RF0<0", "stuck at 1F0: it needs 1RF0<0", ["1F0"]),
    (0, "0RB1<1 ", "", "stuck at 0B1: it needs 0RB1<1", ["0B1"]),
    (0, "0SF1>1 ", "", "never posts 0SF1>1: the message is lost", ["0F1"]),
    (1, "1SB1>0 ", "", "never posts 1SB1>0: the message is lost", ["1I1"]),
    (
        0,
        "0RB0<1 0B0 0RB1<1",
        "0RB1<1 0RB0<1 0B0",
        "group 1 sends 1SB0>0 where group 0 receives 0RB1<1",
        ["0RB1<1", "1SB0>0"],
    ),
]


@pytest.mark.parametrize(("group", "old", "new", "message", "marked"), BAD)
def test_bad_actions_are_refused(
    group: int, old: str, new: str, message: str, marked: list[str]
) -> None:
    assert old in GOOD[group]
    columns = parse({**GOOD, group: GOOD[group].replace(old, new)})
    with pytest.raises(ScheduleError) as error:
        check_schedule(TWO, columns)
    text = str(error.value)
    assert message in text
    assert "group 0" in text.splitlines()[1]
    assert [line.split("--> ")[1:] for line in text.splitlines() if "-->" in line]
    found = [part.split()[0] for line in text.splitlines() for part in line.split("--> ")[1:]]
    assert sorted(found) == sorted(marked)
    assert error.value.hint


def test_circular_wait_is_a_deadlock() -> None:
    # Group 0 wants stage 2 of micro-batch 1 before it runs stage 0 of it.
    columns = parse(
        {
            0: "0F0 0SF0>1 2RF0<1 2RF1<1 2F1 0F1 0SF1>1 2F0"
            " 2B0 2SB0>1 2B1 2SB1>1 0RB0<1 0B0 0RB1<1 0B1",
            1: "1RF0<0 1F0 1SF0>2 1RF1<0 1F1 1SF1>2 1RB0<2 1B0 1SB0>0 1RB1<2 1B1 1SB1>0",
        }
    )
    schedule = Schedule.from_dict({**LOOP.to_dict(), "edges": [[0, 1], [1, 2]]})
    with pytest.raises(ScheduleError, match="deadlock") as error:
        check_schedule(schedule, columns)
    text = str(error.value)
    assert "group 0 is stuck at 2F1, waits for 1SF1>2 of group 1" in text
    assert "group 1 is stuck at 1F1, waits for 0SF1>1 of group 0" in text
    assert "--> 2F1" in text
    assert "--> 1F1" in text


def test_a_local_edge_needs_no_message_but_an_order() -> None:
    schedule = Schedule(kind="1f1b", num_micro_batch=1, groups=((0, 1),), edges=((0, 1),))
    check_schedule(schedule, parse({0: "0F0 1F0 1I0 0B0 1W0"}))
    with pytest.raises(ScheduleError, match="posts 0SF0>1, but no edge to another group"):
        check_schedule(schedule, parse({0: "0F0 0SF0>1 1F0 1B0 0B0"}))
    for order, stuck in (("1F0 0F0 1B0 0B0", "1F0"), ("0F0 1F0 0B0 1B0", "0B0")):
        with pytest.raises(ScheduleError, match=f"stuck at {stuck}"):
            check_schedule(schedule, parse({0: order}))
