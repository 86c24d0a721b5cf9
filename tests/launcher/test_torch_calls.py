"""Calls of torch.distributed in a plain script: noted on the page, and otherwise as torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher import processes
from lockstep.launcher.rank import Target
from lockstep.launcher.stalls import Sight, Watcher, explain, suspects
from lockstep.launcher.supervise import supervise
from lockstep.runtime import status
from lockstep.runtime.step_clock import INDEX
from tests.launcher.test_stalls import said, sight

# -- in a rank -----------------------------------------------------------------------------------

START = """
import inspect, json, os, pickle, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(3.) + 10 * rank

def page():
    from lockstep.runtime import status
    return status.read(status.file_of(Path(os.environ["LOCKSTEP_FAILURES"]), rank))
"""


def ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, workers: int, **launch: Any
) -> int:
    (tmp_path / "script.py").write_text(START + script)
    monkeypatch.chdir(tmp_path)
    return supervise(Target(script="script.py"), workers, launch=Launch(**launch)).exit_code


SAME = """
everyone = [torch.arange(3.) + 10 * each for each in range(size)]
total = x.clone()
assert dist.all_reduce(total) is None
assert torch.equal(total, sum(everyone))
work = dist.all_reduce(most := x.clone(), op=dist.ReduceOp.MAX, async_op=True)
assert isinstance(work, dist.Work)
work.wait()
assert torch.equal(most, everyone[-1])
dist.all_gather(parts := [torch.empty(3) for _ in everyone], x)
assert all(map(torch.equal, parts, everyone))
dist.all_gather_object(names := [None] * size, {"rank": rank})
assert names == [{"rank": each} for each in range(size)]
after, before = (rank + 1) % size, (rank - 1) % size
if size > 1:
    ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, got := torch.empty(3), before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(got, everyone[before])
    got.zero_()
    if rank:
        dist.send(x, after)
    assert dist.recv(got, before) == before
    if not rank:
        dist.send(x, after)
    assert torch.equal(got, everyone[before])
last = dist.new_group([size - 1])
if rank == size - 1:
    dist.all_reduce(alone := x.clone(), group=last)
    assert torch.equal(alone, x)
else:
    assert last is dist.GroupMember.NON_GROUP_MEMBER
dist.monitored_barrier()
try:
    dist.broadcast(x, src=size)
except RuntimeError as error:
    assert "invalid root rank" in str(error), error
else:
    raise AssertionError("torch refuses a root that is not there")
view = page()
assert not view.waits and not view.call, view
texts = [view.collectives[each] for each in sorted(view.collectives)]

def step(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

compiled = torch.compile(step, fullgraph=True, backend="eager")
assert torch.equal(compiled(x), sum(2 * each for each in everyone) + 1)
assert str(inspect.signature(dist.all_reduce)).startswith("(tensor, op=")
assert dist.all_reduce is c10d.all_reduce and dist.all_reduce.__name__ == "all_reduce"
assert "Reduces the tensor data" in dist.all_reduce.__doc__
assert pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce
assert hasattr(dist.all_reduce, "__wrapped__")
expected = ["all_reduce sum f32[3]", "all_reduce max f32[3]", "all_gather f32[3]",
            "all_gather_object", "new_group", "monitored_barrier"]
assert [each.rpartition(" at ")[0] for each in texts[:6]] == expected, texts
assert all(" at script.py:" in each for each in texts), texts
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("workers", "cold"), [(1, False), (2, False), (2, True), (3, False)])
def test_results_exceptions_and_signatures_are_torchs_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    workers: int,
    cold: bool,
) -> None:
    assert ranks(tmp_path, monkeypatch, SAME, workers, cold=cold) == 0, capfd.readouterr().err


def test_an_exception_has_the_users_frames_and_torchs_and_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ranks(tmp_path, monkeypatch, "dist.broadcast(x, src=7)  # HERE\n", 2) == 1
    err = capfd.readouterr().err
    assert "# HERE" in err
    assert "torch_calls" not in err


def test_who_has_work_to_do_may_yet_come_and_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 computes until its launcher has said that the others wait for it."""
    script = """
if rank == 0:
    while not Path("said").exists():
        sum(range(1000))
dist.barrier()
"""
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        (tmp_path / "said").touch()

    monkeypatch.setattr("lockstep.launcher.supervise.say", say)
    assert ranks(tmp_path, monkeypatch, script, 2, stall_after=0.5) == 0, capfd.readouterr().err
    assert "rank 1 waits in #1 (barrier at script.py:" in told[0]
    assert "Rank 0 never issued it: running, script.py:" in told[0]
    assert told[0].endswith("Lockstep only waits.")


# -- what is said --------------------------------------------------------------------------------


def call(text: str = "", number: int = 0, among: tuple[int, ...] = (), **more: Any) -> Sight:
    """A rank of a plain script that waits in `text`; "": elsewhere."""
    texts = {number: text} if number and text else {}
    values = {"phase": "start", "step": 0, "plain": True, "texts": texts, **more}
    return sight(waits=bool(text), call=text, number=number, among=frozenset(among), **values)


def test_who_is_in_no_group_that_waits_is_not_waited_for() -> None:
    sights = [call("all_reduce f32[1] of ranks 0 and 2", among=(0, 2)), call(), call()]
    assert suspects(dict(enumerate(sights))) == [2]
    assert "Rank 1" not in said(*sights)
    assert "rank 0 waits in all_reduce f32[1] of ranks 0 and 2. Rank 2 is not there" in said(
        *sights
    )


def test_the_first_that_differs_is_told_whatever_the_ranks_are_in_now() -> None:
    texts = {1: "barrier at a.py:1", 2: "all_reduce f32[3] at a.py:2", 3: "barrier at a.py:3"}
    other = {1: "barrier at a.py:7", 2: "all_reduce f32[4] at a.py:8"}
    text = said(
        call(texts[3], 3, texts=texts),
        call(other[2], 2, texts=other),
        call(other[2], 2, texts=other),
    )
    assert text == (
        "STALL 31 s: the ranks wait for each other: #2 is not the same. It is in rank 0 all_reduce"
        " f32[3] at a.py:2; in ranks 1 and 2 all_reduce f32[4] at a.py:8. Rank 0 waits in #3"
        " (barrier at a.py:3) now."
    )
    found = explain({0: call(other[2], 2, texts=other), 1: call(texts[3], 3, texts=texts)}, 31)
    assert found is not None
    assert found.rank == 0


def test_ranks_that_wait_in_the_same_wait_for_the_network() -> None:
    text = said(*[call("barrier at a.py:3", 3)] * 2)
    assert text == (
        "STALL 31 s: all ranks of this host wait in #3 (barrier at a.py:3): for other hosts, or the"
        " network."
    )


def test_one_that_is_stopped_is_named_before_one_that_runs() -> None:
    waiting = call("barrier at a.py:3", 3)
    assert suspects({0: waiting, 1: call(number=2), 2: call(number=2, state="stopped")}) == [2]


def test_who_waits_for_messages_and_who_in_a_collective_is_told_apart() -> None:
    """An asynchronous server: rank 0 asks it, and rank 1 is at a meeting already."""
    asks = sight(waits=True, messages=True, number=8, texts={8: "a replica check"})
    meets = sight(waits=True, number=9, texts={8: "a replica check", 9: "facts"})
    assert (
        said(asks, meets, sight(state="stopped", phase="forward", number=8))
        == "STALL 31 s: rank 1 waits in #9 (facts), rank 0 waits for messages of other ranks, step"
        " 5. Rank 2 never issued it: stopped (SIGSTOP or a debugger), in forward, for 31 s."
    )


# -- when ----------------------------------------------------------------------------------------


class Pages:
    """Two plain ranks, seen by a watcher with a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used = 0.0, 0.0
        monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: "")
        monkeypatch.setattr(processes, "cpu_seconds", lambda pid: self.used)
        monkeypatch.setattr(processes, "state", lambda pid: "sleeping")
        self.pages = [status.Page(status.file_of(folder, rank)) for rank in (0, 1)]
        self.watcher = Watcher(folder, 10, lambda: self.now)

    def after(self, seconds: float, working: float = 0, living: tuple[int, ...] = (0, 1)) -> Any:
        found = None
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.used += working / 2
            found = self.watcher.look({rank: 1 << 22 for rank in living}) or found
        return found


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(tmp_path, monkeypatch)


def test_a_plain_script_that_computes_and_has_nobody_wait_is_left_alone(plain: Pages) -> None:
    for page in plain.pages:
        page.call(b"barrier at a.py:1", status.EVERYBODY, True)
        page.called()
    assert plain.after(5000) is None
    plain.pages[0].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.after(9) is None
    found = plain.after(2)
    assert (found.rank, found.works) == (1, False)


@pytest.mark.parametrize(("working", "works"), [(0.01, False), (0.5, True)])
def test_whether_it_works_is_seen_by_its_processor_time(
    plain: Pages, working: float, works: bool
) -> None:
    plain.pages[0].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.after(11, working).works == works


def test_work_that_the_others_waited_for_is_learnt_from(plain: Pages) -> None:
    """An evaluation on rank 0 alone, once an epoch, is told once."""
    for told in (True, False, False):
        plain.pages[1].call(b"barrier at a.py:2", status.EVERYBODY, True)
        assert (plain.after(40, working=1) is not None) == told
        plain.pages[1].called()
    plain.pages[1].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.after(5 * 40 + 2) is not None


def test_ranks_that_still_start_have_ten_times_as_long_unless_one_has_ended(plain: Pages) -> None:
    plain.pages[0].call(b"init_process_group at a.py:1", status.EVERYBODY, False)
    assert plain.after(99) is None
    assert plain.after(3).rank == 1
    plain.pages[1].enter(INDEX["end"], 1)
    plain.after(1)
    found = plain.after(11, living=(0,))
    assert found.message.endswith("Rank 1 is not there: its process has ended, with exit code 0.")


def test_native_code_that_goes_on_is_progress_and_one_that_waits_is_said(plain: Pages) -> None:
    plain.pages[1].call(b"barrier at a.py:9", status.EVERYBODY, True)
    for _ in range(20):
        plain.pages[0].moved()
        assert plain.after(1.5) is None
    plain.pages[0].in_native(b"all_reduce f32[8] in a backward at a.py:5")
    assert plain.after(11).message == (
        "STALL 10 s: the ranks wait for each other in different places: rank 0 in all_reduce"
        " f32[8] in a backward at a.py:5; rank 1 in #1 (barrier at a.py:9)."
    )


def test_who_has_called_something_since_waits_in_native_code_no_more(plain: Pages) -> None:
    plain.pages[0].in_native(b"all_reduce f32[8] in a backward at a.py:5")
    plain.pages[0].call(b"barrier at a.py:9", status.EVERYBODY, True)
    plain.pages[0].called()
    assert plain.after(99) is None


@pytest.mark.parametrize("ranks", [(), (0,), (3, 1023), (1, 1024), (0, 3, 3)])
def test_members_of_a_call_fit_on_a_page_or_are_all(ranks: tuple[int, ...]) -> None:
    mask = status.mask(ranks)
    assert list(status.members(mask)) == ([] if 1024 in ranks else sorted(set(ranks)))
