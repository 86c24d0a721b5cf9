"""Who is waited for where ranks are on several hosts: told, asked for, judged together."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import status
from lockstep.launcher import processes
from lockstep.launcher.hosts.channel import Message, Stranger
from lockstep.launcher.hosts.digests import Digest, Digests, Heard, packed, unpacked
from lockstep.launcher.stalls import Sight, Stall, Watcher
from lockstep.step_clock import PHASES
from tests.launcher.hosts.test_membership import ANNA, BERT, Play, plan
from tests.launcher.test_stalls import BUCKET, sight

WAITING = {"waits": True, "number": 8, "texts": {7: "x", 8: BUCKET}}
LABELS = {ANNA: "anna (10.0.0.1)", BERT: "bert (10.0.0.2)"}


def through(digest: Digest) -> Digest:
    """As it comes out of the network."""
    return Digest.of(json.loads(json.dumps(digest.message(1))))


def test_the_rank_of_another_host_is_named_with_it() -> None:
    digests = Digests()
    assert digests.tell(ANNA, through(Digest(31, {0: sight(**WAITING), 1: sight(**WAITING)})))
    assert digests.verdict(LABELS) is None
    late = Sight(7, sight(phase="data").view, "S", "dataset.py:88 read_shard", '  File "dataset.py", line 88, in read_shard')
    assert not digests.tell(BERT, through(Digest(30, {2: sight(**WAITING), 3: late})))
    found = digests.verdict(LABELS)
    assert found == Stall(
        3,
        f"STALL 31 s: ranks 0, 1 and 2 wait in #8 ({BUCKET}), step 5. Rank 3 never issued it: in data, dataset.py:88 read_shard, for 31 s. "
        "Rank 3 is on bert (10.0.0.2).",
        '  File "dataset.py", line 88, in read_shard',
    )
    assert digests.verdict(LABELS) is None, "it is said once"
    assert unpacked(json.loads(json.dumps(packed(found)))) == found


def test_where_all_wait_for_each_other_it_is_the_network() -> None:
    digests = Digests()
    digests.tell(ANNA, Digest(31, {0: sight(**WAITING)}))
    digests.tell(BERT, Digest(31, {1: sight(**WAITING)}))
    found = digests.verdict(LABELS)
    assert found is not None
    assert found.message == f"STALL 31 s: all ranks of all hosts wait in #8 ({BUCKET}), step 5, which does not end: look at the network."


def test_ranks_that_move_again_take_back_what_was_told() -> None:
    digests = Digests()
    digests.tell(ANNA, Digest(31, {0: sight(**WAITING)}))
    digests.moving(ANNA)
    digests.tell(BERT, Digest(31, {1: sight(phase="data")}))
    assert digests.verdict(LABELS) is None
    digests.tell(ANNA, Digest(31, {0: sight(**WAITING)}))
    assert digests.verdict(LABELS) is not None


def test_clocks_of_hosts_differ_so_a_time_is_told_as_a_duration() -> None:
    before = sight(phase="forward", since_ns=time.monotonic_ns() - 40 * 10**9)
    after = through(Digest(31, {0: before})).sights[0]
    assert abs(after.view.since_ns - before.view.since_ns) < 10**9


@pytest.mark.parametrize(
    "changes",
    [{"rank": "0"}, {"phase": "asleep"}, {"collectives": {"x": "y"}}, {"where": None}, {"for_ns": 1.5}, {"collectives": []}],
)
def test_what_is_no_digest_is_refused(changes: dict[str, Any]) -> None:
    message = Digest(31, {0: sight(**WAITING)}).message(1)
    message["ranks"][0].update(changes)
    with pytest.raises(Stranger, match="does not follow the protocol"):
        Digest.of(message)


def test_one_hosts_quiet_has_the_others_asked_and_the_verdict_sent_to_all() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.told()
    play.all.quiet(ANNA, 1, Digest(31, {0: sight(**WAITING)}))
    assert play.told() == {BERT: ["look"]}
    play.all.quiet(BERT, 0, Digest(31, {2: sight(phase="data")}))
    assert play.told() == {}, "of a generation that is over"
    play.all.quiet(BERT, 1, Digest(31, {2: sight(phase="data")}))
    assert play.told() == {ANNA: ["verdict"], BERT: ["verdict"]}


def test_a_host_that_is_asked_tells_of_ranks_that_it_would_leave_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is in the user's own code between steps, and that nobody on this host waits for."""
    monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: "")
    sent: list[Message] = []
    heard = Heard(1, sent.append)
    now = 0.0
    page = status.Page(status.file_of(tmp_path, 0))
    page.step(5)
    page.enter(PHASES.index("loop"), time.monotonic_ns())
    watcher = Watcher(tmp_path, 30, lambda: now, elsewhere=heard)
    for now in (0.0, 1.0, 31.0, 100.0):  # noqa: B007  # the watcher's clock
        assert watcher.look({0: os.getpid()}) is None
    assert sent == []
    heard.note({"kind": "look"})
    now = 101.0
    assert watcher.look({0: os.getpid()}) is None
    assert [message["kind"] for message in sent] == ["quiet"]
    page.enter(PHASES.index("data"), time.monotonic_ns())
    now = 102.0
    watcher.look({0: os.getpid()})
    assert [message["kind"] for message in sent] == ["quiet", "moving"]
    assert not heard.asked()
