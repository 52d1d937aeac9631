"""HalfSums: gradients summed in half precision, at half the bytes.

Place in the flow: between `grads` and its communicators when `communication.fp16` or `bf16` is on.

[Note: error] Every rank rounds its part once and every addition rounds again, so that for n ranks
an element is off by at most n * u times the sum of the parts' absolute values, u being 2^-11 for
float16 and 2^-8 for bfloat16, and in float16 by another n * 2^-24 / scale for values too small to
be normal. The scale is a power of two (exact), chosen per bucket so that `room` times the largest
part of any rank still is a float16: no sum overflows, whatever the number of labels behind it.
"""

from __future__ import annotations

import torch

from whale.runtime.groups import Communicator, Later, Work

_LARGEST = 65504.0


class HalfSums:
    """Starts sums in `dtype`."""

    def __init__(self, dtype: torch.dtype, room: int) -> None:
        self.dtype, self.room = dtype, room

    def start(self, comm: Communicator, flat: torch.Tensor) -> HalfWork:
        """Begins the SUM of `flat`, which holds it once the work is waited for."""
        small, scale = self._small(comm, flat)
        return HalfWork(comm.all_reduce_(small, async_op=True), small, flat, scale)

    def start_scatter(self, comm: Communicator, flat: torch.Tensor, sizes: list[int]) -> Later:
        """Begins the SUM of which this rank gets its piece of `sizes`.

        Only what travels is rounded: pieces are added in the dtype of `flat`.
        """
        small, scale = self._small(comm, flat)
        coming = comm.start_scatter(small, sizes, flat.dtype)

        def result() -> torch.Tensor:
            found = coming.wait()
            return found if scale is None else found.div_(scale)

        return Later(None, result)

    def _small(
        self, comm: Communicator, flat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = self._scale(comm, flat) if self.dtype == torch.float16 else None
        return (flat if scale is None else flat * scale).to(self.dtype), scale

    def _scale(self, comm: Communicator, flat: torch.Tensor) -> torch.Tensor:
        largest = flat.detach().abs().max().reshape(1) if flat.numel() else flat.new_zeros(1)
        comm.all_max_(largest)
        room = max(self.room, comm.size)
        exponent = torch.floor(torch.log2(_LARGEST / (room * largest)))
        # Zero gradients need no scale, and infinite ones must stay infinite.
        usable = (largest > 0) & torch.isfinite(largest)
        return torch.where(usable, torch.exp2(exponent.clamp(-100, 100)), torch.ones_like(largest))


class HalfWork:
    """A sum under way, waited for as `dist.Work` is."""

    def __init__(
        self,
        work: Work | None,
        small: torch.Tensor,
        flat: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> None:
        self._work, self._small, self._flat, self._scale = work, small, flat, scale

    def wait(self) -> bool:
        """The sum is in the tensor it was started with."""
        if self._work is not None:
            self._work.wait()
        self._flat.copy_(self._small)
        if self._scale is not None:
            self._flat.div_(self._scale)
        return True
