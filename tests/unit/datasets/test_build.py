"""The pieces of `scripts/build_m6_data.py` that decide what the shipped data is."""

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest

image = pytest.importorskip("PIL.Image")
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "build_m6_data.py"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build_m6_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_picture_is_put_on_white_and_averaged(build):
    pixels = np.zeros((64, 64, 4), dtype=np.uint8)
    pixels[:2, :2] = [(200, 100, 0, 255)]
    pixels[0, 0] = (0, 0, 0, 128)
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    small = build.on_white(file.getvalue())
    assert small.shape == (32, 32, 3)
    # Three opaque pixels, and one half black on white: 127 of 255.
    assert small[0, 0].tolist() == [
        (3 * 200 + 127 + 2) // 4,
        (3 * 100 + 127 + 2) // 4,
        (127 + 2) // 4,
    ]
    assert (small[1:] == 255).all()


def test_variants_of_a_drawing_are_one_family(build):
    farmer = {"1F468-200D-1F33E", "1F469-200D-1F33E", "1F9D1-200D-1F33E"}
    assert len({build.family(code) for code in farmer}) == 1
    running = {"1F3C3", "1F3C3-200D-2640", "1F3C3-200D-2642-200D-27A1"}
    assert len({build.family(code) for code in running}) == 1
    assert build.family("1F436") != build.family("1F415")


def test_names_are_held_out_together_and_in_the_same_way_in_any_order(build):
    records = [{"id": i, "name": str(i // 3)} for i in range(300)]
    build.hold_out(records, lambda record: record["name"])
    out = {record["id"] for record in records if record["held_out"]}
    assert 30 <= len(out) <= 32
    assert {i // 3 * 3 for i in out} <= out
    build.hold_out(records[::-1], lambda record: record["name"])
    assert {record["id"] for record in records if record["held_out"]} == out


@pytest.mark.parametrize(
    ("package", "archive"),
    [("emojibase-data@17.0.0", "emojibase-data-17.0.0.tgz"), ("@a/b@1.2", "a-b-1.2.tgz")],
)
def test_archives_are_named_as_npm_names_them(build, package, archive):
    assert build.archive_of(Path("x"), package) == Path("x") / archive
