"""What a launcher asks itself twenty times a second while ranks run: must they stop, do they get
on, was it memory that killed one?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.launching import OnStall
from lockstep.errors import ExitCode
from lockstep.launcher import processes, stalls
from lockstep.launcher.ending import Endings
from lockstep.launcher.failures import Failure
from lockstep.launcher.stalls import Stall, Watcher
from lockstep.launcher.stopping import Stop, say
from lockstep.runtime import status

if TYPE_CHECKING:
    from lockstep.launcher.ray.stalled import Asked

TIMEOUT = "LOCKSTEP_TIMEOUT"
"""Environment variable: seconds that a collective may take, where `init` is not told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stalls:
    """What is done about ranks that do not get on: values that `config.launching.Launch` has
    checked.
    """

    then: OnStall = "abort"
    """wait: it is said, and nothing done; abort: the run ends with exit code 76; restart: as
    after a kill.
    """
    after: float = stalls.FLOOR
    """Seconds without any change, at least; more where the run has shown that it needs more."""


def timeout_for_ranks(seconds: float | None) -> dict[str, str]:
    """What has `lockstep.init()` allow a collective so many seconds."""
    if seconds is None:
        return {}
    return {TIMEOUT: str(seconds)}


class Watch:
    """Of one generation, whose ranks leave their pages and records in `directory`."""

    def __init__(
        self, directory: Path, stop: Stop, stalls: Stalls, elsewhere: Asked | None = None
    ) -> None:
        """`elsewhere`: the other hosts, whose ranks these might be waiting for."""
        self.directory = directory
        self.stop = stop
        self._stalls = stalls
        self._elsewhere = elsewhere
        self._watcher = Watcher(directory, stalls.after, elsewhere=elsewhere)
        self._endings = Endings(directory)
        self._oom_kills = processes.oom_kills()
        self.failure: Failure | None = None
        """A rank that was waited for, once the ranks are to be ended because of it."""

    def must_end(self, pids: Mapping[int, int]) -> bool:
        """Whether the ranks, of which `pids` live, are to be ended now."""
        if self.stop.now(self.directory, pids):
            return True
        for text in self._endings.look(pids):
            say(text)
        stall = self._watcher.look(pids)
        if self._elsewhere is not None:
            stall = self._elsewhere.verdict()
        if stall is not None:
            if self._stalls.then != "wait":
                if stall.rank not in pids and self._elsewhere is not None:
                    return False  # its own host ends the run
                self.failure = _failure(stall, pids)
                return True
            say("\n".join(part for part in (stall.stack, stall.message) if part))
        if (slow := self._watcher.slow(pids)) is not None:
            say(slow)
        return False

    def explained(self, failure: Failure) -> Failure:
        """With what the rank was doing last, and whether the kernel has killed for memory."""
        view = status.read(status.file_of(self.directory, failure.rank))
        doing = (
            ""
            if view is None or not view.step
            else f"at step {view.step}, {stalls.DOING[view.phase]}"
        )
        killed = processes.oom_kills() - self._oom_kills if failure.code == 128 + 9 else 0
        return replace(
            failure,
            doing=doing,
            note=(
                f"cgroup oom_kill +{killed}: the host's memory ran out"
                if killed > 0
                else failure.note
            ),
        )


def _failure(stall: Stall, pids: Mapping[int, int]) -> Failure:
    return Failure(
        rank=stall.rank,
        kind="stall",
        message=stall.message,
        code=ExitCode.HANG,
        pid=pids.get(stall.rank, 0),
        traceback=stall.stack,
    )
