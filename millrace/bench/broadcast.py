"""The baseline: each tensor is gathered whole on one rank, sent whole to every worker, and cut there."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from millrace.weights.plans.boxes import Boxes, disjoint, distinct, overlaps
from millrace.weights.plans.layout import Layout
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage, PendingExchange
from millrace.weights.transfer.checksum import checksum


class Broadcast:
    """One rank's part. The communicator's ranks 0 .. senders − 1 hold shards; rank 0 gathers."""

    def __init__(
        self, memory: Memory, rank: int, senders: int, world: int, channel: Channel, layouts: Sequence[Boxes]
    ) -> None:
        self._memory, self._rank, self._senders, self._world, self._channel = memory, rank, senders, world, channel
        self._device = memory.device
        cells = disjoint(distinct(Boxes.joined(layouts))[0])
        holder = np.full(len(cells), -1, np.int64)
        for sender in reversed(range(senders)):
            rows, _ = overlaps(cells, layouts[sender])
            holder[rows] = sender
        self._cells: list[list[tuple[int, Boxes]]] = [[] for _ in memory.manifest.tensors]
        for row in range(len(cells)):
            self._cells[int(cells.tensor[row])].append((int(holder[row]), cells.take(np.array([row]))))
        self._layouts: list[Layout] = []
        if rank >= senders:
            boxes = memory.layout.boxes
            rows_of = [np.flatnonzero(boxes.tensor == i) for i in range(len(memory.manifest.tensors))]
            layout = memory.layout
            self._layouts = [
                Layout(boxes.take(r), layout.buffer[r], layout.start[r], layout.strides[r]) for r in rows_of
            ]
        self.bytes = memory.manifest.bytes if rank >= senders else 0

    def run(self, version: int) -> dict[str, float]:
        """One publication: received into separate memory, then put in place. The pause is the second part. Returns
        seconds by name."""
        began = time.perf_counter()
        gather, sums = 0.0, 0.0
        whole: list[torch.Tensor] = []
        for number, info in enumerate(self._memory.manifest.tensors):
            dtype = getattr(torch, info.dtype)
            tensor = torch.empty(info.shape, dtype=dtype, device=self._device) if self._holds else None
            started = time.perf_counter()
            if self._rank < self._senders:
                self._gather(number, tensor, dtype)
            gathered = time.perf_counter()
            gather += gathered - started
            if tensor is not None:
                flat = tensor.view(-1).view(torch.uint8)
                if self._rank == 0:
                    sends = [ChannelMessage(number, rank, flat) for rank in range(self._senders, self._world)]
                    self._channel.exchange(sends, (), self._current()).wait()
                else:
                    self._channel.exchange((), [ChannelMessage(number, 0, flat)], self._current()).wait()
                    whole.append(tensor)
                arrived = time.perf_counter()
                checksum(tensor)
                sums += time.perf_counter() - arrived
        moved = time.perf_counter()
        for layout, tensor in zip(self._layouts, whole, strict=True):
            self._place(layout, tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        apply_s = time.perf_counter() - moved
        spent = {"transfer": moved - began, "pack": gather, "sums": sums}
        return {**spent, "apply": apply_s, "compare": 0.0, "pause": apply_s}

    @property
    def _holds(self) -> bool:
        return self._rank == 0 or self._rank >= self._senders

    def _current(self) -> object:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _gather(self, number: int, tensor: torch.Tensor | None, dtype: torch.dtype) -> None:
        exchanges: list[PendingExchange] = []
        received = []
        for index, (holder, cell) in enumerate(self._cells[number]):
            if holder not in (0, self._rank) and tensor is None:
                continue
            if holder == self._rank:
                _, place = self._memory.layout.locate(cell, every=False)
                held = self._memory.buffers[int(place.buffer[0])]
                start = held.storage_offset() + int(place.start[0])
                box = torch.as_strided(held, cell.extent[0].tolist(), place.strides[0].tolist(), start)
                if tensor is not None:
                    self._part(tensor, cell).copy_(box)
                else:
                    sent = box.to(dtype).contiguous().view(-1).view(torch.uint8)
                    exchanges.append(self._channel.exchange([ChannelMessage(index, 0, sent)], (), self._current()))
            elif tensor is not None:
                got = torch.empty(cell.extent[0].tolist(), dtype=dtype, device=self._device)
                message = ChannelMessage(index, holder, got.view(-1).view(torch.uint8))
                exchanges.append(self._channel.exchange((), [message], self._current()))
                received.append((cell, got))
        for exchange in exchanges:
            exchange.wait()
        for cell, got in received:
            assert tensor is not None
            self._part(tensor, cell).copy_(got)

    def _part(self, tensor: torch.Tensor, cell: Boxes) -> torch.Tensor:
        box = tuple(slice(o, o + n) for o, n in zip(cell.offset[0].tolist(), cell.extent[0].tolist(), strict=True))
        while tensor.dim() < cell.dims:
            tensor = tensor.unsqueeze(-1)
        return tensor[box]

    def _place(self, layout: Layout, tensor: torch.Tensor) -> None:
        for row in range(len(layout.boxes)):
            held = self._memory.buffers[int(layout.buffer[row])]
            start = held.storage_offset() + int(layout.start[row])
            extent, strides = layout.boxes.extent[row].tolist(), layout.strides[row].tolist()
            target = torch.as_strided(held, extent, strides, start)
            target.copy_(self._part(tensor, layout.boxes.take(np.array([row]))))
