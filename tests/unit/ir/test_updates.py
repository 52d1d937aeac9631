"""When sums begin and weights change, against the meaning of the words, under every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.layouts import LAYOUTS as ALL
from tests.parity.matrix import REFUSED
from tests.unit.ir.test_plan import make
from whale.ir import homes, updates
from whale.ir.plan import Plan
from whale.ir.schedule import Action
from whale.ir.updates import RankStep, completed_by, completing_layers, rank_step
from whale.planner.schedules import rank_actions

LAYOUTS = ("data", "data-uneven", "tensor-uneven", "data-tensor-uneven", "1f1b", "interleaved")


def steps(plan: Plan) -> dict[int, RankStep]:
    names = frozenset(home.name for home in plan.homes)
    return {
        rank: rank_step(plan, rank, rank_actions(plan.schedule, group), names)
        for group, stages in enumerate(plan.schedule.groups)
        for rank in plan.stages[stages[0]].virtual_device.ranks
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bucket_is_complete_with_the_last_backward_that_adds_to_it(
    layout: str, kind: str
) -> None:
    plan = replace(make("gpt", layout), bucket_bytes=400)
    if len(plan.stages) > 1 and layout != "interleaved":
        plan = replace(plan, schedule=replace(plan.schedule, kind=kind))
    for rank, step in steps(plan).items():
        places = {a.number: i for i, a in enumerate(step.actions) if a.kind == "G"}
        assert sorted(places) == list(range(len(step.buckets)))
        mine = set(plan.stages_of(rank))
        adds = {
            stage: [
                i
                for i, a in enumerate(step.actions)
                if isinstance(a, Action) and a.kind in ("B", "W") and a.stage == stage
            ]
            for stage in mine
        }
        for number, bucket in enumerate(step.buckets):
            users = mine & {s for piece in bucket.slices for s in piece.home.stages}
            last = max(max(adds[stage]) for stage in users)
            if number in step.late():
                assert all(not isinstance(a, Action) for a in step.actions[places[number] :])
            assert places[number] > last
            # Never later than it must: only sums that all ranks put before it stand between.
            if len(bucket.sync.ranks) == 1:
                assert all(a.kind in "GL" for a in step.actions[last + 1 : places[number]])
        summed = [n for n, b in enumerate(step.buckets) if len(b.sync.ranks) > 1]
        assert [places[n] for n in summed] == sorted(places[n] for n in summed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_summed_after_the_last_forward_and_weights_change_last(layout: str) -> None:
    for step in steps(make("gpt", layout)).values():
        kinds = [a.kind for a in step.actions]
        assert kinds.count("L") == kinds.count("A") == 1 and kinds[-1] == "A"
        forwards = [i for i, kind in enumerate(kinds) if kind in ("F", "SF")]
        assert kinds.index("L") == max(forwards) + 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_begin_with_the_first_layer_that_uses_what_is_in_them(layout: str) -> None:
    plan = replace(make("gpt", layout), bucket_bytes=400)
    for step in steps(plan).values():
        for action, numbers in step.completed():
            stage = plan.stages[action.stage]
            buckets = [step.buckets[n] for n in numbers]
            latest = len(stage.layers)
            for bucket, place in zip(buckets, completing_layers(stage, buckets), strict=True):
                names = {s.home.name for s in bucket.slices if stage.index in s.home.stages}
                held = {name for layer in stage.layers for name in layer.params}
                users = [i for i, x in enumerate(stage.layers) if names & set(x.params)]
                own = -1 if names - held else min(users, default=len(stage.layers))
                if len(bucket.sync.ranks) > 1:
                    own = latest = min(own, latest)
                assert place == own


def test_a_rank_that_runs_nothing_sums_and_updates_all_the_same() -> None:
    plan = make("gpt", "data")
    step = rank_step(plan, plan.num_ranks, [], frozenset())
    assert [str(a) for a in step.actions] == ["L0", "A0"]


def stuck(plan: Plan, made: dict[int, RankStep]) -> list[str]:
    """Where a step ends whose computes wait for the whole device, messages and sums included.

    A compute ends when all that was posted before it has met its other end, and the sums that begin
    inside it too. Empty: it gets to its end.
    """
    at = dict.fromkeys(made, 0)
    sent: set[tuple[int, str]] = set()
    begun: dict[tuple[int, ...], dict[int, int]] = {}
    pending: dict[int, list[tuple[str, tuple[int, ...], int]]] = {rank: [] for rank in made}
    counts: dict[tuple[int, tuple[int, ...]], int] = {}
    inside: dict[int, bool] = dict.fromkeys(made, False)

    def begin(rank: int, number: int) -> None:
        ranks = made[rank].buckets[number].sync.ranks
        if len(ranks) > 1:
            turn = counts[rank, ranks] = counts.get((rank, ranks), 0) + 1
            begun.setdefault(ranks, {})[rank] = turn
            pending[rank].append(("sum", ranks, turn))

    def met(item: tuple[str, tuple[int, ...], int]) -> bool:
        _, ranks, turn = item
        return all(begun.get(ranks, {}).get(member, 0) >= turn for member in ranks)

    def mates(rank: int, action: Action) -> list[tuple[int, str]]:
        assert action.peer is not None
        peers = plan.stages[action.peer].virtual_device.ranks
        return [(peer, str(action.mate)) for peer in peers]

    messages: dict[int, list[tuple[int, str]]] = {rank: [] for rank in made}
    moved = True
    while moved:
        moved = False
        for rank, step in made.items():
            while at[rank] < len(step.actions):
                action = step.actions[at[rank]]
                if isinstance(action, Action) and action.is_compute:
                    if not inside[rank]:
                        inside[rank] = True
                        for number in completed_by(step.actions, at[rank]):
                            begin(rank, number)
                    # Every replica is taken to talk to every other: harder than it is.
                    if not all(map(met, pending[rank])) or not set(messages[rank]) <= sent:
                        break
                    pending[rank].clear()
                    messages[rank].clear()
                    inside[rank] = False
                elif isinstance(action, Action):
                    sent.add((rank, str(action)))
                    messages[rank] += mates(rank, action)
                elif action.kind == "G" and action.number in step.late():
                    begin(rank, action.number)
                at[rank] += 1
                moved = True
    return [
        f"{rank} at {step.actions[at[rank]]}"
        for rank, step in made.items()
        if at[rank] < len(step.actions)
    ]


PIPELINES = [
    name
    for name in ALL
    if {"gpipe", "1f1b", "interleaved", "zero", "pipeline", "widths"} & set(name.split("-"))
    and ("gpt", name) not in REFUSED
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("layout", PIPELINES)
def test_no_sum_waits_for_a_rank_that_waits_for_it(layout: str, kind: str) -> None:
    """Weights tied over the first and the last stage, buckets of every size."""
    plan = make("gpt", layout)
    if len(plan.stages) == 1:
        pytest.skip("one stage")
    if plan.schedule.kind in ("1f1b", "gpipe", "zero-bubble"):
        plan = replace(plan, schedule=replace(plan.schedule, kind=kind))
    for size in (1, 400, 1 << 30):
        assert stuck(plan, steps(replace(plan, bucket_bytes=size))) == []


def test_a_sum_between_stages_that_began_early_would_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates, "crosses", lambda plan, sync: False)
    monkeypatch.setattr(homes, "crosses", lambda plan, sync: False)
    found = [stuck(p, steps(p)) for p in (replace(make("gpt", "gpipe"), bucket_bytes=1),)]
    assert any(found)
