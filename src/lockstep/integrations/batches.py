"""Give a trainer's own loop the batches of a `lockstep.Loader`, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from lockstep.data.iterable.stream_loader import StreamLoader
from lockstep.data.padding import Padding
from lockstep.data.window_loader import WindowLoader
from lockstep.data.windows import Window
from lockstep.errors import UsageError


class RankBatches:
    """This rank's batches; each iteration is one epoch. Its state is the Loader's position.

    All ranks get the same number of batches in a step, because their loops may gather values of
    each. A rank with fewer gets copies with weight 0 (data/padding.py).

    Raises:
        UsageError: a stream that divides itself among the ranks.
    """

    host: ClassVar[str]
    """Name of the framework whose loop iterates over it, for messages."""
    weight = 0.0
    """Weight of the current batch: its number of samples."""
    total = 0.0
    """Weight of all batches of the current step, on all ranks."""
    step = 0
    """The step's number over all epochs, counted from 0."""
    slot = 0
    """The current batch's number in its step. A copy has the number of its original."""
    closes = True
    """Whether the current batch is this rank's last one of its step."""

    def __init__(self, loader: WindowLoader[Any], count: int | None = None) -> None:
        """`count`: the number of batches in a step, where the loop wants a fixed number."""
        if isinstance(loader, StreamLoader) and loader.sharding != "items":
            self.refuse("its data set divides itself among the ranks")
        self.loader: Any = loader
        self._count = count
        self._epoch = 0
        self._ahead = 0
        self._resumes = False
        self._padding = Padding(loader)

    def refuse(self, reason: str) -> NoReturn:
        raise UsageError("trainer-loader", host=self.host, reason=reason)

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        return self.state_dict()["epoch"] if self._resumes else self._epoch - self._ahead

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as the framework counts epochs."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        start = None if self._resumes else epoch
        # The framework may count an epoch that was stopped early as a whole one: `_ahead` corrects
        # its count.
        self._ahead = self._epoch - epoch
        self._epoch += 1
        self._resumes = False
        for window in next(self.loader.epochs(epoch + 1, start)):
            weights, self.total = self.begin(window)
            self.step = window.step
            self._padding.begin(window)
            count = self._count or self._padding.most(window.cut)
            for number in range(count):
                self.weight = 0.0
                if number < len(weights):
                    self._padding.note(window[number], window.slots[number])
                    self.weight = weights[number]
                batch, self.slot = self._padding.copy(window)
                self.closes = number + 1 == count
                yield batch

    def begin(self, window: Window) -> tuple[Sequence[float], float]:
        """Return the weight of each of the window's batches, and their sum over all ranks."""
        loader = self.loader
        return window.counts, sum(window.samples_by_rank(loader.rank, loader.size))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._resumes = True
