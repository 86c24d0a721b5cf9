"""Buffers that a forward changes (BatchNorm statistics): one update per step, for any number of
ranks and micro-batches.

Every micro-batch of a step starts from the same values. After all of them, a buffer moves by the
weighted mean of the micro-batches' changes. Otherwise statistics would depend on how many
micro-batches a rank has, and would differ between ranks. Integer buffers (`num_batches_tracked`)
move by the same mean, rounded: they count steps.

A forward outside of a window leaves no trace in statistics of BatchNorm: the next step, a comparison
and a checkpoint begin with what the last step has left. So the generator of a GAN may run in the
discriminator's window. What the program writes itself stays, as load_state_dict does.

Nobody declares which buffers move. After the first step the ranks agree on those that any forward
has changed; those of BatchNorm's family are always among them. If a buffer begins to move later,
the rank concerned sees it by its version counter, and announces it with the facts of that step. All
ranks then take its value from rank 0, once. A buffer that changes its shape is a cache, and is left
alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.collectives.addition_order import ABSENT, add_rows
from lockstep.collectives.group import Group
from lockstep.collectives.work import Done, Work
from lockstep.errors import LockstepWarning

BufferHook = Callable[[Any, dict[str, Tensor]], list[torch.futures.Future[Any]] | None]
_ROWS = 16  # micro-batches whose movements are computed at once


class _Kind:
    """The moving buffers of one dtype, flat: their values at the start of a step, and the sum of
    their movements.

    In exact mode the sums have one row per slot, otherwise one row. `numbers` are the numbers of
    the buffers, `owners` the module and the name of each.
    """

    def __init__(self, numbers: list[int], owners: list[tuple[nn.Module, str]]) -> None:
        self.numbers = numbers
        self.flats: list[Tensor] = []
        """The elements of each buffer: a view that can be written to, if the buffer is
        contiguous.
        """
        self.identities: list[tuple[dict[str, Tensor | None], str, Tensor, torch.Size, int]] = []
        for module, name in owners:
            buffers = module._buffers
            tensor = buffers[name]
            assert tensor is not None
            flat = _flat(tensor)
            self.flats.append(flat)
            self.identities.append((buffers, name, tensor, tensor.shape, flat.data_ptr()))
        self.start = torch.cat(self.flats)
        self.sizes = [flat.numel() for flat in self.flats]
        self.starts = list(self.start.split(self.sizes))
        self.moved = self.start
        # Micro-batches that are not in `moved` yet: the elements after each (these rows are reused
        # in the next step), and its weight and slot.
        self._rows: list[Tensor] = []
        self._ended: list[tuple[float | Tensor, int]] = []
        self.left: list[int] = []
        """The versions of the buffers at the last `mark`."""

    def begin(self, *, restored: bool) -> None:
        """Begin a step with the values that the buffers hold now, or `restored` to those that the
        last step has left.
        """
        if restored:
            torch._foreach_copy_(self.flats, self.starts)
        else:
            torch.cat(self.flats, out=self.start)
        self._ended.clear()

    def end_micro_batch(self, weight: float | Tensor, slot: int) -> None:
        """End a micro-batch of that weight; the buffers return to the values they began with."""
        if len(self._rows) == len(self._ended):
            self._rows.append(torch.empty_like(self.start))
        torch.cat(self.flats, out=self._rows[len(self._ended)])
        torch._foreach_copy_(self.flats, self.starts)
        self._ended.append((weight, slot))
        if len(self._ended) == _ROWS:
            self.add_up()

    def versions(self) -> list[int]:
        return [flat._version for flat in self.flats]

    def add_up(self) -> None:
        """Bring `moved` up to date."""
        if not self._ended:
            return
        weights, slots = zip(*self._ended, strict=True)
        movements = movement(torch.stack(self._rows[: len(slots)]), self.start).to(self.moved)
        if movements.is_cpu:
            factors = _column(tuple(map(float, weights)), movements.dtype)
            self.moved.index_add_(0, _column(slots)[:, 0], movements * factors)
        else:  # the GPU gets numbers of the host without waiting
            for row, weight, slot in zip(movements, weights, slots, strict=True):
                self.moved[slot].add_(row * weight)
        self._ended.clear()


class MovingBuffers:
    """The buffers of one model during training. `begin` opens a step, `begin_micro_batch` and
    `end_micro_batch` enclose a micro-batch, `send` and `finish` are collective.
    """

    def __init__(
        self, model: nn.Module, group: Group, device: torch.device, generation: int = 0
    ) -> None:
        self._group = group
        self.generation = generation
        """The Reducer's `generation` when these buffers were found."""
        self._device = device
        # By owner and name, because a forward may also assign a new tensor to a buffer.
        self._names: list[str] = []
        self._owners: list[tuple[nn.Module, str]] = []
        # Batch norm kernels write their statistics without changing the version counter, so these
        # buffers always count as moving.
        self._always: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if isinstance(module, _NormBase):
                    self._always.add(len(self._owners))
                self._names.append(f"{prefix}.{name}".lstrip("."))
                self._owners.append((module, name))
        self._agreed = False
        self._shapes = [self._buffer(number).shape for number in range(len(self._owners))]
        self._moving = self._by_dtype(range(len(self._owners)))
        self.watched = list(range(len(self._owners)))
        """The numbers of the buffers that are not known to move."""
        self._kinds: list[_Kind] = []
        self._moved = torch.zeros(0)
        self._sum: Work = Done()
        self._touched: set[int] = set()
        self._seen: list[tuple[int, int]] = []
        self._find()
        self._left: tuple[list[int], list[int]] | None = self._versions()
        """What `_versions` returned when the last step had ended; None within a step."""

    def _buffer(self, number: int) -> Tensor:
        module, name = self._owners[number]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _by_dtype(self, numbers: Iterable[int]) -> list[int]:
        """Sort buffers by dtype: those of one dtype travel together."""
        return sorted(numbers, key=lambda number: (str(self._buffer(number).dtype), number))

    def _resized(self, number: int) -> bool:
        return self._buffer(number).shape != self._shapes[number]

    def named(self) -> Sequence[tuple[str, Tensor]]:
        """All buffers that are equal on all ranks between steps: not the caches, which change
        their shape.
        """
        return [
            (name, self._buffer(number))
            for number, name in enumerate(self._names)
            if not self._resized(number)
        ]

    @torch.no_grad()
    def begin(self, slots: int = 0) -> None:
        """Begin a step: keep the values that every micro-batch starts from. With `slots`,
        movements are added along the tree of exact mode.
        """
        if self._kinds and self._same():
            restored = self._forwards_outside()
            for kind in self._kinds:
                kind.begin(restored=restored)
        else:
            self._find()
        self._left = None
        if len(self._moved) != max(1, slots):
            dtypes = [start.dtype for start in self.starts]
            sizes = [start.numel() for start in self.starts]
            dtype = torch.float64 if torch.float64 in dtypes else torch.float32
            self._moved = torch.empty(max(1, slots), sum(sizes), dtype=dtype, device=self._device)
            for kind, moved in zip(self._kinds, self._moved.split(sizes, 1), strict=True):
                kind.moved = moved
        self._moved.fill_(ABSENT if slots else 0.0)
        self._touched = set()
        if self.watched:
            self._seen = self._marks()

    def _same(self) -> bool:
        """Whether all moving buffers are the tensors that were found last."""
        for kind in self._kinds:
            for buffers, name, tensor, shape, memory in kind.identities:
                if buffers[name] is not tensor or tensor.shape != shape:
                    return False
                if tensor.data_ptr() != memory:
                    return False
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Between steps, undo what forwards outside of a window have done to the statistics."""
        if self._forwards_outside() and self._same():
            for kind in self._kinds:
                torch._foreach_copy_(kind.flats, kind.starts)
            self._left = self._versions()

    def _versions(self) -> tuple[list[int], list[int]]:
        """The versions of the moving buffers, apart from BatchNorm's counters, and of the counters.
        A forward of BatchNorm in training mode counts, and leaves the other versions as they are.
        """
        versions: tuple[list[int], list[int]] = [], []
        for kind in self._kinds:
            for number in kind.numbers:
                module, name = self._owners[number]
                buffer = module._buffers[name]
                assert buffer is not None
                versions[name == "num_batches_tracked"].append(buffer._version)
        return versions

    def _forwards_outside(self) -> bool:
        """Whether forwards have moved statistics since the last step, and nothing else has."""
        if self._left is None:
            return False
        written, counted = self._versions()
        return written == self._left[0] and counted != self._left[1]

    def _find(self) -> None:
        """Look up the moving buffers again."""
        groups = groupby(self._moving, lambda number: self._buffer(number).dtype)
        self._kinds = []
        for _, group in groups:
            numbers = list(group)
            self._kinds.append(_Kind(numbers, [self._owners[number] for number in numbers]))
        self.starts = [kind.start for kind in self._kinds]
        """The values, flat, that every micro-batch of the step starts from; equal on all ranks."""
        self._moved = torch.empty(0)

    def mark(self) -> None:
        """Note how a micro-batch has left the buffers, for `restart`."""
        for kind in self._kinds:
            kind.left = kind.versions()

    def restart(self) -> None:
        """Within a step, undo what forwards have done since `mark`. One that has moved statistics
        has counted itself too.
        """
        if not (self._agreed and self._same()):
            for kind in self._kinds:
                self._write(kind, kind.starts)
        elif any(kind.versions() != kind.left for kind in self._kinds):
            for kind in self._kinds:
                torch._foreach_copy_(kind.flats, kind.starts)

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch. Not needed if no buffer is `watched`."""
        self._seen = self._marks()

    def _write(self, kind: _Kind, values: Sequence[Tensor]) -> None:
        """Write these values to a kind's buffers one by one, except to caches."""
        for number, value in zip(kind.numbers, values, strict=True):
            if not self._resized(number):
                buffer = real(self._buffer(number))
                buffer.copy_(value.view(buffer.shape))

    def end_micro_batch(self, weight: float | Tensor, slot: int = 0) -> None:
        """End a micro-batch of that weight; `slot` is its row. The buffers return to the values
        that the step began with.
        """
        if self.watched:
            self._note_touched()
        same = self._agreed and self._same()
        for kind in self._kinds:
            if same:
                kind.end_micro_batch(weight, slot)
            else:
                self._end_one_by_one(kind, weight, slot)

    @torch.no_grad()
    def _end_one_by_one(self, kind: _Kind, weight: float | Tensor, slot: int) -> None:
        """Do what `end_micro_batch` does if the ranks have not agreed yet which buffers move, or if a buffer
        is another tensor now.
        """
        kind.add_up()  # keeps the order of the micro-batches
        pieces = kind.moved[slot].split(kind.sizes)
        for number, start, piece in zip(kind.numbers, kind.starts, pieces, strict=True):
            if not self._resized(number):
                far = movement(_flat(self._buffer(number)), start).to(piece)
                piece.add_(far * weight)
                if not self._agreed and far.any():
                    self._touched.add(number)
        self._write(kind, kind.starts)

    def _note_touched(self) -> None:
        """Note which buffers this micro-batch has written to so far."""
        for number, before, after in zip(self.watched, self._seen, self._marks(), strict=True):
            if before != after and not self._resized(number):
                self._touched.add(number)

    def _marks(self) -> list[tuple[int, int]]:
        """The identity and version of each watched buffer: a write changes one of them."""
        return [(id(buffer), buffer._version) for buffer in map(self._buffer, self.watched)]

    @property
    def newly_moving(self) -> bool:
        """Whether a forward of this rank has written to a buffer that was agreed not to move. The
        open micro-batch counts.
        """
        if not self._agreed or not self.watched:
            return False
        self._note_touched()
        return bool(self._touched)

    def send(self) -> None:
        """Start to sum the movements over all ranks, after all micro-batches."""
        for kind in self._kinds:
            kind.add_up()
        if self._moving:
            self._sum = self._group.all_reduce(self._moved, place="for buffers")

    def moved(self) -> Tensor:
        """After `send`: wait for the movements of all ranks; in exact mode row i is slot i's."""
        if self._moving:
            self._sum.wait()
        return self._moved

    @torch.no_grad()
    def finish(self, weight: float, newly_moving: bool) -> None:
        """End the step on all ranks: move the buffers by the sum over ranks divided by `weight`,
        or not at all if `weight` is 0.
        """
        if self._moving:
            self._sum.wait()
            if len(self._moved) > 1:
                self._moved[0] = add_rows(self._moved)
            self._moved[0] *= 1 / weight if weight > 0 else 0.0
        same = self._same()
        for kind in self._kinds:
            kind.start.copy_(moved_by(kind.start, kind.moved[0]))
            if same:
                torch._foreach_copy_(kind.flats, kind.starts)
            else:
                self._write(kind, kind.starts)
        if newly_moving or not self._agreed:
            self._agree(take_from_first=newly_moving)
        self._left = self._versions()

    def _agree(self, take_from_first: bool) -> None:
        """Agree on which buffers move: those that any rank's forward has written to so far."""
        known = set(self._moving) if self._agreed else set()
        if self._owners:
            touched = torch.zeros(len(self._owners), dtype=torch.int64, device=self._device)
            touched[list(self._touched)] = 1
            self._group.all_reduce(touched, "max", place="for the list of moving buffers").wait()
            moving = known | self._always | set(touched.nonzero().flatten().tolist())
            self._warn(moving - known)
            if take_from_first:
                for number in sorted(moving - known):
                    self._group.broadcast(
                        self._buffer(number), place="for a buffer that began to move"
                    ).wait()
            self._moving = self._by_dtype(moving)
            self._find()
            self.watched = sorted(set(self.watched) - moving)
        self._agreed = True

    def _warn(self, moving: Collection[int]) -> None:
        """Say what happens to buffers that may be no running means: those of classes that are not
        torch's.
        """
        names = []
        for number in sorted(moving):
            module, _ = self._owners[number]
            if not type(module).__module__.startswith("torch.nn."):
                names.append(repr(self._names[number]))
        if names and self._group.rank == 0:
            warnings.warn(
                f"the forward writes to the buffers {', '.join(names)}. A step moves each by the"
                " weighted mean of its micro-batches' changes. That is right for running means, and"
                " wrong for a queue, its pointer or a codebook: change those after step(), once,"
                " with what lockstep.collectives.all_gather brings together",
                LockstepWarning,
                stacklevel=4,
            )


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(buffer: Tensor) -> Tensor:
    """All elements in one dimension, complex ones as pairs."""
    return real(buffer).detach().reshape(-1)


@lru_cache(maxsize=32)
def _column(values: tuple[float, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return the values as a column. Most steps repeat the weights and slots of the last one."""
    return torch.tensor(values, dtype=dtype)[:, None]


def movement(now: Tensor, before: Tensor) -> Tensor:
    """How far elements have moved. They are subtracted in their own dtype, so that a large counter
    that moves by 1 moves by exactly 1. inf minus inf is no movement.
    """
    if now.dtype in _COUNTABLE:
        now = now.to(_COUNTABLE[now.dtype])
        before = before.to(_COUNTABLE[before.dtype])
    return torch.where(now == before, 0, now - before)


def moved_by(before: Tensor, moved: Tensor) -> Tensor:
    """Return elements after the mean movement `moved`."""
    dtype = before.dtype
    if dtype == torch.bool:
        return (before.to(moved) + moved) >= 0.5
    if not before.is_floating_point():
        moved = moved.round()
    if dtype in _COUNTABLE:
        before = before.to(_COUNTABLE[dtype])
    return (before + moved.to(before.dtype)).to(dtype)


# dtypes that can be stored, and not added or subtracted, with those that replace them
_COUNTABLE = {
    torch.bool: torch.int8,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
for _dtype in vars(torch).values():
    if isinstance(_dtype, torch.dtype) and _dtype.is_floating_point and _dtype.itemsize == 1:
        _COUNTABLE[_dtype] = torch.float32


@torch.no_grad()
def average_buffers(model: nn.Module, group: Group) -> None:
    """Make the buffers equal on all ranks: by the mean for floating-point statistics of BatchNorm's
    family, by rank 0's value for all others.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if isinstance(module, _NormBase) and buffer.is_floating_point():
                group.all_reduce(buffer, "mean", place=f"for buffer {name}").wait()
            else:
                group.broadcast(buffer, place=f"for buffer {name}").wait()


class SharedBuffers:
    """Buffers as torch's wrapper treats them: every forward begins with one rank's buffers on all
    ranks, or with what a hook makes of them.

    They are looked up each time, because a forward may assign another tensor.
    """

    def __init__(self, module: nn.Module, group: Group, ignored: Collection[str]) -> None:
        self._module = module
        self._group = group
        self._ignored = ignored
        self._hook: BufferHook | None = None
        self._state: object = None
        self.after_forward = False
        """Whether a hook runs after the forward, not before it."""
        self._futures: list[torch.futures.Future[Any]] = []

    def named(self) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    def register(self, state: object, hook: BufferHook, *, after_forward: bool) -> None:
        """Run `hook(state, {name: buffer})` instead of the broadcast. It may return futures; the
        end of the backward waits for them.
        """
        self._hook = hook
        self._state = state
        self.after_forward = after_forward

    @torch.no_grad()
    def share(self, root: Callable[[], int]) -> None:
        """Run the hook, or take the buffers of rank `root()`. A collective, unless the module has
        no buffers.
        """
        named = self.named()
        if not named:
            return
        if self._hook is not None:
            self._futures = list(self._hook(self._state, named) or ())
        else:
            self.broadcast(named.values(), root())

    @torch.no_grad()
    def broadcast(self, buffers: Iterable[Tensor], root: int = 0) -> None:
        """Overwrite the buffers with those of rank `root`, in one message. Autograd sees no change:
        no backward reads them.
        """
        if self._group.size == 1:
            return
        strided = [buffer for buffer in buffers if buffer.layout == torch.strided]
        # the largest dtype first, so that all are aligned
        strided.sort(key=Tensor.element_size, reverse=True)
        octets = []
        for buffer in strided:
            octets.append(buffer.detach().contiguous().reshape(-1).view(torch.uint8))
        flat = torch.cat(octets)
        self._group.broadcast(flat, root, place="for the buffers").wait()
        if self._group.rank != root:
            pieces = flat.split([buffer.nbytes for buffer in strided])
            with torch.autograd._unsafe_preserve_version_counter(tuple(strided)):
                for buffer, piece in zip(strided, pieces, strict=True):
                    buffer.detach().copy_(piece.view(buffer.dtype).view(buffer.shape))

    def wait(self) -> None:
        """Wait for the futures that a hook has returned."""
        while self._futures:
            self._futures.pop().wait()


@torch.no_grad()
def replicate(
    module: nn.Module,
    group: Group,
    ignored: Collection[str] = (),
    root: int = 0,
    *,
    buffers: bool = True,
) -> None:
    """Overwrite every parameter and buffer with those of rank `root`. Buffers too: BatchNorm
    statistics are part of the model.
    """
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    if buffers:
        named += module.named_buffers()
    works = []
    for name, tensor in named:
        if name not in ignored:
            works.append(group.broadcast(tensor.detach(), root, f"for {name} to be equal"))
    for work in works:
        work.wait()
