"""A script's own signal handlers have a grace period when the launcher is asked to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher.rank import Target
from lockstep.launcher.supervise import Outcome, supervise

# writes ready-RANK, waits for a signal, then for the file "go on", and writes saved-RANK
SCRIPT = """
import os, signal, time
from pathlib import Path

received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
rank = os.environ["RANK"]
Path("ready-" + rank).touch()
while not received or not Path("go on").exists():
    time.sleep(0.01)
Path("saved-" + rank).write_text(received[0])
"""


def stopped(number: signal.Signals, grace: float, *, again: bool = False) -> Outcome:
    """Run SCRIPT on two ranks; send the launcher a signal, and perhaps a second one."""

    def ask() -> None:
        while len(list(Path().glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(0.7)  # longer than the ranks of a failed run have
        if again:
            os.kill(os.getpid(), number)
        else:
            Path("go on").touch()

    Path("script.py").write_text(SCRIPT)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return supervise(Target(script="script.py"), 2, launch=Launch(grace=grace))
    finally:
        asking.join()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_handlers_of_all_ranks_get_the_same_signal_and_the_time_to_save(
    number: signal.Signals, tmp_path: Path
) -> None:
    assert stopped(number, 60.0).exit_code == 128 + number
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [number.name] * 2


@pytest.mark.parametrize(("grace", "again"), [(60.0, True), (0.2, False)])
def test_a_second_signal_and_the_end_of_the_grace_period_end_the_ranks(
    grace: float, again: bool, tmp_path: Path
) -> None:
    assert stopped(signal.SIGTERM, grace, again=again).exit_code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("saved-*"))
