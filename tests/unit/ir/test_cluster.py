"""Cluster: descriptions, files, layouts, and what is refused."""

import json

import pytest

from whale.errors import ClusterError
from whale.ir.cluster import Cluster, Device, DeviceSlice, FullLink, Link, Node
from whale.ir.device_types import DEVICE_TYPES

MIXED = "1x8xV100-32GB+1x8xP100-16GB"


def ranks(slices):
    return [list(part) for part in slices]


def figures(link):
    return [link.intra_bytes_per_s, link.inter_bytes_per_s, link.latency_s]


def test_parse_numbers_devices_through_the_nodes():
    cluster = Cluster.parse(MIXED)
    assert cluster.num_devices == 16
    assert [device.rank for device in cluster.devices] == list(range(16))
    assert [device.node for device in cluster.devices] == [0] * 8 + [1] * 8
    assert cluster.devices[7] == Device(
        rank=7, node=0, type="V100-32GB", memory_bytes=32_000_000_000
    )
    assert cluster.devices[8].type == "P100-16GB"
    assert cluster.nodes == (Node(index=0), Node(index=1))
    assert cluster.ranks_of(1) == tuple(range(8, 16))
    assert str(cluster) == MIXED


def test_parse_many_nodes_and_spelling():
    cluster = Cluster.parse("60x8xv100-32gb")
    assert (cluster.num_devices, len(cluster.nodes)) == (480, 60)
    assert str(cluster) == "60x8xV100-32GB"
    assert str(Cluster.parse("1x8x4090 + 2x1xMI300X")) == "1x8x4090+2x1xMI300X"


@pytest.mark.parametrize("name", DEVICE_TYPES)
def test_every_type_is_readable(name):
    cluster = Cluster.parse(f"1x2x{name}")
    assert cluster.devices[1].memory_bytes == DEVICE_TYPES[name].memory_bytes
    assert cluster.type_of(1) == DEVICE_TYPES[name]


@pytest.mark.parametrize(
    "spec", ["", "8xV100-32GB", "1x8x", "1x8xV100-32GB+", "axbxCPU", "-1x2xCPU"]
)
def test_a_bad_description_is_answered_with_the_grammar(spec):
    with pytest.raises(ClusterError, match="cannot read") as caught:
        Cluster.parse(spec)
    assert "NODESxGPUSxTYPE" in caught.value.hint


@pytest.mark.parametrize("spec", ["0x8xCPU", "1x0xCPU"])
def test_no_devices(spec):
    with pytest.raises(ClusterError, match="= 0; allowed: an integer of 1 or more"):
        Cluster.parse(spec)


@pytest.mark.parametrize(
    ("name", "near"), [("V100", "V100-"), ("V100-23GB", "V100-32GB"), ("RTX4090", "4090")]
)
def test_unknown_types_suggest_the_nearest(name, near):
    with pytest.raises(
        ClusterError, match=f"unknown device type '{name}'; allowed: P100"
    ) as caught:
        Cluster.parse(f"1x1x{name}")
    assert near in caught.value.hint


def write(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_toml_overrides_the_type(tmp_path):
    cluster = Cluster.from_toml(
        write(
            tmp_path,
            """
            [[node]]
            count = 2
            gpus = 4
            type = "V100-32GB"
            memory_bytes = 16e9
            speed = 0.5
            host_memory_bytes = 256e9
            link = { intra_gb_s = 130, inter_gb_s = 6, latency_s = 20e-6 }
            power_watts = 250

            [[node]]
            gpus = 1
            type = "CPU"
            pace_flops = 2e9
            """,
        )
    )
    assert str(cluster) == "2x4xV100-32GB+1x1xCPU"
    assert cluster.devices[5] == Device(
        rank=5,
        node=1,
        type="V100-32GB",
        memory_bytes=16_000_000_000,
        speed=0.5,
        power_watts=250.0,
    )
    assert cluster.devices[8].pace_flops == 2e9
    link = Link(intra_bytes_per_s=130e9, inter_bytes_per_s=6e9, latency_s=20e-6)
    assert cluster.nodes[1] == Node(index=1, host_memory_bytes=256_000_000_000, link=link)
    assert cluster.nodes[2] == Node(index=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no devices"),
        ("[[node]]\ngpus = 1", "unknown device type None"),
        ('[[node]]\ntype = "CPU"', "gpus = None; allowed: an integer"),
        ('[[node]]\ngpus = 1.5\ntype = "CPU"', "gpus = 1.5; allowed: an integer"),
        ('[[node]]\ngpus = 1\ntype = "CPU"\nspede = 2', "unknown key 'spede'; allowed: .*speed"),
        (
            '[[node]]\ngpus = 1\ntype = "CPU"\nspeed = 0',
            "speed = 0; allowed: a finite number above",
        ),
        ('[[node]]\ngpus = 1\ntype = "CPU"\nspeed = "fast"', "speed = 'fast'; allowed"),
        ('[[node]]\ngpus = 1\ntype = "T4"\npace_flops = 1e9', "pace_flops = 1e.09 on type T4"),
        ('[[node]]\ngpus = 1\ntype = "T4"\nlink = 3', "link = 3; allowed: a table"),
        ('[[node]]\ngpus = 1\ntype = "T4"\npower_watts = -1', "power_watts = -1; allowed"),
        ('[[node]]\ngpus = 1\ntype = "T4"\nlink = {intra = 3}', "unknown key 'intra'"),
        ("[[nodes]]\ngpus = 1", "unknown key 'nodes'; allowed: node"),
        ("node = 3", "`node` is no list"),
        ("[[node", "is not TOML"),
    ],
)
def test_bad_toml_is_refused(tmp_path, text, message):
    with pytest.raises(ClusterError, match=message):
        Cluster.from_toml(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ClusterError, match="nowhere.toml.*No such file"):
        Cluster.from_toml(tmp_path / "nowhere.toml")


def test_dict_round_trip_through_json(tmp_path):
    text = '[[node]]\ngpus = 2\ntype = "CPU"\npace_flops = 1e9\nlink = { inter_gb_s = 1 }'
    text += "\npower_watts = 5"
    for cluster in (Cluster.parse(MIXED), Cluster.from_toml(write(tmp_path, text))):
        assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_uniform_reads_driver_names():
    cluster = Cluster.uniform(5, type="Tesla V100-SXM2-32GB", per_node=2)
    assert str(cluster) == "2x2xV100-32GB+1x1xV100-32GB"
    assert Cluster.uniform(2, type="CPU").ranks_of(0) == (0, 1)
    unknown = Cluster.uniform(1, type="NVIDIA Z1", memory_bytes=5)
    assert (unknown.devices[0].type, unknown.devices[0].memory_bytes) == ("NVIDIA Z1", 5)
    with pytest.raises(ClusterError, match="unknown device type 'NVIDIA Z1'"):
        Cluster.uniform(1, type="NVIDIA Z1")
    with pytest.raises(ClusterError, match="0 devices"):
        Cluster.uniform(0, type="CPU")


def test_figures_left_out_are_the_types():
    cluster = Cluster.parse(MIXED)
    assert cluster.link_of(0) == FullLink(
        intra_bytes_per_s=150e9, inter_bytes_per_s=6.25e9, latency_s=20e-6, intra_latency_s=4.4e-6
    )
    assert cluster.link_of(1).intra_bytes_per_s == 80e9
    assert cluster.host_memory_of(0) == 736_000_000_000
    # What no table has keeps its name and takes the conventions.
    unknown = Cluster.uniform(2, type="NVIDIA Z1", memory_bytes=5_000_000_000)
    assert (unknown.type_of(1).name, unknown.type_of(1).memory_bytes) == ("NVIDIA Z1", 5e9)
    assert None not in figures(unknown.link_of(0))


def test_figures_given_come_before_the_types(tmp_path):
    text = """
        [[node]]
        gpus = 8
        type = "V100-32GB"
        memory_bytes = 16e9
        host_memory_bytes = 256e9
        link = { intra_gb_s = 130, latency_s = 5e-6 }
        power_watts = 40
        """
    cluster = Cluster.from_toml(write(tmp_path, text))
    link = cluster.link_of(0)
    assert isinstance(link, Link)
    assert figures(link) == [130e9, 6.25e9, 5e-6]
    assert cluster.host_memory_of(0) == 256_000_000_000
    device = cluster.type_of(7)
    assert (device.memory_bytes, device.tdp_watts, device.idle_watts) == (16e9, 40, 40)
    assert cluster.describe() == [
        "1 x 8 x V100-32GB: memory 16 GB (given), power 40 W (given), inside a node 130 GB/s "
        "(given), between nodes 6.25 GB/s (default), latency 5 us (given), host memory 256 GB "
        "(given)"
    ]


def test_describe_has_a_line_for_each_run_of_equal_nodes():
    lines = Cluster.parse("60x8xV100-32GB+1x4xT4").describe()
    assert lines == [
        "60 x 8 x V100-32GB: memory 32 GB (default), power 300 W (default), inside a node 150 GB/s "
        "(default), between nodes 6.25 GB/s (default), latency 20 us (default), host memory 736 GB "
        "(default)",
        "1 x 4 x T4: memory 16 GB (default), power 70 W (default), inside a node 16 GB/s (default)"
        ", between nodes 3.125 GB/s (default), latency 20 us (default), host memory 384 GB "
        "(default)",
    ]


def test_a_node_of_two_types_goes_by_the_slower():
    cluster = Cluster(
        devices=(
            Device(rank=0, node=0, type="A100-80GB", memory_bytes=80_000_000_000),
            Device(rank=1, node=0, type="T4", memory_bytes=16_000_000_000),
        ),
        nodes=(Node(index=0),),
    )
    assert figures(cluster.link_of(0)) == [16e9, 3.125e9, 20e-6]
    assert cluster.host_memory_of(0) == 384_000_000_000


@pytest.mark.parametrize(
    ("devices", "nodes"),
    [
        ([(0, 0), (2, 0)], [0]),
        ([], []),
        ([(0, 1)], [0, 1]),
        ([(0, 0)], [1]),
    ],
)
def test_ranks_and_nodes_are_consecutive(devices, nodes):
    with pytest.raises(ClusterError, match="0, 1, 2"):
        Cluster(
            devices=tuple(
                Device(rank=rank, node=node, type="CPU", memory_bytes=1) for rank, node in devices
            ),
            nodes=tuple(Node(index=index) for index in nodes),
        )


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("all", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"average": 1}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ({"average": 4}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ({"specific": [[0, 1], [7]]}, [[0, 1], [7]]),
        ({"specific": ((3, 2),)}, [[3, 2]]),
        ({"aware_row": 2}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"aware_row": 8}, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_layouts(layout, expected):
    slices = Cluster.parse("2x4xCPU").layout(layout)
    assert ranks(slices) == expected
    assert all(isinstance(part, DeviceSlice) for part in slices)
    assert len(slices[0]) == len(expected[0])


def interleaved():
    """Ranks dealt over two nodes in turn, as some launchers do."""
    return Cluster(
        devices=tuple(Device(rank=r, node=r % 2, type="CPU", memory_bytes=1) for r in range(4)),
        nodes=(Node(index=0), Node(index=1)),
    )


def test_aware_row_keeps_nodes_together_where_average_does_not():
    assert ranks(interleaved().layout({"average": 2})) == [[0, 1], [2, 3]]
    assert ranks(interleaved().layout({"aware_row": 2})) == [[0, 2], [1, 3]]


def test_aware_row_of_unequal_nodes():
    cluster = Cluster.parse("1x4xCPU+1x2xCPU")
    assert ranks(cluster.layout({"aware_row": 3})) == [[0, 1], [2, 3], [4, 5]]
    assert ranks(cluster.layout({"aware_row": 1})) == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(
        ClusterError, match=r"slice \[3, 4, 5\] spans nodes \[0, 1\] and cuts node 0"
    ):
        cluster.layout({"aware_row": 2})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"average": 3}, r"'average': 3} of 8 devices; allowed: .*: 1, 2, 4, 8"),
        ({"average": 0}, "'average': 0} of 8 devices"),
        ({"average": True}, "'average': True} of 8 devices"),
        ({"aware_row": 5}, "'aware_row': 5} of 8 devices"),
        ({"specific": [[0, 1], [1, 2]]}, "rank 1 is in layout slices 0 and 1; allowed: one"),
        ({"specific": [[0, 0]]}, "rank 0 is in layout slices 0 and 0"),
        ({"specific": [[8]]}, "names rank 8 of 8 devices; allowed: 0 to 7"),
        ({"specific": [[-1]]}, "names rank -1 of 8 devices"),
        ({"specific": [[0], []]}, "allowed: a list of non-empty lists"),
        ({"specific": []}, "allowed: a list of non-empty lists"),
        ({"specific": "01"}, "allowed: a list of non-empty lists"),
        ("al", "unknown layout 'al'; allowed: \"all\""),
        ({"avrage": 2}, "unknown layout"),
        ({"average": 2, "aware_row": 2}, "unknown layout"),
    ],
)
def test_layouts_that_do_not_work(layout, message):
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.parse("2x4xCPU").layout(layout)
    assert caught.value.hint
