"""Communicators: the plan's process groups, found by name, closed with the Step.

Place in the flow: opened by `engine.lower`; every collective names its group by a string, so that
modules stay copyable and custom ops traceable. The table below is the only state here and belongs
to open Steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from whale.ir.plan import Plan
from whale.runtime.symmetric import MOST_MEMBERS, StreamWork, SymmetricMemory, within_node

_open: dict[str, Communicator] = {}
_serial = itertools.count()

Record = Callable[[str, tuple[int, ...]], None]
Work = dist.Work | StreamWork


class Later:
    """What a collective under way will give."""

    def __init__(self, work: Work | None, result: Callable[[], torch.Tensor]) -> None:
        self._work, self._result = work, result

    def wait(self) -> torch.Tensor:
        """The result, once."""
        if self._work is not None:
            self._work.wait()
        return self._result()


class Communicator:
    """One process group as a rank sees it.

    SUM collectives over plain `dist.*`, uneven sizes welcome.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        symmetric: bool = False,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.group = group
        self.native = group is not None and dist.get_backend(group) == "nccl"
        self.record: Record | None = None
        self.shared: SymmetricMemory | None = None
        if symmetric and self.native and 1 < self.size <= MOST_MEMBERS and within_node(ranks):
            assert group is not None
            self.shared = SymmetricMemory(group)
        self._side = torch.cuda.Stream() if self.shared is not None else None

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def _note(self, kind: str) -> None:
        if self.record is not None:
            self.record(kind, self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor: the SUM over the group."""
        self._note("all_reduce")
        out = tensor.contiguous().clone()
        self.all_reduce_(out)
        return out

    def start_all_reduce(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """A new tensor that will be the SUM once the work is waited for."""
        self._note("all_reduce")
        out = tensor.contiguous().clone()
        return out, self.all_reduce_(out, async_op=True)

    def all_reduce_(self, tensor: torch.Tensor, *, async_op: bool = False) -> Work | None:
        """SUM in place."""
        if self.size == 1:
            return None
        if self.shared is None or not self.shared.sums(tensor):
            return dist.all_reduce(tensor, group=self.group, async_op=async_op)
        work = self._aside(partial(self.shared.sum_, tensor), tensor)
        if async_op:
            return work
        work.wait()
        return None

    def _aside(self, collective: Callable[[], None], *tensors: torch.Tensor) -> StreamWork:
        """A collective through symmetric memory, on the one stream that all of them share."""
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            collective()
            work = StreamWork(self._side.record_event())
        for tensor in tensors:
            tensor.record_stream(self._side)
        return work

    def start_gather(self, local: torch.Tensor, sizes: list[int]) -> Later:
        """Flat pieces of `sizes`, one after another in group order."""
        if self.size == 1:
            return Later(None, lambda: local)
        local = local.contiguous()
        out = local.new_empty(sum(sizes))
        if self.native and len(set(sizes)) == 1:
            work = dist.all_gather_into_tensor(out, local, group=self.group, async_op=True)
        else:
            copies = local.repeat(self.size)
            sent = [local.numel()] * self.size
            work = dist.all_to_all_single(
                out, copies, list(sizes), sent, group=self.group, async_op=True
            )
        return Later(work, lambda: out)

    def start_scatter(
        self, flat: torch.Tensor, sizes: list[int], dtype: torch.dtype | None = None
    ) -> Later:
        """The SUM over the group of flat pieces of `sizes`, of which this rank gets its own.

        With a `dtype` of their own, pieces are added and given in that.
        """
        if self.size == 1:
            return Later(None, lambda: flat.to(dtype or flat.dtype))
        mine = sizes[self.index]
        if self.native and len(set(sizes)) == 1 and dtype in (None, flat.dtype):
            own = flat.new_empty(mine)
            work = dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True)
            return Later(work, lambda: own)
        parts = flat.new_empty(self.size * mine)
        work = dist.all_to_all_single(
            parts, flat, [mine] * self.size, list(sizes), group=self.group, async_op=True
        )
        return Later(work, lambda: parts.view(self.size, mine).sum(0, dtype=dtype))

    def all_max_(self, tensor: torch.Tensor) -> None:
        """The greatest of every element, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """Pieces of `sizes` along `dim`, concatenated in group order."""
        self._note("all_gather")
        if self.size == 1:
            return tensor.clone()
        local = tensor.movedim(dim, 0).contiguous()
        out = local.new_empty((sum(sizes), *local.shape[1:]))
        if self.shared is not None and out.is_cuda:
            self._aside(partial(self.shared.gather, out, local, sizes), out, local).wait()
        elif self.native and len(set(sizes)) == 1:
            dist.all_gather_into_tensor(out, local, group=self.group)
        else:
            # Gloo gathers only equal pieces; an all-to-all of copies takes any sizes without
            # padding.
            copies = local.unsqueeze(0).expand(self.size, *local.shape).contiguous()
            dist.all_to_all_single(
                out,
                copies.flatten(0, 1),
                list(sizes),
                [local.shape[0]] * self.size,
                group=self.group,
            )
        return out.movedim(0, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """The SUM over the group, of which this rank keeps its piece along `dim`."""
        self._note("reduce_scatter")
        if self.size == 1:
            return tensor.clone()
        local = tensor.movedim(dim, 0).contiguous()
        mine = sizes[self.index]
        if self.shared is not None and local.is_cuda:
            out = local.new_empty((mine, *local.shape[1:]))
            self._aside(partial(self.shared.sum_pieces, out, local, sizes), out, local).wait()
        elif self.native and len(set(sizes)) == 1:
            out = local.new_empty((mine, *local.shape[1:]))
            dist.reduce_scatter_tensor(out, local, group=self.group)
        else:
            parts = local.new_empty((self.size * mine, *local.shape[1:]))
            dist.all_to_all_single(parts, local, [mine] * self.size, list(sizes), group=self.group)
            out = parts.view(self.size, mine, *local.shape[1:]).sum(0)
        return out.movedim(0, dim)

    def all_to_all(self, tensor: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Exchanges rows of dim 0: `send[i]` rows to member i, `receive[i]` rows from it."""
        self._note("all_to_all")
        if self.size == 1:
            return tensor.clone()
        local = tensor.contiguous()
        out = local.new_empty((sum(receive), *local.shape[1:]))
        dist.all_to_all_single(out, local, list(receive), list(send), group=self.group)
        return out

    def start_all_to_all(
        self, tensor: torch.Tensor, send: list[int], receive: list[int]
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """The same, begun: the result is there once the work is waited for."""
        self._note("all_to_all")
        local = tensor.contiguous()
        if self.size == 1:
            return local.clone(), None
        out = local.new_empty((sum(receive), *local.shape[1:]))
        work = dist.all_to_all_single(
            out, local, list(receive), list(send), group=self.group, async_op=True
        )
        return out, work


class Groups:
    """All communicators of one Step on one rank."""

    def __init__(
        self, plan: Plan, rank: int, timeout: timedelta, *, symmetric: bool = False
    ) -> None:
        self.prefix = f"step{next(_serial)}"
        self.rank = rank
        self.by_ranks: dict[tuple[int, ...], str] = {}
        self.channels: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        self._created: list[dist.ProcessGroup] = []
        distributed = dist.is_initialized() and plan.num_ranks > 1
        native = distributed and dist.get_backend() == "nccl"
        for group in plan.groups:
            channel = group.name.startswith("p2p:")
            made = None
            if distributed and (not channel or native):
                made = dist.new_group(list(group.ranks), timeout=timeout)
            if rank not in group.ranks:
                continue
            if made is not None:
                self._created.append(made)
            if channel:
                source, _, target = group.name.removeprefix("p2p:").partition(">")
                self.channels[int(source), int(target)] = made
            else:
                name = f"{self.prefix}/{group.name}"
                _open[name] = Communicator(name, group.ranks, rank, made, symmetric=symmetric)
                self.by_ranks.setdefault(group.ranks, name)
        if native:
            self._warm_up(plan)
        elif distributed:
            # A rank that closes its step at once must not hang up on one that is still connecting.
            dist.barrier()
        self.by_ranks.setdefault((rank,), f"{self.prefix}/self")
        _open[f"{self.prefix}/self"] = Communicator(f"{self.prefix}/self", (rank,), rank, None)

    def _warm_up(self, plan: Plan) -> None:
        """Connects every communicator now, in the plan's order.

        NCCL connects at first use, which blocks the host and waits for the device: in the middle of
        a schedule, with messages in flight, that deadlocks.
        """
        token = torch.zeros(1, device="cuda")
        for group in plan.groups:
            if self.rank not in group.ranks:
                continue
            if group.name.startswith("p2p:"):
                source, _, target = group.name.removeprefix("p2p:").partition(">")
                channel = self.channels[int(source), int(target)]
                if self.rank == int(source):
                    dist.send(token, int(target), group=channel)
                else:
                    dist.recv(token, int(source), group=channel)
            else:
                dist.all_reduce(token, group=_open[f"{self.prefix}/{group.name}"].group)
            torch.cuda.synchronize()

    def name_of(self, ranks: tuple[int, ...]) -> str:
        """The group of exactly these ranks."""
        return (
            self.by_ranks[tuple(sorted(ranks))]
            if ranks not in self.by_ranks
            else self.by_ranks[ranks]
        )

    def find(self, ranks: tuple[int, ...]) -> str | None:
        """The group of exactly these ranks, if the plan has one."""
        return self.by_ranks.get(ranks, self.by_ranks.get(tuple(sorted(ranks))))

    def of(self, ranks: tuple[int, ...]) -> Communicator:
        """The communicator of exactly these ranks."""
        return _open[self.name_of(ranks)]

    def pool(self, ranks: tuple[int, ...]) -> list[Communicator]:
        """All communicators of exactly these ranks."""
        return [c for c in self.all() if c.ranks == ranks]

    def all(self) -> list[Communicator]:
        """Every communicator of this Step."""
        return [c for name, c in _open.items() if name.startswith(f"{self.prefix}/")]

    def close(self) -> None:
        """Destroys the groups; collectives by these names are errors afterwards."""
        for name in [n for n in _open if n.startswith(f"{self.prefix}/")]:
            # Whoever still holds the communicator must not hold its connections.
            _open.pop(name).group = None
        if dist.is_initialized():
            for group in self._created:
                dist.destroy_process_group(group)
        self._created.clear()


def communicator(name: str) -> Communicator:
    """The open communicator of that name."""
    return _open[name]
