"""Calls of torch.distributed in a plain script: noted on the page, and otherwise as torch's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.config.launching import Launch
from lockstep.launcher import torch_calls
from lockstep.runtime import processes, status
from tests import pages
from tests.launcher.conftest import Run
from tests.launcher.sights import Pages

# -- in a rank -----------------------------------------------------------------------------------

START = """
import inspect, json, os, pickle, sys
import sys
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


@pytest.mark.parametrize(
    ("workers", "cold"),
    [
        (2, False),
        pytest.param(1, False, marks=pytest.mark.rest),
        pytest.param(2, True, marks=pytest.mark.rest),
        pytest.param(3, False, marks=pytest.mark.rest),
    ],
)
def test_results_exceptions_and_signatures_are_torchs_own(
    run: Run, workers: int, cold: bool
) -> None:
    """An exception has the user's frames and torch's, and none of ours."""
    code, _, err = run(START + SAME, workers, launch=Launch(cold=cold))
    assert code == 0, err
    code, _, err = run(f"{START}dist.broadcast(x, src=7)  # HERE\n", 1)
    assert code == 1
    assert "# HERE" in err
    assert "torch_calls" not in err


def test_who_has_work_to_do_may_yet_come_and_nothing_is_ended(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 computes until its launcher has said that the others wait for it."""
    script = """
if rank == 0:
    while not Path("said").exists():
        sum(range(1000))
dist.barrier()
"""
    texts: list[str] = []

    def say(text: str) -> None:
        texts.append(text)
        (tmp_path / "said").touch()

    monkeypatch.setattr("lockstep.launcher.supervise.print_line", say)
    # on a busy host: too few
    monkeypatch.setattr(processes, "cpu_seconds", lambda pids: dict.fromkeys(pids, 0.0))
    code, _, err = run(START + script, launch=Launch(stall_after=2))
    assert code == 0, err
    assert "rank 1 waits in #1 (barrier at script.py:" in texts[0]
    assert "Rank 0 never issued it: running, script.py:" in texts[0]
    assert texts[0].endswith("Lockstep only waits.")


# -- when ----------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(tmp_path, monkeypatch)


def test_a_plain_script_that_computes_and_has_nobody_wait_is_left_alone(plain: Pages) -> None:
    for page in plain.pages:
        page.call(b"barrier at a.py:1", status.EVERYBODY, True)
        page.called()
    assert plain.after(500) is None
    plain.pages[0].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.after(9) is None
    stall = plain.stall(2)
    assert (stall.rank, stall.works) == (1, False)


@pytest.mark.parametrize(("working", "works"), [(0.01, False), (0.5, True)])
def test_whether_it_works_is_seen_by_its_processor_time(
    plain: Pages, working: float, works: bool
) -> None:
    plain.pages[0].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.stall(11, working).works == works


def test_work_that_the_others_waited_for_is_learnt_from(plain: Pages) -> None:
    """An evaluation on rank 0 alone, once an epoch, is told once."""
    for first in (True, False, False):
        plain.pages[1].call(b"barrier at a.py:2", status.EVERYBODY, True)
        assert (plain.after(40, working=1) is not None) == first
        plain.pages[1].called()
    plain.pages[1].call(b"barrier at a.py:2", status.EVERYBODY, True)
    assert plain.after(5 * 40 + 2) is not None


def test_ranks_that_still_start_have_ten_times_as_long_unless_one_has_ended(plain: Pages) -> None:
    plain.pages[0].call(b"init_process_group at a.py:1", status.EVERYBODY, False)
    assert plain.after(9) is None
    early = plain.stall(3)
    assert (early.rank, early.works) == (1, True)  # said, and the run goes on
    assert plain.after(86) is None
    assert plain.stall(3).rank == 1
    pages.enter(plain.pages[1], "end", 1)
    plain.after(1)
    message = plain.stall(11, living=(0,)).message
    assert message.endswith("Rank 1 is not there: its process has ended, with exit code 0.")


def test_native_code_that_goes_on_is_progress_and_one_that_waits_is_said(plain: Pages) -> None:
    plain.pages[1].call(b"barrier at a.py:9", status.EVERYBODY, True)
    for _ in range(20):
        plain.pages[0].moved()
        assert plain.after(1.5) is None
    plain.pages[0].in_native(b"all_reduce f32[8] in a backward at a.py:5")
    assert plain.stall(11).message == (
        "STALL 10 s: the ranks wait for each other in different places: rank 0 in all_reduce"
        " f32[8] in a backward at a.py:5; rank 1 in #1 (barrier at a.py:9)."
    )
    plain.pages[0].call(b"barrier at a.py:9", status.EVERYBODY, True)
    plain.pages[0].called()
    plain.pages[1].called()
    assert plain.after(99) is None, "who has called something since waits in native code no more"


def test_members_of_a_call_fit_on_a_page_or_are_all() -> None:
    for ranks in ((), (0,), (3, 1023), (0, 3, 3)):
        assert list(status.members(status.mask(ranks))) == sorted(set(ranks))
    assert list(status.members(status.mask((1, 1024)))) == []


def test_a_collective_that_has_ended_is_not_waited_for_though_it_was_counted_too_early() -> None:
    """Of two collectives that end together, gloo may count the earlier one last. Then its number
    of ended collectives is too low.
    """
    numbers = {"last_completed_collective": "1", "last_enqueued_collective": "3"}
    assert torch_calls._pending({"0": numbers})
    common = {"pg_id": 0, "is_p2p": False, "input_dtypes": ["Float"], "input_sizes": [[16]]}
    entries = [
        {**common, "profiling_name": "gloo:broadcast", "collective_seq_id": 2, "retired": True},
        {**common, "profiling_name": "gloo:all_reduce", "collective_seq_id": 3, "retired": False},
    ]
    frame = sys._getframe()
    words = torch_calls._describe_native({"entries": entries}, frame)
    assert words.startswith(b"all_reduce f32[16] in test_a_collective_that_has_ended")
    entries[1]["retired"] = True
    assert torch_calls._describe_native({"entries": entries}, frame) == b""
