"""Stalls: who is blamed, with which words, after how long, and who is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher.stall_report import RankSnapshot, explain, suspects
from lockstep.launcher.stalls import Slowness, Watcher
from lockstep.runtime import processes, status
from lockstep.runtime.environment import timeout_for_ranks
from lockstep.runtime.step_clock import PHASES
from tests import pages as other_pages
from tests.launcher.conftest import Run
from tests.launcher.sights import SECOND, Pages, plain, said, sight, view
from tests.refused import refused

# -- who -----------------------------------------------------------------------------------------

W = sight(waits=True, number=8, texts={7: "x", 8: "y"})
MESSAGES = sight(waits=True, messages=True, number=8, texts={8: "a replica check"})
STOPPED = sight(state="stopped", phase="forward", number=8)
BARRIER = plain("barrier at a.py:3", 3)
EXPLAINED: dict[str, tuple[list[RankSnapshot], str]] = {
    "the one that never came": (
        [W, sight(phase="data", where="dataset.py:88 read_shard"), W],
        "ranks 0 and 2 wait in #8 (y), step 5. Rank 1 never issued it: in data, dataset.py:88 read_shard, for 31 s.",
    ),
    "all that do not wait": (
        [W, sight(phase="checkpoint"), sight(phase="data")],
        "rank 0 waits in #8 (y), step 5. Rank 1 never issued it: in a checkpoint, for 31 s."
        " Rank 2 never issued it: in data, for 31 s.",
    ),
    "one that is stopped, wherever it stands": (
        [W, sight(state="stopped", waits=True)],
        "rank 0 waits in #8 (y), step 5. Rank 1 never issued it: stopped (SIGSTOP or a debugger), in reduce, for 31 s.",
    ),
    "in the middle of what all have issued": (
        [W, sight(number=8, texts={8: "y"})],
        "rank 0 waits in #8 (y), step 5. Rank 1 is in the middle of it: in reduce, for 31 s.",
    ),
    "nobody, where all wait": (
        [W, W],
        "all ranks of this host wait in #8 (y), step 5: for other hosts, or the network.",
    ),
    "one whose program is over": (
        [sight(phase="end"), W],
        "rank 1 waits in #8 (y), step 5. Rank 0 never issued it: at the end of its program, for 31 s.",
    ),
    "who waits for messages waits in no collective": (
        [MESSAGES, MESSAGES, STOPPED],
        "ranks 0 and 1 wait for messages of other ranks, step 5. Rank 2 does not answer:"
        " stopped (SIGSTOP or a debugger), in forward, for 31 s.",
    ),
    "for messages alone": (
        [MESSAGES],
        "all ranks of this host wait for messages of other ranks, step 5: for other hosts, or the network.",
    ),
    "an asynchronous server: one asks it, another is at a meeting already": (
        [MESSAGES, sight(waits=True, number=9, texts={8: "a replica check", 9: "facts"}), STOPPED],
        "rank 1 waits in #9 (facts), rank 0 waits for messages of other ranks, step 5."
        " Rank 2 never issued it: stopped (SIGSTOP or a debugger), in forward, for 31 s.",
    ),
    "one rank alone": (
        [sight(phase="forward", where="model.py:3 forward", number=0)],
        "no rank makes progress, step 5. Rank 0 is in forward, model.py:3 forward, for 31 s.",
    ),
    "a plain script: all wait in the same": (
        [BARRIER, BARRIER],
        "all ranks of this host wait in #3 (barrier at a.py:3): for other hosts, or the network.",
    ),
}


def test_who_is_named_and_with_which_words() -> None:
    for case, (sights, message) in EXPLAINED.items():
        assert said(*sights) == message, case


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
    assert said(*sights).startswith(
        "ranks 0 and 1 wait in #7 (op 7), step 5. Rank 3 never issued it: in forward"
    )


def test_who_is_suspected_before_others() -> None:
    """One that computes before one that is over; one that is stopped before one that runs."""
    assert suspects({0: sight(phase="end"), 1: sight(phase="forward")}) == [1]
    stopped = plain(number=2, state="stopped")
    assert suspects({0: BARRIER, 1: plain(number=2), 2: stopped}) == [2]
    assert "Rank 1 is in the middle" in said(BARRIER, plain("sum at a.py:5", 3, state="stopped"))


def test_who_is_in_no_group_that_waits_is_not_waited_for() -> None:
    sights = [plain("all_reduce f32[1] of ranks 0 and 2", among=(0, 2)), plain(), plain()]
    assert suspects(dict(enumerate(sights))) == [2]
    text = said(*sights)
    assert text.startswith(
        "rank 0 waits in all_reduce f32[1] of ranks 0 and 2. Rank 2 is not there"
    )
    assert "Rank 1" not in text


def test_the_first_that_differs_is_told_whatever_the_ranks_are_in_now() -> None:
    texts = {1: "barrier at a.py:1", 2: "all_reduce f32[3] at a.py:2", 3: "barrier at a.py:3"}
    other = {1: "barrier at a.py:7", 2: "all_reduce f32[4] at a.py:8"}
    ahead, behind = plain(texts[3], 3, texts=texts), plain(other[2], 2, texts=other)
    assert said(ahead, behind, behind) == (
        "the ranks wait for each other: #2 is not the same. It is in rank 0 all_reduce f32[3] at a.py:2;"
        " in ranks 1 and 2 all_reduce f32[4] at a.py:8. Rank 0 waits in #3 (barrier at a.py:3) now."
    )
    stall = explain({0: behind, 1: ahead}, 31)
    assert stall is not None
    assert stall.rank == 0


# -- when ----------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(tmp_path, monkeypatch)


def test_a_stall_is_said_once_after_the_quiet_time_and_again_after_another(pages: Pages) -> None:
    pages.at(5)
    assert pages.after(9.5) is None
    assert "no rank makes progress, step 5" in pages.stall(2).message
    assert pages.after(500) is None
    pages.at(6)
    assert pages.after(9) is None
    assert "step 6" in pages.stall(2).message


@pytest.mark.parametrize(("step", "phase"), [(1, "forward"), (5, "checkpoint")])
def test_the_first_step_and_a_checkpoint_of_all_may_take_ten_times_as_long(
    pages: Pages, step: int, phase: str
) -> None:
    pages.at(step, phase)
    assert pages.after(99) is None
    assert pages.after(3) is not None


def test_a_rank_that_waits_spends_no_time_in_its_first_step(pages: Pages) -> None:
    """With an asynchronous server the others may be steps ahead of it."""
    pages.at(8)
    other_pages.step(pages.pages[1], 1)
    other_pages.wait(pages.pages[1])
    assert pages.after(9) is None
    assert pages.after(3) is not None


def test_quiet_times_that_were_none_are_learnt_from(pages: Pages) -> None:
    pages.at(5)
    assert pages.after(8) is None
    pages.at(6)
    assert pages.after(36) is None
    assert pages.after(5) is not None, "five times eight seconds"


@pytest.mark.parametrize("step", [0, 5])
def test_the_users_own_code_may_take_as_long_as_it_likes_where_nobody_waits(
    pages: Pages, step: int
) -> None:
    pages.at(step, "loop")
    assert pages.after(500) is None
    pages.at(max(step, 2), "loop")
    other_pages.wait(pages.pages[1])
    assert pages.after(9) is None
    assert pages.after(3) is not None, "and not, where somebody does"


def test_a_rank_that_is_stopped_in_its_users_code_is_named_where_nobody_waits(
    pages: Pages,
) -> None:
    """As one is before the world opens: the others' wait for it is not on their pages."""
    pages.states[1] = processes.STOPPED
    assert pages.after(99) is None
    assert "Rank 1 is stopped (SIGSTOP" in pages.stall(3).message


def test_what_a_look_costs(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher looks 20 times a second; with a thousand ranks every read counts."""
    reads = {"read_ticks": 0, "read": 0}

    def counted(name: str) -> Callable[[Path], object]:
        function = getattr(status, name)

        def call(file: Path) -> object:
            reads[name] += 1
            return function(file)

        return call

    for name in reads:
        monkeypatch.setattr(status, name, counted(name))
    pages.at(5)
    for _ in range(20):  # a second
        pages.now += 0.05
        pages.watcher.look(pages.pids)
    assert reads["read_ticks"] <= 2 * 11, "a hundredth of the floor, for two ranks"
    assert reads["read"] == 0, "nothing can be learnt from so short a time"
    assert pages.after(8) is None
    assert pages.sampled == 1, "for all ranks together"


def test_one_page_that_changes_is_no_stall(pages: Pages) -> None:
    pages.at(5)
    for _ in range(20):
        pages.pages[1].collective(3, b"x")
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
    slow = Slowness(10)
    assert slow.check({rank: view(step=step) for rank in range(len(waited))}, 0) is None
    totals = {**dict.fromkeys(PHASES, 0), **spent}
    views = {
        rank: view(step=step + 9, waited_ns=int(seconds * SECOND), totals_ns=totals)
        for rank, seconds in enumerate(waited)
    }
    return slow, slow.check(views, 10)


def test_a_slow_rank_is_said_to_be_slow_and_alive_once() -> None:
    slow, text = slowness((6, 0.1, 5), {"data": 7, "forward": 3})
    assert text == (
        "SLOW: ranks 0 and 2 wait 55 % of the time for rank 1, which is alive and spends 70 % of"
        " its own time in data. This warning appears once."
    )
    waited = enumerate((15, 0.2, 15))
    views = {rank: view(step=30, waited_ns=int(seconds * SECOND)) for rank, seconds in waited}
    assert slow.check(views, 20) is None


def test_nobody_is_slow_where_the_others_do_not_all_wait_for_one() -> None:
    for waited in ((2.0, 0.1, 5.0), (6.0, 1.5, 5.0), (0.1, 0.1, 6.0), (0.0, 0.0, 0.0)):
        assert slowness(waited, {})[1] is None
    assert slowness((6.0, 0.1), {}, step=1)[1] is None, "what starting took is nobody's fault"


# -- for real ------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from pathlib import Path
import torch, lockstep
from lockstep.testing import hang_at, hold_gil_at, stop_at

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
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
                {forward}
                stepper.backward(model(x).sum(), weight=len(x))
            stepper.step()
"""


Hung = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def hung(run: Run) -> Hung:
    """Exit code and the lines of stderr of a run of two ranks."""

    def of_script(
        fault: str = "pass",
        sample: int = -1,
        workers: int = 0,
        forward: str = "pass",
        **stalls: Any,
    ) -> tuple[int, list[str]]:
        text = SCRIPT.format(fault=fault, workers=workers, forward=forward)
        code, out, err = run(text, 2, str(sample), launch=Launch(stall_after=1, **stalls))
        assert out == ""
        return code, err.splitlines()

    return of_script


def test_a_stuck_loader_worker_is_found_with_its_line(hung: Hung) -> None:
    """Sample 26 belongs to rank 1's micro-batch of step 7."""
    code, lines = hung(sample=26, workers=1)
    assert code == 76
    assert re.fullmatch(
        r"STALL \d+ s: rank 0 waits in #\d+ \(.*\), step \d. "
        r"Rank 1 never issued it: in data, script.py:\d+ never_ends \(loader worker, pid \d+\), for"
        r" \d+ s\.( Its log: .*)?",
        lines[-1],
    ), lines
    assert lines[-3].endswith("in never_ends")
    assert lines[-2].strip() in ("while True:", "pass")
    assert not any("Traceback" in line for line in lines)


def test_a_rank_that_cannot_answer_is_found_too(hung: Hung) -> None:
    for fault, what in (
        ("stop_at(1, 4, 'backward')", r"stopped \(SIGSTOP or a debugger\), in backward"),
        ("hold_gil_at(1, 4, 'forward')", r"in forward, script.py:\d+ <module>"),
    ):
        code, lines = hung(fault)
        assert code == 76
        assert re.search(
            rf"Rank 1 (never issued it|is in the middle of it): {what}, for \d+ s\.", lines[-1]
        ), lines


def test_waiting_on_is_possible_and_a_slow_rank_is_none_that_hangs(
    hung: Hung, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 hangs in step 4 until its launcher has said so, and is slow until it has said that."""
    texts: list[str] = []

    def say(text: str) -> None:
        texts.append(text)
        (tmp_path / text.splitlines()[-1].split()[0].strip(":")).touch()

    monkeypatch.setattr("lockstep.launcher.supervise.print_line", say)
    waits = "while world.rank == 1 and stepper.steps == 4 and not Path('STALL').exists(): pass"
    slow = "time.sleep(0.2 * (world.rank == 1 and stepper.steps > 4 and not Path('SLOW').exists()))"
    code, _ = hung(forward=f"{waits}\n                {slow}", on_stall="wait")
    assert code == 0
    stalls = [text for text in texts if "STALL" in text]
    assert any("Rank 1 never issued it: in forward" in text for text in stalls), texts
    (slow_line,) = [text for text in texts if text.startswith("SLOW")]
    assert re.match(
        r"SLOW: rank 0 waits \d+ % of the time for rank 1, which is alive and spends \d+ % of its own time in forward",
        slow_line,
    )


PLAIN = """
import time
import torch, torch.distributed as dist, lockstep
dist.init_process_group("gloo")
lockstep.collectives.all_reduce(torch.ones(3), algorithm="{algorithm}")
if dist.get_rank() == 1:
    time.sleep(1000)
lockstep.collectives.all_reduce(torch.ones(4), algorithm="{algorithm}")
"""


@pytest.mark.parametrize("algorithm", ["native", pytest.param("ring", marks=pytest.mark.rest)])
def test_who_does_not_come_to_our_collectives_is_named_also_in_a_process_group_of_the_scripts_own(
    run: Run, algorithm: str
) -> None:
    text = PLAIN.format(algorithm=algorithm)
    code, _, err = run(text, launch=Launch(stall_after=0.3))
    assert code == 76
    assert re.search(
        r"rank 0 waits in #2 \(all_reduce sum.* f32\[4\] at script.py:8\)\. Rank 1 never"
        r" issued it: .*script.py:7 <module>",
        err.splitlines()[-1],
    )


def test_values_that_cannot_work_are_refused() -> None:
    choices = ["wait", "abort", "restart"]
    with refused("unknown-choice", name="on_stall", value="panic", choices=choices):
        Launch(on_stall="panic")  # type: ignore[arg-type]
    for seconds in (0, -1, float("nan")):
        with refused("wrong-value", name="stall_after", value=seconds):
            Launch(stall_after=seconds)
        with refused("wrong-value", name="timeout", value=seconds):
            Launch(timeout=seconds)
    assert timeout_for_ranks(None) == {}
    assert timeout_for_ranks(5) == {"LOCKSTEP_TIMEOUT": "5"}
