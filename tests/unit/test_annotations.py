"""The primitives: what they tag, how they nest, what they refuse with file and line."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import whale as wh
from whale.annotations import tag_of


def kinds(module: nn.Module) -> list[str]:
    return [scope.kind for scope in tag_of(module)]


def test_scope_tags_everything_built_inside_and_nothing_after() -> None:
    with wh.replicate(name="trunk"):
        inside = nn.Sequential(nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2))
        loose = nn.Linear(2, 2)  # attached later, outside
    outside = nn.Linear(2, 2)
    assert all(kinds(part) == ["replicate"] for part in inside.modules())
    assert kinds(loose) == ["replicate"] and tag_of(loose)[0].name == "trunk"
    assert kinds(outside) == []


def test_each_entry_is_its_own_taskgraph() -> None:
    tags = []
    for _ in range(2):
        with wh.stage():
            tags.append(tag_of(nn.Linear(2, 2)))
    assert tags[0] != tags[1]


def test_tags_survive_copy_pickle_and_meta() -> None:
    with torch.device("meta"), wh.split(2):
        layer = nn.Linear(2, 2)
    assert tag_of(copy.deepcopy(layer)) == tag_of(layer)
    assert tag_of(pickle.loads(pickle.dumps(layer))) == tag_of(layer)


def test_function_form_keeps_inner_scopes_inside() -> None:
    block = nn.Sequential(nn.Linear(2, 2), wh.split(2)(nn.Linear(2, 2)))
    wh.stage("a")(block)
    assert kinds(block[0]) == ["stage"]
    assert kinds(block[1]) == ["stage", "split"]


def test_default_strategy_cuts_where_it_is_called_again() -> None:
    build = nn.Module.__init__
    try:
        layers, before = [], nn.Linear(2, 2)
        for _ in range(2):
            wh.set_default_strategy(wh.replicate(1))
            layers.append(nn.Linear(2, 2))
            with wh.split():
                inside = nn.Linear(2, 2)
            assert nn.Module.__init__ is build
    finally:
        wh.set_default_strategy(None)
    assert kinds(before) == [] and kinds(inside) == ["split"]
    assert tag_of(layers[0]) != tag_of(layers[1])
    assert kinds(nn.Linear(2, 2)) == []


def test_annotate_by_pattern() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)))
    wh.annotate(model, {"[01]": wh.stage("first"), "2|3|9": (wh.stage("last"), wh.split(2))})
    assert kinds(model[0][0]) == ["stage"] and tag_of(model[0]) == tag_of(model[1])
    assert kinds(model[3][0]) == ["stage", "split"]
    with pytest.raises(wh.AnnotationError, match=r"test_annotations\.py:\d+.*matches no module"):
        wh.annotate(model, {"encoder.*": wh.replicate()})


def test_the_rest_is_what_no_other_entry_reaches() -> None:
    model = nn.ModuleDict(
        {
            "first": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
            "last": nn.Linear(2, 2),
        }
    )
    wh.annotate(model, {"...": wh.replicate(), "first.1.0": wh.split(), "last": wh.stage()})
    assert kinds(model["first"][1][0]) == ["split"]
    assert kinds(model["first"][1][1]) == kinds(model["first"][0]) == ["replicate"]
    assert kinds(model["last"]) == ["stage", "replicate"]
    assert not tag_of(model["first"]) and not tag_of(model["first"][1]) and not tag_of(model)
    with pytest.raises(wh.AnnotationError, match=r"'\.\.\.' matches no module"):
        wh.annotate(model, {"": wh.replicate(), "...": wh.replicate()})


@pytest.mark.parametrize(
    ("outer", "inner"), [("split", "split"), ("split", "replicate"), ("stage", "pipeline")]
)
def test_nestings_that_mean_nothing_are_refused(outer: str, inner: str) -> None:
    with (
        getattr(wh, outer)(),
        pytest.raises(wh.AnnotationError, match=r"test_annotations\.py:\d+[\s\S]*hint:"),
    ):
        getattr(wh, inner)().__enter__()


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
def test_bad_device_counts_are_refused(count: object) -> None:
    with pytest.raises(wh.AnnotationError, match="device count"):
        wh.split(count)


def test_names_are_text() -> None:
    """A stage's name travels with the plan; a number is often taken for a device count."""
    assert [scope.name for scope in tag_of(wh.stage(1)(nn.Linear(2, 2)))] == ["1"]
    for named in (wh.stage, lambda name: wh.split(2, name=name)):
        with pytest.raises(
            wh.AnnotationError, match=r"(?s)name=\[0\].*hint: .*wh.split\(2\)"
        ) as error:
            named([0])  # type: ignore[arg-type]
        assert __file__ in str(error.value)


def test_cluster_slices_are_devices() -> None:
    layout = wh.cluster("1x4xCPU", layout={"average": 2})
    with wh.replicate(layout.slices[1]):
        layer = nn.Linear(2, 2)
    assert tag_of(layer)[0].ranks == (2, 3)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    wh.replicate(layout.slices[1])(first)
    wh.replicate(layout.slices[0])(second)
    plan = wh.plan(
        nn.Sequential(first, second),
        cluster="1x4xCPU",
        batch=(torch.zeros(4, 4), torch.zeros(4, 4)),
        loss=nn.functional.mse_loss,
    )
    assert [t.virtual_device.ranks for t in plan.taskgraphs] == [(2, 3), (0, 1)]
