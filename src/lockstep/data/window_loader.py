"""The base class of Loader and StreamLoader: rank and size, torch's DataLoader, one walk at a time.
It also reads saved positions in the data, and has the words for slots that are assigned to the ranks
while they train, in place of fixed shares: what a parameter server says to a Loader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lockstep.config.knob import whole
from lockstep.config.left_out import LeftOut
from lockstep.data.device import Copies, copies_to
from lockstep.data.keyed import Sent
from lockstep.data.walk import KeysSampler, Turns, Walk, end_workers
from lockstep.errors import UsageError
from lockstep.runtime.environment import rank_and_size

AnyEpoch = TypeVar("AnyEpoch")


class Position(NamedTuple):  # a NamedTuple, because one is made in every step
    """A position in the data: the first step that is not done."""

    epoch: int
    step_in_epoch: int


class EpochCourse(NamedTuple):
    """One epoch, as a rank describes it to whoever assigns slots dynamically. Every rank walks the
    same epochs, but the number of windows may differ between ranks.
    """

    epoch: int
    first: int
    """The number of the epoch's first step, over all epochs."""
    begin: int
    """The index in the epoch of the first step that this run does."""
    steps: int
    slots: int
    """Micro-batches of a step."""
    last: int
    """Micro-batches of the epoch's last step."""


class DynamicSlots(NamedTuple):
    """The next work of this rank: slots [first, last) of a window, by its index in the epoch. If
    there are none, all ranks synchronize instead: all windows before this one are done.
    """

    window: int
    first: int
    last: int
    over: bool = False
    """Whether the epoch is over."""
    stop: bool = False
    """Whether a rank asked to stop."""


class WindowLoader(ABC, Generic[AnyEpoch]):
    """A loader that yields epochs, which yield windows."""

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
        self.rank, self.size = _rank_and_size_of(rank, size)
        self._seed = whole("seed", seed, -(2**63))
        self.device = _default_device() if device is None else torch.device(device)
        self._pinned = self.device.type == "cuda" if pin_memory is None else pin_memory
        self._loaded = False  # whether a state was loaded and no window has been yielded since
        self.left_out = LeftOut()
        """Steps whose samples are not loaded, unless their window is iterated. A stream loads them."""
        self._turns = Turns()
        self._keys = KeysSampler()
        # made when the first walk begins, because making a CUDA stream initialises the GPU
        self._copies: Copies | None = None

    def _open(self, source: Dataset[Any], workers: int, ahead: int | None) -> None:
        """Make torch's DataLoader, whose workers each fetch `ahead` batches ahead."""
        self._loader = DataLoader(
            source,
            # any object may be a batch's indices: DataLoader passes it to __getitems__
            batch_sampler=self._keys,  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=Sent,
            pin_memory=self._pinned,
            persistent_workers=workers > 0,
            prefetch_factor=ahead,
            # its own generator, so that starting an epoch does not change the caller's random state
            generator=torch.Generator(),
        )

    @property
    def num_workers(self) -> int:
        """Processes that load for this rank."""
        return self._loader.num_workers

    def _to_device(self) -> Copies:
        if self._copies is None:
            self._copies = copies_to(self.device, pinned=self._pinned)
        return self._copies

    def _walk(self, epoch: int, keys: Callable[[], Iterator[Any]], copies: Copies) -> Walk:
        """Start a walk that fetches the micro-batches of these keys; any other walk ends."""
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
        """Iterate over epochs start, start + 1, ..., count - 1, each in its own order. One epoch is
        walked at a time: starting another one ends it.

        The length of a stream's epoch is not known before its end; its steps are counted as they
        are walked.

        Args:
            count: the number of epochs of the whole training.
            start: the first epoch. Default: 0; after `load_state_dict` the epoch and step where
                that state was taken.
        """
        whole("count", count, 0)
        if start is not None:
            start = whole("start", start, 0)
        return self._epochs(count, start)

    @abstractmethod
    def _epochs(self, count: int, start: int | None) -> Iterator[AnyEpoch]:
        """Iterate over epochs from `start` on; None: from a loaded position, else from 0."""

    def close(self) -> None:
        """End the workers now, not when the loader is garbage-collected. Batches not yet fetched
        are lost. A later epoch starts new workers.
        """
        self._turns.next()
        end_workers(self._loader)


def read_state(
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    digest: Callable[[int], Mapping[str, str]],
) -> tuple[Position, int]:
    """Return the position in a loader's state, and the step's number over all epochs.

    `fingerprint` is this loader's. `digest` returns the digest of an epoch's samples if a sampler
    of another library orders them. Raises UsageError, naming what differs.
    """
    keys = {"epoch", "step_in_epoch", "step", "fingerprint"}
    if not isinstance(state, Mapping) or not keys <= state.keys():
        raise UsageError("not-a-loader-state")
    epoch = whole("epoch", state["epoch"], 0)
    step_in_epoch = whole("step_in_epoch", state["step_in_epoch"], 0)
    step = whole("step", state["step"], step_in_epoch)
    walked = epoch if step_in_epoch else epoch - 1
    if walked >= 0:
        fingerprint = {**fingerprint, **digest(walked)}
    saved = state["fingerprint"]
    differences = []
    for name in dict.fromkeys([*fingerprint, *saved]):
        before = saved.get(name)
        now = fingerprint.get(name)
        if before != now:
            differences.append(f"{name} was {_shown(before)} and is {_shown(now)}")
    if differences:
        raise UsageError("another-training", place="the state", differences="; ".join(differences))
    return Position(epoch, step_in_epoch), step


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _rank_and_size_of(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return (rank, size) as given, else the process group's."""
    if rank is None and size is None:
        return rank_and_size()
    if rank is None or size is None:
        raise UsageError("rank-or-size-missing", rank=rank, size=size)
    rank = whole("rank", rank, 0)
    size = whole("size", size)
    if rank >= size:
        raise UsageError("no-such-rank", rank=rank, name="size", size=size)
    return rank, size


def _default_device() -> torch.device:
    """Return this rank's device: the current GPU, or the CPU if the backend is not NCCL."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
