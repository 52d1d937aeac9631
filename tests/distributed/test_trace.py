"""The trace of a real run equals the nested Schedule, action by action."""

from __future__ import annotations

import pytest
import torch

import whale as wh
from tests.parity.layouts import LayerPaths
from tests.parity.names import case_named, layout_named
from tests.parity.parity import ADAMW, ROWS
from tests.ranks import run_ranks
from whale.engine.recorder import record_step

pytestmark = pytest.mark.usefixtures("untried")


def _trace(
    case_name: str, layout_name: str, zero: str = "", groups: int = 1, early: bool = False
) -> tuple[list[str], list[str]]:
    torch.set_num_threads(1)
    case, layout = case_named(case_name), layout_named(layout_name)
    wh.init()
    batch = case.batch(0, ROWS)
    model = case.build()
    layout.annotate(model, LayerPaths(model, batch, case.loss))
    step = wh.parallelize(
        model,
        optimizer=ADAMW,
        batch=batch,
        loss=case.loss,
        config={
            **layout.config,
            "communication.bucket_bytes": 4000,
            "zero.level": zero,
            "optimizer.num_apply_group": groups,
            "optimizer.apply_in_backward": early,
            "check_parts": not early,  # which looks at the rows of some steps
        },
        cluster=layout.cluster(),
    )
    for _ in range(8 if early else 0):  # in the first steps it looks at all gradients first
        step(batch)
    planned, seen = record_step(step, batch)
    step.close()
    return [str(a) for a in planned], [str(a) for a in seen]


CASES = [
    ("gpt", "data"),
    ("gpt", "accumulate-uneven"),
    ("gpt", "tensor-uneven"),
    ("gpt", "1f1b"),
    ("gpt", "zero-bubble"),
    ("gpt", "3d"),
    ("gpt", "colocated"),
    ("gpt", "interleaved-tensor"),
    ("hf_bert", "tensor"),
    ("hf_bert", "pipeline-tensor"),
    ("hf_gpt2", "data-tensor"),
    ("resnet", "tensor"),
    ("resnet", "head"),
    ("resnet", "data-tensor"),
    ("resnet", "data-tensor-uneven"),
    ("resnet", "3d"),
    ("resnet", "colocated"),
    ("encdec", "tensor"),
    ("lstm", "head"),
    ("narrow", "tensor"),
    ("narrow", "colocated"),
    ("moe/top-k/2/bias/none", "replicas"),
    ("moe/top-k/2/loss/1.25", "experts-3-uneven"),
    ("moe/prototype/2/none+z/none", "experts-groups"),
    ("moe/top-k/1/bias/1.25", "experts-nested"),
    ("moe/expert-choice/2/none/none", "experts-4"),
    ("moe/top-k/2/loss/none", "experts-staged"),
    ("hf_toy", "hf-across-4"),
    ("hf_toy", "hf-nested"),
    ("hf_qwen_moe", "hf-inside"),
    ("moe/top-k/1/bias/none", "experts-chunks"),
    ("moe/top-k/2/bias/none", "columns-across"),
    ("moe/top-k/2/loss/1.25", "experts-levels-chunks"),
]


# The others say the same of more models; `make test-full` runs them too.
QUICK = {
    ("gpt", "accumulate-uneven"),
    ("gpt", "1f1b"),
    ("gpt", "interleaved-tensor"),
    ("resnet", "head"),
    ("encdec", "tensor"),
    ("narrow", "colocated"),
    ("moe/top-k/2/loss/1.25", "experts-3-uneven"),
    ("moe/top-k/2/loss/none", "experts-staged"),
    ("moe/top-k/2/bias/none", "columns-across"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(*pair, id="-".join(pair), marks=() if pair in QUICK else (pytest.mark.full,))
        for pair in CASES
    ],
)
def test_recorded_equals_planned(case: str, layout: str) -> None:
    check(case, layout)


SHARED = [
    ("gpt", "accumulate-uneven", "v1"),
    ("gpt", "data-pipeline", "v2"),
    ("gpt", "zero-bubble", "v1"),
    ("resnet", "data", "v2"),
    ("moe/top-k/1/bias/1.25", "experts-nested", "v2"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("case", "layout", "zero"), SHARED)
def test_what_ranks_share_out_is_summed_and_gathered_as_planned(
    case: str, layout: str, zero: str
) -> None:
    found = check(case, layout, zero)
    assert ("gather" in "".join(found)) == (zero == "v2")


GROUPED = [
    ("gpt", "data", "", 3, False),
    ("gpt", "data", "", 3, True),
    ("gpt", "accumulate-uneven", "v1", 2, True),
    ("gpt", "1f1b", "", 4, True),
    ("gpt", "zero-bubble", "v0", 2, True),
    ("gpt", "3d", "", 3, True),
    ("resnet", "data", "v2", 3, True),
]


@pytest.mark.every(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("case", "layout", "zero", "groups", "early"), GROUPED)
def test_groups_are_updated_when_the_plan_says(
    case: str, layout: str, zero: str, groups: int, early: bool
) -> None:
    found = check(case, layout, zero, groups, early)
    applied = [i for i, text in enumerate(found) if text.startswith("apply:")]
    updates = [i for i, text in enumerate(found) if text.startswith("A")]
    assert len(applied) == len(updates) <= groups
    assert (applied[0] < updates[0]) == early, found


def check(
    case: str, layout: str, zero: str = "", groups: int = 1, early: bool = False
) -> list[str]:
    """Gives what rank 0 planned."""
    num_ranks = layout_named(layout).num_ranks
    ranks = run_ranks(num_ranks, _trace, case, layout, zero, groups, early)
    for rank, (planned, seen) in enumerate(ranks):
        assert len(seen) > len(planned) / 2 > 1
        for position, (want, got) in enumerate(zip(planned, seen, strict=False)):
            assert want == got, (
                f"rank {rank}, action {position}: planned {want}, ran {got}\n"
                f"planned {planned[max(0, position - 4) : position + 4]}\n"
                f"ran     {seen[max(0, position - 4) : position + 4]}"
            )
        assert len(planned) == len(seen), (rank, planned[len(seen) :], seen[len(planned) :])
    return ranks[0][0]
