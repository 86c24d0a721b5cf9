"""What a Loader and a StreamLoader share: their place among the ranks, torch's DataLoader, one walk
at a time, and where the training stands in its data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep.config.knob import whole
from lockstep.data.device import Copies, copies_to
from lockstep.data.handover import Sent
from lockstep.data.walk import KeysSampler, Turns, Walk, end_workers
from lockstep.errors import UsageError
from lockstep.runtime.environment import rank_and_size

AnyEpoch = TypeVar("AnyEpoch")


class Position(NamedTuple):  # made in every step
    """The first step that is not done."""

    epoch: int
    place: int
    """Its number in its epoch."""


class WindowLoader(ABC, Generic[AnyEpoch]):
    """A loader that is walked by epochs and windows."""

    depends_on_world_size: bool
    _loader: DataLoader[Any]

    def __init__(
        self,
        rank: int | None,
        size: int | None,
        seed: int,
        device: torch.device | str | None,
        pin_memory: bool | None,
    ) -> None:
        self.rank, self.size = _place_of(rank, size)
        self._seed = whole("seed", seed, -(2**63))
        self.device = torch.device(device) if device is not None else _default_device()
        self._pinned = self.device.type == "cuda" if pin_memory is None else pin_memory
        self._loaded = False  # a state, and nothing was walked since
        self._turns = Turns()
        self._keys = KeysSampler()
        # made when the first walk begins: a stream takes its GPU
        self._copies: Copies | None = None

    def _open(self, source: Dataset[Any], workers: int, ahead: int | None) -> None:
        """Make torch's DataLoader, whose workers each fetch `ahead` batches ahead."""
        self._loader = DataLoader(
            source,
            batch_sampler=self._keys,  # type: ignore[arg-type]  # any object may stand for a batch's indices: __getitems__ gets it
            num_workers=workers,
            collate_fn=Sent,
            pin_memory=self._pinned,
            persistent_workers=workers > 0,
            prefetch_factor=ahead,
            # its own: starting an epoch does not touch the caller's random state
            generator=torch.Generator(),
        )

    def _to_device(self) -> Copies:
        if self._copies is None:
            self._copies = copies_to(self.device, pinned=self._pinned)
        return self._copies

    def _walk(self, epoch: int, keys: Callable[[], Iterator[Any]], copies: Copies) -> Walk:
        """Begin to fetch the micro-batches of these keys; any other walk ends."""
        return Walk(
            self._loader, self._keys, keys, copies, self._turns, epoch=epoch, rank=self.rank
        )

    def _described(self, line: str) -> str:
        if self.depends_on_world_size:
            line += " (this recipe depends on the world size)"
        return line

    def __iter__(self) -> Iterator[Any]:
        raise UsageError("loader-iterated", loader=type(self).__name__)

    def epochs(self, count: int, start: int | None = None) -> Iterator[AnyEpoch]:
        """Epochs start, start + 1, ..., count - 1, each in its own order. One is walked at a time:
        the next one ends it.

        The length of a stream's epoch is not known before its end; its steps are counted as they
        are walked.

        Args:
            count: the number of epochs of the whole training.
            start: the first one. Default: 0; after `load_state_dict` the epoch, and the step in it,
                where that state was taken.
        """
        whole("count", count, 0)
        return self._epochs(count, start if start is None else whole("start", start, 0))

    @abstractmethod
    def _epochs(self, count: int, start: int | None) -> Iterator[AnyEpoch]:
        """Those from `start` on; None: from the position."""

    def close(self) -> None:
        """End the workers now, not when the loader is collected; what was not fetched is lost. A
        later epoch starts new ones.
        """
        self._turns.next()
        end_workers(self._loader)


def read_state(
    state: Mapping[str, Any], ours: Mapping[str, Any], digest: Callable[[int], Mapping[str, str]]
) -> tuple[Position, int]:
    """The position and the step's number over all epochs in a loader's state.

    `ours` is this loader's fingerprint, `digest` gives a foreign sampler's of an epoch. Raises
    UsageError naming what differs.
    """
    if (
        not isinstance(state, Mapping)
        or not {"epoch", "step_in_epoch", "step", "fingerprint"} <= state.keys()
    ):
        raise UsageError("not-a-loader-state")
    position = Position(
        whole("epoch", state["epoch"], 0), whole("step_in_epoch", state["step_in_epoch"], 0)
    )
    step = whole("step", state["step"], position.place)
    walked = position.epoch if position.place else position.epoch - 1
    ours = {**ours, **(digest(walked) if walked >= 0 else {})}
    theirs = state["fingerprint"]
    differing = [
        f"{name} was {_shown(theirs.get(name))} and is {_shown(ours.get(name))}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise UsageError("state-of-other-training", difference="; ".join(differing))
    return position, step


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _place_of(rank: int | None, size: int | None) -> tuple[int, int]:
    """(rank, size) as given, else the process group's."""
    if rank is None and size is None:
        return rank_and_size()
    if rank is None or size is None:
        raise UsageError("rank-or-size-missing", rank=rank, size=size)
    rank, size = whole("rank", rank, 0), whole("size", size)
    if rank >= size:
        raise UsageError("no-such-rank", rank=rank, name="size", size=size)
    return rank, size


def _default_device() -> torch.device:
    """This rank's: the current GPU, unless ranks talk over a backend for CPUs."""
    ours = torch.cuda.is_available() and (
        not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "nccl"
    )
    return torch.device("cuda", torch.cuda.current_device()) if ours else torch.device("cpu")
