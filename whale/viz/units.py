"""Numbers as people read them: 12.3 ms, 16.0 GB, 25.0 %, ranks 0-7.

Place in the flow: below every other file of `whale.viz`; the only place where seconds, bytes and
joules become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def seconds(value: float) -> str:
    """Three digits with the unit that suits: `850 us`, `12.3 ms`, `1.23 s`."""
    if value == 0:
        return "0 ms"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e-6)} us"


def nbytes(value: float) -> str:
    """Decimal units: `12.3 GB`; below 0.1 GB in MB or kB, from 1000 GB in TB."""
    if value >= 999.95e9:
        return f"{value / 1e12:.1f} TB"
    if value >= 0.09995e9 or value == 0:
        return f"{value / 1e9:.1f} GB"
    if value >= 0.09995e6:
        return f"{value / 1e6:.1f} MB"
    return f"{value / 1e3:.1f} kB"


def nbytes_of(value: float, capacity: float) -> str:
    """`12.3/16.0 GB`: the unit is said once where both have the same."""
    used, whole = nbytes(value), nbytes(capacity)
    number, _, unit = used.partition(" ")
    return f"{number}/{whole}" if whole.endswith(f" {unit}") else f"{used}/{whole}"


def joules(value: float) -> str:
    """`3.21 kJ`."""
    for size, unit in ((1e6, "MJ"), (1e3, "kJ")):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value)} J"


def percent(fraction: float, *, signed: bool = False) -> str:
    """One decimal; two below 1 %, so that one device of 512 still has a share."""
    value = 100.0 * fraction
    decimals = 2 if 0 < abs(value) < 0.995 else 1
    return f"{value:{'+' if signed else ''}.{decimals}f} %"


def per_second(value: float) -> str:
    """Three digits, thousands separated."""
    return f"{value:,.0f}" if value >= 999.5 else _digits(value)


def ranges(numbers: Sequence[int], limit: int = 18) -> str:
    """Ascending numbers in short: `3`, `0-7`, `0,8..504`, `0-1,8-9`; at most `limit` characters.

    What does not fit becomes dots and the count: `0-1,8-9,.. (128)`.
    """
    if len(numbers) > 3:
        gaps = {b - a for a, b in pairwise(numbers)}
        if len(gaps) == 1 and gaps != {1}:
            return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    parts = [f"{a}-{b}" if a != b else str(a) for a, b in _runs(numbers)]
    text = ",".join(parts)
    if len(text) <= limit:
        return text
    count = f",.. ({len(numbers)})"
    while len(parts) > 1 and len(",".join(parts)) + len(count) > limit:
        parts.pop()
    return ",".join(parts) + count


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
