"""Communication: against measured NCCL times, by hand for small shapes, and what always holds."""

import time

import pytest

from benchmarks.fit_nccl import fit_group, fit_hops
from whale.cost.comm import FITS, LAUNCH_S, Fabric
from whale.errors import ClusterError
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.device_types import DEVICE_TYPES

V100_60 = Fabric.of(Cluster.parse("60x8xV100-32GB"))
A100_4 = Fabric.of(Cluster.parse("4x8xA100-80GB"))
MIXED = Fabric.of(Cluster.parse("1x8xV100-32GB+1x8xP100-16GB"))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

# vTrain's NCCL tables (KAIST, MIT licence): bytes and seconds of an all-reduce in one node.
V100_8 = """
    1048576 79.93e-6  2097152 101.3e-6  3145728 123.8e-6  4194304 150.9e-6  5242880 170.2e-6
    7340032 201.3e-6  9437184 240.1e-6  13631488 313.2e-6  17825792 284.7e-6  26214400 389.7e-6
    34603008 487.7e-6  51380224 713.4e-6  68157440 923.5e-6  101711872 1361.4e-6
    135266304 1786e-6  202375168 2723.7e-6  269484032 3542.9e-6  403701760 5344.1e-6
    537919488 7012.8e-6  806354944 10562e-6  1073741824 13969e-6
"""


def test_constants_are_the_fits():
    """benchmarks/fit_nccl.py gives back one of them; all were made by the same call."""
    numbers = [float(word) for word in V100_8.split()]
    fit = fit_group(8, list(zip(numbers[::2], numbers[1::2], strict=True)))
    latency, rate = FITS["V100"][8]
    assert fit.latency_s == pytest.approx(latency, rel=0.005)
    assert fit.bytes_per_s == pytest.approx(rate, rel=0.005)
    assert fit.mean_error == pytest.approx(0.065, abs=0.001)
    for gpu, name in (("V100", "V100-32GB"), ("A100", "A100-80GB")):
        launch, hop = fit_hops({n: latency for n, (latency, _) in FITS[gpu].items()})
        assert launch == pytest.approx(LAUNCH_S[gpu], rel=0.01)
        assert hop == pytest.approx(DEVICE_TYPES[name].intra_latency_s, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "nbytes", "seconds"),
    [
        ("V100-32GB", 2, 269484032, 11966e-6),
        ("V100-32GB", 4, 269484032, 4766.9e-6),
        ("V100-32GB", 5, 269484032, 11692e-6),
        ("V100-32GB", 8, 269484032, 3542.9e-6),
        ("V100-16GB", 8, 1073741824, 13969e-6),
        ("A100-80GB", 2, 269484032, 1464.2e-6),
        ("A100-40GB", 4, 269484032, 1931e-6),
        ("A100-80GB", 8, 269484032, 2166e-6),
        ("A100-80GB", 8, 1073741824, 8193e-6),
    ],
)
def test_all_reduce_against_measured(gpu, num_gpus, nbytes, seconds):
    fabric = Fabric.of(Cluster.parse(f"1x{num_gpus}x{gpu}"))
    assert fabric.all_reduce(range(num_gpus), nbytes) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [range(1), (17,), [3]])
def test_groups_of_one_are_free(kind, ranks):
    assert getattr(V100_60, kind)(ranks, 1e9) == 0.0


def test_a_message_to_oneself_is_free():
    assert V100_60.send(3, 3, 1e9) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fabric", [V100_60, A100_4, MIXED])
@pytest.mark.parametrize("ranks", [(0, 1), range(8), range(16), (0, 8), (0, 1, 8), range(2, 13)])
def test_time_grows_with_bytes_and_does_not_depend_on_order(kind, fabric, ranks):
    collective = getattr(fabric, kind)
    times = [collective(ranks, 10.0**power) for power in range(1, 12)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1]
    assert collective(tuple(reversed(ranks)), 1e6) == collective(ranks, 1e6)


def test_halves_of_an_all_reduce():
    """An all-reduce is a reduce-scatter and an all-gather, launched once."""
    for ranks in (range(8), range(16), (0, 8)):
        options = A100_4.options("all_reduce", ranks, 1e9)
        half = A100_4.options("all_gather", ranks, 1e9)
        for name in half:
            both = 2 * half[name] - LAUNCH_S["A100"]
            assert options[name] == pytest.approx(both, rel=1e-9)
        assert A100_4.reduce_scatter(ranks, 1e9) == A100_4.all_gather(ranks, 1e9)


def test_two_nodes_by_hand():
    fabric = Fabric.of(Cluster.parse("2x8xV100-32GB"))
    options = fabric.options("all_reduce", range(16), 1e9)
    inside = 80.4e-6 + 2 * 7 / 8 * 1e9 / 135.7e9
    # Between two nodes half of the bytes go out twice, through a network of 6.25e9 bytes/s.
    assert options["hierarchical"] == pytest.approx(inside + 2 * 20e-6 + 1e9 / 6.25e9)
    assert options["tree"] == pytest.approx(inside + 2 * 20e-6 + 2e9 / 6.25e9)
    hops = 2 * 15 / 16 * (14 * 4.4e-6 + 2 * 20e-6)
    assert options["ring"] == pytest.approx(16.6e-6 + hops + 2 * 15 / 16 * 1e9 / 6.25e9)
    assert fabric.all_reduce(range(16), 1e9) == options["hierarchical"]


@pytest.mark.parametrize("fabric", [V100_60, A100_4, MIXED])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_the_cheapest_is_never_worse_than_a_flat_ring(fabric, nbytes):
    ranks = range(16)
    for kind in ("all_reduce", "all_gather"):
        options = fabric.options(kind, ranks, nbytes)
        assert getattr(fabric, kind)(ranks, nbytes) == min(options.values()) <= options["ring"]
    # On two nodes the hierarchy sends less over the network than a ring does, which pays unless
    # the network is about as fast as the links inside.
    assert options["hierarchical"] < options["ring"] or (fabric is A100_4 and nbytes == 1e9)


def test_many_nodes_take_a_tree_for_little_and_a_ring_for_much():
    everyone = range(480)
    little = V100_60.options("all_reduce", everyone, 1e4)
    much = V100_60.options("all_reduce", everyone, 1e10)
    assert min(little, key=little.get) == "tree"
    assert min(much, key=much.get) == "ring"


def test_a_mixed_group_runs_at_its_slowest_member():
    slow = Fabric.of(Cluster.parse("2x8xP100-16GB"))
    fast = Fabric.of(Cluster.parse("2x8xV100-32GB"))
    for kind in KINDS:
        mixed, slowest = (getattr(f, kind)(range(16), 1e9) for f in (MIXED, slow))
        assert mixed == pytest.approx(slowest, rel=1e-3)
        assert mixed >= getattr(fast, kind)(range(16), 1e9)
    node = Cluster(
        devices=tuple(
            Device(rank=i, node=0, type=name, memory_bytes=1)
            for i, name in enumerate(["A100-80GB", "A100-80GB", "T4", "T4"])
        ),
        nodes=(Node(index=0),),
    )
    mixed = Fabric.of(node).all_reduce(range(4), 1e9)
    # 0.75 of PCI Express 3, where nothing was measured.
    assert mixed == pytest.approx(2 * 3 / 4 * 1e9 / (0.75 * 16e9), rel=0.01)


def test_groups_at_once_share_the_network():
    """8 data parallel groups of a split model: one adapter for all (V100), or one each (A100)."""
    across = tuple(range(0, 32, 8))
    alone = V100_60.all_reduce(across, 1e9)
    assert V100_60.all_reduce(across, 1e9, num_sharing=8) == pytest.approx(8 * alone, rel=0.01)
    alone = A100_4.all_reduce(across, 1e9)
    assert A100_4.all_reduce(across, 1e9, num_sharing=8) == pytest.approx(alone)
    # One of 8 adapters is 25e9 bytes/s; 8 ranks of a node reach 200e9.
    assert alone == pytest.approx(2 * 3 / 4 * 1e9 / 25e9, rel=0.01)
    assert A100_4.all_reduce(range(32), 1e9) < alone / 4


def test_all_to_all_by_hand_and_the_cheaper():
    everyone = range(480)
    flat = V100_60.all_to_all(everyone, 1e6, two_level=False)
    assert flat == pytest.approx(16.6e-6 + 7 * 4.4e-6 + 472 * 20e-6 + 8 * 1e6 * 472 / 480 / 6.25e9)
    two = V100_60.all_to_all(everyone, 1e6, two_level=True)
    inside = 16.6e-6 + 7 * 4.4e-6 + 1e6 * (7 / 8 / 135.7e9 + 2 / 900e9)
    assert two == pytest.approx(inside + 59 * 20e-6 + 8e6 * 59 / 60 / 6.25e9)
    assert V100_60.all_to_all(everyone, 1e6) == min(flat, two) == two
    # Much data fills the network either way, and sorting it costs.
    assert V100_60.all_to_all(everyone, 1e10, two_level=False) < V100_60.all_to_all(
        everyone, 1e10, two_level=True
    )
    # In one node there is one level.
    inside = V100_60.all_to_all(range(8), 1e9)
    assert inside == V100_60.all_to_all(range(8), 1e9, two_level=True)
    assert inside == pytest.approx(16.6e-6 + 7 * 4.4e-6 + 7 / 8 * 1e9 / 135.7e9)
    assert V100_60.all_to_all(range(8), 1e9, skew=2.0) == V100_60.all_to_all(range(8), 2e9)


def test_messages():
    assert V100_60.send(0, 1, 1e9) == pytest.approx(1e9 / 22.5e9, rel=0.001)
    assert V100_60.send(0, 8, 1e9) == pytest.approx(1e9 / 6.25e9, rel=0.001)
    assert A100_4.send(0, 8, 1e9) == pytest.approx(1e9 / 25e9, rel=0.005)
    assert V100_60.send(0, 8, 0) == pytest.approx(16.6e-6 + 20e-6)
    assert V100_60.broadcast(range(16), 1e9) == pytest.approx(1e9 / 6.25e9, rel=0.001)


def test_a_given_link_moves_the_measured_bandwidth(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[node]]\ngpus = 8\ntype = "V100-32GB"\n'
        "link = { intra_gb_s = 75, inter_gb_s = 3.125, latency_s = 1e-3 }\ncount = 2\n"
    )
    half = Fabric.of(Cluster.from_toml(path))
    full = Fabric.of(Cluster.parse("2x8xV100-32GB"))
    for ranks in (range(8), range(16)):
        assert half.all_reduce(ranks, 1e11) == pytest.approx(2 * full.all_reduce(ranks, 1e11), 0.01)
    assert half.send(0, 8, 0) == pytest.approx(16.6e-6 + 1e-3)


def test_more_ranks_in_a_node_than_were_measured():
    fabric = Fabric.of(Cluster.parse("1x16xV100-32GB"))
    expected = 16.6e-6 + 30 * 4.4e-6 + 2 * 15 / 16 * 1e9 / 135.7e9
    assert fabric.all_reduce(range(16), 1e9) == pytest.approx(expected)


def test_cpu_ranks_over_gloo():
    fabric = Fabric.of(Cluster.parse("1x4xCPU"))
    assert fabric.all_reduce(range(4), 1e6) == pytest.approx(6 * 200e-6 + 1.5e6 / 1e9)
    assert fabric.send(0, 1, 1e6) == pytest.approx(200e-6 + 1e6 / 1e9)


def test_what_was_measured_comes_first():
    links = {
        ("all_reduce", 2, 1): (1e-3, 1e9),
        ("all_reduce", 8, 1): (2e-3, 4e9),
        ("all_reduce", 16, 2): (3e-3, 5e9),
        ("all_gather", 16, 2): (4e-3, 6e9),
        ("send", 2, 2): (5e-3, 7e9),
    }
    fabric = Fabric.of(Cluster.parse("4x8xV100-32GB"), links)
    assert fabric.all_reduce(range(8), 1e9) == pytest.approx(2e-3 + 2 * 7 / 8 / 4)
    assert fabric.all_reduce((4, 5), 1e9) == pytest.approx(1e-3 + 1.0)
    # The nearest shape: 7 of 8 ranks, and 32 ranks in 4 nodes as 16 in 2; never across levels.
    assert fabric.all_reduce(range(7), 1e9) == pytest.approx(2e-3 + 2 * 6 / 7 / 4)
    assert fabric.all_reduce(range(32), 1e9) == pytest.approx(3e-3 + 2 * 31 / 32 / 5)
    assert fabric.all_gather(range(16), 1e9) == pytest.approx(4e-3 + 15 / 16 / 6)
    # Another kind borrows the all-reduce's bandwidth, and half of its hops.
    assert fabric.reduce_scatter(range(16), 1e9) == pytest.approx(1.5e-3 + 15 / 16 / 5)
    assert fabric.send(0, 8, 1e9) == pytest.approx(5e-3 + 1 / 7)
    assert fabric.send(0, 1, 1e9) == V100_60.send(0, 1, 1e9)
    assert fabric.all_reduce((0, 8), 1e9, num_sharing=2) == pytest.approx(3e-3 + 2 / 5)
    assert fabric.options("all_reduce", range(8), 0) == {"measured": 2e-3}


@pytest.mark.parametrize(
    ("shape", "figures"),
    [
        (("all_reduec", 2, 1), (0.0, 1e9)),
        (("all_reduce", 1, 1), (0.0, 1e9)),
        (("all_reduce", 2, 0), (0.0, 1e9)),
        (("all_reduce", 2, 1), (-1.0, 1e9)),
        (("all_reduce", 2, 1), (0.0, 0.0)),
    ],
)
def test_measured_figures_that_cannot_be(shape, figures):
    with pytest.raises(ClusterError, match="measured 'all_redu.*allowed: all_reduce, "):
        Fabric.of(Cluster.parse("1x2xCPU"), {shape: figures})


def test_asking_is_fast():
    """A search asks 1e5 times in about a second; the bound leaves room for a busy machine."""
    ranks = tuple(range(480))
    start = time.perf_counter()
    for nbytes in range(20_000):
        V100_60.all_reduce(ranks, nbytes)
    assert time.perf_counter() - start < 2.0
