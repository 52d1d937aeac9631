"""Device types: every row is whole, and says what its part's data sheet says."""

import dataclasses

import pytest

from whale.errors import ClusterError
from whale.ir.device_types import DEVICE_TYPES, UNKNOWN, device_type, type_in, type_named

DTYPES = {"float64", "float32", "tf32", "float16", "bfloat16"}


@pytest.mark.parametrize("row", [*DEVICE_TYPES.values(), UNKNOWN], ids=lambda row: row.name)
def test_every_row_is_whole(row):
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, int | float):
            assert value > 0, field.name
    assert set(row.flops_per_s) <= DTYPES
    assert row.flops_per_s
    assert min(row.flops_per_s.values()) > 0
    assert row.idle_watts < row.tdp_watts
    assert row.source
    assert hash(row) == hash(dataclasses.replace(row))


def test_names_are_keys():
    assert all(name == row.name for name, row in DEVICE_TYPES.items())
    assert [*DEVICE_TYPES][:3] == ["P100-16GB", "V100-16GB", "V100-32GB"]
    assert {"H200", "B200", "MI300X", "TPU-v3", "CPU"} <= set(DEVICE_TYPES)
    with pytest.raises(TypeError):
        DEVICE_TYPES["V200"] = UNKNOWN


@pytest.mark.parametrize("name", ["P100-16GB", "V100-16GB", "V100-32GB", "T4"])
def test_parts_before_ampere_have_no_bfloat16_and_no_tf32(name):
    assert not {"bfloat16", "tf32"} & set(DEVICE_TYPES[name].flops_per_s)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "memory", "hbm", "intra", "inter", "watts"),
    [
        ("P100-16GB", "float16", 21.2, 16, 732, 80, 6.25, 300),
        ("V100-32GB", "float16", 125, 32, 900, 150, 6.25, 300),
        ("T4", "float16", 65, 16, 320, 16, 3.125, 70),
        ("A10", "bfloat16", 125, 24, 600, 32, 3.125, 150),
        ("A100-40GB", "bfloat16", 312, 40, 1555, 300, 200, 400),
        ("A100-80GB", "tf32", 156, 80, 2039, 300, 200, 400),
        ("H100", "bfloat16", 989, 80, 3350, 450, 400, 700),
        ("H200", "float32", 67, 141, 4800, 450, 400, 700),
        ("B200", "bfloat16", 2250, 180, 8000, 900, 400, 1000),
        ("MI300X", "float16", 1307.4, 192, 5300, 448, 3.125, 750),
        ("TPU-v3", "bfloat16", 123, 32, 900, 332, 664, 262),
    ],
)
def test_data_sheets(name, dtype, tflops, memory, hbm, intra, inter, watts):
    row = DEVICE_TYPES[name]
    assert row.flops_per_s[dtype] == pytest.approx(tflops * 1e12)
    assert row.memory_bytes == memory * 10**9
    assert row.memory_bytes_per_s == pytest.approx(hbm * 1e9)
    assert row.intra_bytes_per_s == pytest.approx(intra * 1e9)
    assert row.inter_bytes_per_s == pytest.approx(inter * 1e9)
    assert row.tdp_watts == watts


def test_the_node_of_the_paper():
    assert DEVICE_TYPES["V100-32GB"].host_memory_bytes == 736_000_000_000


def test_names_of_drivers_and_of_nobody():
    assert type_in("NVIDIA A100-SXM4-80GB") == "A100-80GB"
    assert type_in("NVIDIA GeForce RTX 4090") == "4090"
    assert type_in("NVIDIA H200") == "H200"
    assert type_in("NVIDIA A10G") is None
    assert device_type("NVIDIA A10G") is UNKNOWN
    assert type_named("tpu-V3", where="here") == "TPU-v3"
    with pytest.raises(ClusterError, match="here: unknown device type 'zzz'") as caught:
        type_named("zzz", where="here")
    assert "TOML" in caught.value.hint
