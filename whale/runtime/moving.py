"""Moving: tensors between the device and host memory, beside what the device computes.

Place in the flow: under `runtime.store` (weights and state on the host) and `runtime.parking`
(activations there). Host memory that a GPU copies from or to is pinned, in blocks: torch's own
allocator rounds every pinned tensor up to a power of two. Copies have a stream of their own each
way; what waits for one is the stream that uses the tensor, never the host, but for what the host
itself reads.

[Note: slots] Large weights that come and go are brought into memory that stays (`Slots`): a caching
allocator would take new memory for each, as the host runs ahead of the device and nothing is free
yet when it asks. A slot is free when nobody has a tensor of it; the copy into it waits for what
uses it still, on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from whale.runtime import compat

_BLOCK_BYTES = 1 << 28
_ALIGNED = 256


class HostMemory:
    """Tensors in host memory, pinned where a GPU is to reach them."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._block: torch.Tensor | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape."""
        if not self._pinned:
            return torch.empty(shape, dtype=dtype)
        numel = 1
        for size in shape:
            numel *= size
        nbytes = numel * dtype.itemsize
        if nbytes > _BLOCK_BYTES // 2:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).view(dtype).view(shape)
        if self._block is None or self._used + nbytes > self._block.numel():
            self._block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._used = 0
        found = self._block.narrow(0, self._used, nbytes)
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return found.view(dtype).view(shape)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape and dtype."""
        return self.empty(tuple(tensor.shape), tensor.dtype)

    def holding(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, complete when this returns."""
        return self.like(tensor).copy_(tensor)


SLOT_BYTES = 1 << 24
"""From which size on a tensor that is brought for a use has a slot."""


class Slots:
    """Memory of a device for tensors that come and go, by size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._parked: dict[int, torch.cuda.Event] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A free slot's memory as a tensor, which holds the slot as long as it lives."""
        known = self._slots.setdefault((shape.numel(), dtype), [])
        slot = next((s for s in known if compat.num_holders(s) == 1), None)
        if slot is None:
            slot = torch.empty(shape.numel(), dtype=dtype, device=self._device)
            known.append(slot)
        return slot.view(shape)

    def parking(self, tensor: torch.Tensor, event: torch.cuda.Event) -> None:
        """Until the event a slot's memory is still read."""
        self._parked[tensor.untyped_storage().data_ptr()] = event

    def parked(self, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """The last such event."""
        return self._parked.get(tensor.untyped_storage().data_ptr())


class Mover:
    """Copies to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._slots = Slots(device)
        self._written: dict[int, torch.cuda.Event] = {}
        """By address in host memory, when what was parked there last is complete."""
        self.brought = self.returned = 0
        """Bytes."""

    def _stream(self, way: str) -> torch.cuda.Stream:
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(self.device)
        return self._streams[way]

    def fetch(
        self, host: torch.Tensor, dtype: torch.dtype, *, often: bool = False
    ) -> Callable[[], torch.Tensor]:
        """Begins to bring a tensor to the device; what it gives waits for it.

        It is cast there: the bytes that travel are those of the host's dtype. What comes `often`
        comes into a slot.
        """
        self.brought += host.nbytes
        if self.device.type != "cuda":
            return lambda: host.to(self.device, dtype, copy=True)
        stream = self._stream("in")
        written = self._written.get(host.data_ptr())
        if written is not None:
            stream.wait_event(written)
        slotted = often and host.dtype == dtype and host.nbytes >= SLOT_BYTES
        if slotted:
            here = self._slots.take(host.shape, dtype)
            # Whatever used it before has been asked for by now.
            stream.wait_stream(torch.cuda.current_stream(self.device))
            parked = self._slots.parked(here)
            if parked is not None:
                stream.wait_event(parked)
        with torch.cuda.stream(stream):
            if slotted:
                here.copy_(host, non_blocking=True)
            else:
                here = host.to(self.device, non_blocking=True).to(dtype)
            arrived = stream.record_event()

        def wait() -> torch.Tensor:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(arrived)
            if not slotted:
                here.record_stream(now)
            return here

        return wait

    def park(self, here: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        """Begins to copy a tensor of the device into host memory.

        What it gives has the host wait until the copy is complete.
        """
        self.returned += here.nbytes
        if self.device.type != "cuda":
            host.copy_(here)
            return lambda: None
        stream = self._stream("out")
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if "in" in self._streams:  # what is still read there may be written to here
            stream.wait_stream(self._streams["in"])
        with torch.cuda.stream(stream):
            host.copy_(here, non_blocking=True)
            gone = stream.record_event()
        here.record_stream(stream)
        self._slots.parking(here, gone)
        self._written[host.data_ptr()] = gone
        return gone.synchronize

    def after_parking(self) -> None:
        """From here on the device's fetches come after all that was parked."""
        if self._streams.get("out") is not None:
            self._stream("in").wait_stream(self._stream("out"))
