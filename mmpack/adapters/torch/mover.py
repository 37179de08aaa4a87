"""Batches to a device without anyone waiting: pinned memory, a stream for copies, an event for the reader."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mmpack.packing.batch import PackedBatch


class Mover:
    """`send` in the thread that packs, then `receive` in the one that computes. Devices that are not CUDA's: `to`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.pins = device.type == "cuda"  # ROCm's, too

    def send(self, batch: PackedBatch) -> tuple[PackedBatch, Any]:
        """The batch on the device, and the event of its last copy (None: it has arrived)."""
        if not self.pins:
            return batch.to(self.device), None
        stream = _copies(self.device)
        # memory of this stream's own: no copy lands where the reader still reads
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            moved = batch.to(self.device, non_blocking=True)
            return moved, stream.record_event()

    def receive(self, batch: PackedBatch, event: Any) -> PackedBatch:
        """The batch for the current stream, which waits for the copies; the host does not."""
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            batch.record_stream(stream)
        return batch


@functools.cache
def _copies(device: torch.device) -> Any:
    """The stream of all loaders' copies to a device: memory that one leaves is the next one's."""
    return torch.cuda.Stream(device)
