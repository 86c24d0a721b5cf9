"""The launcher's side of a fork server: what becomes of it where a caller is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.launcher.seat import Seat
from lockstep.launcher.server import Answer, ServerGone, server


class Interrupting(Sequence[int]):
    """Descriptors that are looked at once the request has been sent: there the user presses
    Ctrl-C.
    """

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        raise KeyboardInterrupt

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        raise KeyboardInterrupt


def test_a_process_with_the_number_of_an_earlier_one_has_not_ended() -> None:
    """Numbers come again within minutes where many processes are started, as a test suite does."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root can choose the next process's number")
    forking = server(cold=False)
    while True:  # another program may take the number first
        earlier = forking.fork(Seat(work=Answer(_nothing)), (0, 1, 2, 2))
        while forking.code(earlier) is None:
            forking.wait(0.1)
        forking.release(earlier)
        forking.ready()  # it has been reaped
        last.write_text(str(earlier - 1))
        later = forking.fork(Seat(work=signal.pause))
        found = forking.code(later)
        os.kill(later, signal.SIGKILL)
        forking.release(later)
        if later == earlier:
            break
    assert found is None


def _nothing(descriptor: int) -> None:
    pass


def test_an_interrupted_request_ends_the_server_and_the_next_call_has_another_one() -> None:
    """Else the next request would get the answer to this one."""
    first = server(cold=True)
    with pytest.raises(KeyboardInterrupt):
        first.fork(Seat(work=print), Interrupting())
    assert not first.alive
    with pytest.raises(ServerGone):
        first.code(1)
    second = server(cold=True)
    assert second is not first
    assert second.alive
    second.close()
