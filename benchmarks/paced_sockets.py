"""A network of known speed out of the loopback device: `pace_sockets` slows this process's sockets.

Place in the flow: called by ranks that play hosts (`heterogeneous_rank`). Bare, the loopback device
is a bad stand-in for a network: on the machine with the GPU the same sums of gradients ran at 1.6
to 4.1 GB/s from one run to the next, because it is copies by cores that are busy otherwise. Linux
paces a TCP socket to any rate below that, without a queueing discipline and without privileges.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

SO_MAX_PACING_RATE = 47
_LOOK_EVERY_S = 0.2


def pace_sockets(bytes_per_s: int) -> None:
    """From now on every TCP socket of this process sends so fast at most, also those to come.

    A thread looks for new ones, because it is NCCL that opens them.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s.to_bytes(8, "little"))
    pacer = _Pacer(bytes_per_s)
    pacer.look()
    threading.Thread(target=pacer.run, name="pace-sockets", daemon=True).start()


class _Pacer:
    def __init__(self, bytes_per_s: int) -> None:
        self.rate = bytes_per_s.to_bytes(8, "little")
        self.paced: set[int] = set()
        """Inodes: a descriptor's number is used again."""

    def run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        for name in os.listdir("/proc/self/fd"):
            try:
                inode = os.stat(int(name)).st_ino
                if (
                    inode not in self.paced
                    and os.readlink(f"/proc/self/fd/{name}")[:7] == "socket:"
                ):
                    self._pace(int(name))
                    self.paced.add(inode)
            except OSError as error:
                if error.errno not in (errno.EBADF, errno.ENOENT):  # closed since it was listed
                    raise

    def _pace(self, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.family != socket.AF_UNIX and opened.type == socket.SOCK_STREAM:
                opened.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self.rate)
