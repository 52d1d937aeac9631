"""Sockets of a process are paced: those that are open, and those that others open later."""

from __future__ import annotations

import socket

from benchmarks.paced_sockets import SO_MAX_PACING_RATE, _Pacer


def rate_of(opened: socket.socket) -> int:
    return int.from_bytes(opened.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), "little")


def test_tcp_sockets_are_paced_once_each() -> None:
    with socket.socket() as first, socket.socket(socket.AF_UNIX) as local:
        pacer = _Pacer(123_000_000)
        pacer.look()
        assert rate_of(first) == 123_000_000
        assert rate_of(local) > 123_000_000
        with socket.socket() as second:
            first.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, (7).to_bytes(8, "little"))
            pacer.look()
            assert rate_of(second) == 123_000_000
            # Known: looked at no more.
            assert rate_of(first) == 7
