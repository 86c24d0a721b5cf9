"""Stalls: who is blamed, with which words, after how long, and who is not."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher import processes
from lockstep.launcher.rank import Target
from lockstep.launcher.stalls import Sight, Slowness, Watcher, explain, suspects
from lockstep.launcher.supervise import supervise
from lockstep.runtime import status
from lockstep.runtime.environment import timeout_for_ranks
from lockstep.runtime.status import View
from lockstep.runtime.step_clock import PHASES
from tests.refused import refused

SECOND = 10**9


def view(
    phase: str = "reduce",
    number: int = 7,
    waits: bool = False,
    step: int = 5,
    texts: dict[int, str] | None = None,
    **more: Any,
) -> View:
    values: dict[str, Any] = {
        "ticks": 1,
        "since_ns": time.monotonic_ns(),
        "waited_ns": 0,
        "totals_ns": dict.fromkeys(PHASES, 0),
    }
    return View(
        phase=phase,
        number=number,
        waits=waits,
        step=step,
        collectives=texts or {},
        **{**values, **more},
    )


def sight(state: str = "S", where: str = "", **more: Any) -> Sight:
    return Sight(100, view(**more), state, where)


BUCKET = "all_reduce sum f32[9] for gradient bucket 3 (layer4.weight and 1 more)"


def said(*sights: Sight) -> str:
    found = explain(dict(enumerate(sights)), 31)
    assert found is not None
    return found.message


def test_the_one_that_never_came_is_named_with_its_phase_and_line() -> None:
    waiting = {"waits": True, "number": 8, "texts": {7: "x", 8: BUCKET}}
    assert (
        said(
            sight(**waiting),
            sight(phase="data", where="dataset.py:88 read_shard"),
            sight(**waiting),
        )
        == f"STALL 31 s: ranks 0 and 2 wait in #8 ({BUCKET}), step 5. Rank 1 never issued it: in"
        " data, dataset.py:88 read_shard, for 31 s."
    )


def test_the_first_missing_is_the_smallest_number_and_one() -> None:
    """Rank 0 has run ahead, with buckets that leave early; rank 3 is not even where rank 2 is."""
    texts = {number: f"op {number}" for number in range(1, 12)}
    sights = [
        sight(waits=True, number=11, texts=texts),
        sight(waits=True, number=9, texts=texts),
        sight(phase="backward", number=8, texts=texts),
        sight(phase="forward", number=6, texts=texts),
    ]
    assert suspects(dict(enumerate(sights))) == [3]
    assert "ranks 0 and 1 wait in #7 (op 7), step 5. Rank 3 never issued it: in forward" in said(
        *sights
    )


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_its_words(phase: str) -> None:
    words = r"(starting|in |between steps|at the end of its program)"
    assert re.search(
        rf"Rank 1 is in the middle of it: {words}",
        said(sight(waits=True, number=8), sight(phase=phase)),
    )
    _, text = slowness((6, 0.1, 5), {"data": 1, "forward": 1, phase: 7})
    assert re.search(rf"spends \d+ % of its own time {words}", text or "")


def test_a_stopped_rank_is_said_to_be_stopped_wherever_it_stands() -> None:
    text = said(
        sight(waits=True, number=8, texts={8: "y"}),
        sight(state="stopped", phase="reduce", waits=True, number=7),
    )
    assert text.endswith(
        "Rank 1 never issued it: stopped (SIGSTOP or a debugger), in reduce, for 31 s."
    )
    assert "Rank 0" not in text


def test_all_that_do_not_wait_are_named() -> None:
    text = said(
        sight(waits=True, number=8, texts={8: "y"}), sight(phase="checkpoint"), sight(phase="data")
    )
    assert (
        "Rank 1 never issued it: in a checkpoint, for 31 s. Rank 2 never issued it: in data, for"
        " 31 s." in text
    )


def test_in_the_middle_of_a_collective_that_all_have_issued() -> None:
    text = said(
        sight(waits=True, number=8, texts={8: "y"}), sight(number=8, phase="reduce", texts={8: "y"})
    )
    assert "rank 0 waits in #8 (y), step 5. Rank 1 is in the middle of it: in reduce" in text


def test_nobody_is_blamed_where_all_wait() -> None:
    text = said(*[sight(waits=True, number=8, texts={8: "y"})] * 2)
    assert (
        text == "STALL 31 s: all ranks of this host wait in #8 (y), step 5: for other hosts, or the"
        " network."
    )


def test_a_rank_whose_program_is_over_is_blamed_only_where_somebody_waits() -> None:
    over, computes = sight(phase="end", number=7), sight(phase="forward", number=7)
    assert suspects({0: over, 1: computes}) == [1]
    assert "Rank 0 never issued it: at the end of its program" in said(
        over, sight(waits=True, number=8, texts={8: "y"})
    )


def test_who_waits_for_messages_waits_in_no_collective() -> None:
    waiting = {"waits": True, "messages": True, "number": 8, "texts": {8: "a replica check"}}
    assert (
        said(sight(**waiting), sight(**waiting), sight(state="stopped", phase="forward", number=8))
        == "STALL 31 s: ranks 0 and 1 wait for messages of other ranks, step 5. "
        "Rank 2 does not answer: stopped (SIGSTOP or a debugger), in forward, for 31 s."
    )
    assert (
        said(sight(**waiting))
        == "STALL 31 s: all ranks of this host wait for messages of other ranks, step 5: for other"
        " hosts, or the network."
    )


def test_one_rank_alone() -> None:
    assert (
        said(sight(phase="forward", where="model.py:3 forward", number=0))
        == "STALL 31 s: no rank makes progress, step 5. Rank 0 is in forward, model.py:3 forward, for"
        " 31 s."
    )
    assert explain({}, 31) is None


# -- when ----------------------------------------------------------------------------------------


class Run:
    """Pages of two ranks, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 0.0
        self.pages = [status.Page(status.file_of(folder, rank)) for rank in (0, 1)]
        self.watcher = Watcher(folder, 10, lambda: self.now)
        self.pids = {0: os.getpid(), 1: os.getpid()}

    def steps(self, number: int) -> None:
        for page in self.pages:
            page.step(number)
            page.enter(PHASES.index("forward"), time.monotonic_ns())

    def after(self, seconds: float) -> str | None:
        """What is said when so much time has passed, looked at in between."""
        end, found = self.now + seconds, None
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            found = self.watcher.look(self.pids) or found
        return None if found is None else found.message


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: "")
    return Run(tmp_path)


def test_a_stall_is_said_once_after_the_quiet_time_and_again_after_another(pages: Run) -> None:
    pages.steps(5)
    assert pages.after(9.5) is None
    assert "no rank makes progress, step 5" in str(pages.after(2))
    assert pages.after(1000) is None
    pages.steps(6)
    assert pages.after(9) is None
    assert "step 6" in str(pages.after(2))


def test_the_first_step_may_take_ten_times_as_long(pages: Run) -> None:
    pages.steps(1)
    assert pages.after(99) is None
    assert pages.after(3) is not None


def test_quiet_times_that_were_none_are_learnt_from(pages: Run) -> None:
    pages.steps(5)
    assert pages.after(8) is None
    pages.steps(6)
    assert pages.after(36) is None
    assert pages.after(5) is not None, "five times eight seconds"


def test_a_checkpoint_of_all_may_take_ten_times_as_long(pages: Run) -> None:
    pages.steps(5)
    for page in pages.pages:
        page.enter(PHASES.index("checkpoint"), time.monotonic_ns())
    assert pages.after(99) is None
    assert pages.after(3) is not None


@pytest.mark.parametrize("step", [0, 5])
def test_the_users_own_code_may_take_as_long_as_it_likes_where_nobody_waits(
    pages: Run, step: int
) -> None:
    for page in pages.pages:
        page.step(step)
        page.enter(PHASES.index("loop"), time.monotonic_ns())
    assert pages.after(5000) is None
    for page in pages.pages:
        page.step(max(step, 2))
    pages.pages[1].waits(True, time.monotonic_ns())
    assert pages.after(9) is None
    assert pages.after(3) is not None, "and not, where somebody does"


def test_a_rank_that_is_stopped_in_its_users_code_is_named_where_nobody_waits(
    pages: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is before the world opens: the others' wait for it is not on their pages."""
    pages.pids[1] = 0
    monkeypatch.setattr(processes, "state", lambda pid: "S" if pid else processes.STOPPED)
    assert pages.after(99) is None
    assert "Rank 1 is stopped (SIGSTOP" in str(pages.after(3))


def test_one_page_that_changes_is_no_stall(pages: Run) -> None:
    pages.steps(5)
    for _ in range(20):
        pages.pages[1].collective(3, "x")
        assert pages.after(5) is None


def test_ranks_without_a_page_are_left_alone(tmp_path: Path) -> None:
    now = [0.0]
    watcher = Watcher(tmp_path, 1, lambda: now[0])
    for _ in range(10):
        now[0] += 100
        assert watcher.look({0: 1, 1: 2}) is None
        assert watcher.slow({0: 1, 1: 2}) is None


# -- slow ----------------------------------------------------------------------------------------


def slowness(
    waited: tuple[float, ...], spent: dict[str, int], step: int = 5
) -> tuple[Slowness, str | None]:
    """What is said after ten seconds, of which each rank has waited for so many."""
    found = Slowness(10)
    assert found.look({rank: view(step=step) for rank in range(len(waited))}, 0) is None
    totals = {**dict.fromkeys(PHASES, 0), **spent}
    views = {
        rank: view(step=step + 9, waited_ns=int(each * SECOND), totals_ns=totals)
        for rank, each in enumerate(waited)
    }
    return found, found.look(views, 10)


def test_a_slow_rank_is_said_to_be_slow_and_alive_once() -> None:
    found, text = slowness((6, 0.1, 5), {"data": 7, "forward": 3})
    assert (
        text
        == "SLOW: ranks 0 and 2 wait 55 % of the time for rank 1, which is alive and spends 70 % of"
        " its own time in data. This warning appears once."
    )
    views = {
        rank: view(step=30, waited_ns=int(each * SECOND)) for rank, each in enumerate((15, 0.2, 15))
    }
    assert found.look(views, 20) is None


@pytest.mark.parametrize(
    "waited", [(2.0, 0.1, 5.0), (6.0, 1.5, 5.0), (0.1, 0.1, 6.0), (0.0, 0.0, 0.0)]
)
def test_nobody_is_slow_where_the_others_do_not_all_wait_for_one(waited: tuple[float, ...]) -> None:
    assert slowness(waited, {})[1] is None


def test_what_starting_took_is_nobodys_fault() -> None:
    assert slowness((6, 0.1), {}, step=1)[1] is None


# -- for real ------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch, lockstep
from lockstep.testing import hang_at, hold_gil_at, slow_at, stop_at

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if index == int(sys.argv[1]):
            never_ends()
        return torch.ones(3)

def never_ends():
    while True:
        pass

with lockstep.init() as world:
    {fault}
    model = torch.nn.Linear(3, 1)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = lockstep.Loader(Data(), global_batch=4, micro_batch=2, shuffle=False, num_workers={workers})
    for epoch in loader.epochs(1):
        for window in epoch:
            for x in stepper.micro_batches(window):
                stepper.backward(model(x).sum(), weight=len(x))
            stepper.step()
            if stepper.steps == {stop}:
                break
"""


@pytest.fixture
def hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Exit code and the lines of stderr of a run that stops to get on."""

    def run(
        fault: str = "", sample: int = -1, workers: int = 0, stop: int = 0, **stalls: Any
    ) -> tuple[int, list[str]]:
        (tmp_path / "script.py").write_text(
            SCRIPT.format(fault=fault or "pass", workers=workers, stop=stop)
        )
        monkeypatch.chdir(tmp_path)
        outcome = supervise(
            Target(script="script.py", args=[str(sample)]),
            2,
            launch=Launch(**{"stall_after": 2, **stalls}),
        )
        out, err = capfd.readouterr()
        assert out == ""
        return outcome.exit_code, err.splitlines()

    return run


def test_a_stuck_loader_worker_is_found_with_its_line(
    hung: Callable[..., tuple[int, list[str]]],
) -> None:
    """Sample 26 belongs to rank 1's micro-batch of step 7."""
    code, lines = hung(sample=26, workers=1)
    assert code == 76
    found = re.fullmatch(
        r"STALL \d+ s: rank 0 waits in #\d+ \(.*\), step \d. "
        r"Rank 1 never issued it: in data, script.py:\d+ never_ends \(loader worker, pid \d+\), for"
        r" \d+ s\.( Its log: .*)?",
        lines[-1],
    )
    assert found, lines
    assert lines[-3].endswith("in never_ends")
    assert lines[-2].strip() in ("while True:", "pass")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("stop_at(1, 4, 'backward')", r"stopped \(SIGSTOP or a debugger\), in backward"),
        ("hold_gil_at(1, 4, 'forward')", r"in forward, script.py:\d+ <module>"),
        ("hang_at(0, 4, 'optimizer', busy=True)", r"in the optimizer, script.py:\d+ <module>"),
    ],
)
def test_a_rank_that_cannot_answer_is_found_too(
    hung: Callable[..., tuple[int, list[str]]], fault: str, what: str
) -> None:
    code, lines = hung(fault)
    assert code == 76
    assert re.search(
        rf"Rank {fault.partition('(')[2][0]} (never issued it|is in the middle of it): {what}, for"
        r" \d+ s\.( Its log: .*)?$",
        lines[-1],
    ), lines


def test_waiting_on_is_possible_and_a_slow_rank_is_none_that_hangs(
    hung: Callable[..., tuple[int, list[str]]],
) -> None:
    code, lines = hung("slow_at(1, 3, 'forward', 0.3)", stop=30, stall_after=3)
    assert code == 0
    assert len(lines) == 1, lines
    assert re.match(
        r"SLOW: rank 0 waits \d+ % of the time for rank 1, which is alive and spends \d+ % of its own time in forward",
        lines[0],
    )
    code, lines = hung("slow_at(1, 4, 'forward', 12)", stop=4, stall_after=2, on_stall="wait")
    assert code == 0
    assert any(
        line.startswith("STALL") and "Rank 1 never issued it: in forward" in line for line in lines
    ), lines


PLAIN = """
import time
import torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo")
lockstep.collectives.all_reduce(torch.ones(3), algorithm="{algorithm}")
if dist.get_rank() == 1:
    time.sleep(1000)
lockstep.collectives.all_reduce(torch.ones(4), algorithm="{algorithm}")
"""


@pytest.mark.parametrize("algorithm", ["native", "ring", "central"])
def test_who_does_not_come_to_our_collectives_is_named_also_in_a_process_group_of_the_scripts_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    algorithm: str,
) -> None:
    (tmp_path / "script.py").write_text(PLAIN.format(algorithm=algorithm))
    monkeypatch.chdir(tmp_path)
    assert supervise(Target(script="script.py"), 2, launch=Launch(stall_after=0.3)).exit_code == 76
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.search(
        r"rank 0 waits in #2 \(all_reduce sum.* f32\[4\] at script.py:8\)\. Rank 1 never"
        r" issued it: .*script.py:7 <module>",
        last,
    )


def test_values_that_cannot_work_are_refused() -> None:
    with refused(
        "unknown-choice", name="on_stall", value="panic", choices=["wait", "abort", "restart"]
    ):
        Launch(on_stall="panic")  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan")):
        with refused("wrong-value", name="stall_after", value=seconds):
            Launch(stall_after=seconds)
        with refused("wrong-value", name="timeout", value=seconds):
            Launch(timeout=seconds)
    assert timeout_for_ranks(None) == {}
    assert timeout_for_ranks(5) == {"LOCKSTEP_TIMEOUT": "5"}
