"""When sums begin and weights change, against the meaning of the words, under every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.ir.test_plan import make
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
        for index, action in enumerate(step.actions):
            if action.kind not in ("B", "W"):
                assert not completed_by(step.actions, index) or action.kind == "G"


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
