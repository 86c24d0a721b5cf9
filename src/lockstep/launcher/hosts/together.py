"""One host's agent over all generations of a run on several hosts: meet, run its share, report, hear what is next.

                     first host                                    every host, the first too
    attend           listens on --meet, holds the meeting          connects, proves the token, joins
    each generation  opens a store for the ranks, sends the roll   starts its ranks, watches them, reports how they ended
    last word        the same failure and exit code for all        prints it and leaves with it

Processes are supervised by torch's elastic agent, as on one host. Who takes part is told by the meeting and not by torchelastic's own
rendezvous: that keeps its state pickled in a store that anybody can write to, and would have to be wrapped, signed and verified at every read;
these messages are JSON, signed on the connection itself, and a failure and who is missing travel the same way.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic

from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import failures
from lockstep.launcher.hosts.guest import Guest, Lost
from lockstep.launcher.hosts.interfaces import host_and_port, interface_of, remark, resolved
from lockstep.launcher.hosts.meeting import Meeting, listen, to_stderr
from lockstep.launcher.hosts.membership import Membership
from lockstep.launcher.hosts.messages import End, Newcomer, Report, Roll, Share
from lockstep.launcher.hosts.plan import JOIN_SECONDS, REACH_SECONDS, Plan
from lockstep.launcher.hosts.token import Token
from lockstep.launcher.stopping import noted
from lockstep.launcher.supervise import Outcome

_ANSWER_SECONDS = 3.0  # of the meeting, to a host that leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the hosts do together. Only `start` is asked for on every host."""

    start: Callable[[Share, Mapping[str, str]], Outcome]
    """Run this host's share of a generation, with these variables for its ranks. It prints nothing of how it ended."""
    open: Callable[[], Mapping[str, str]] = dict
    """On the host that holds the meeting, once: what the others are told of the run."""
    prepare: Callable[[int], None] = lambda size: None
    """There too, before each generation of `size` ranks."""
    grow: Callable[[Mapping[str, str]], None] = lambda about: None
    """On rank 0's host: somebody waits, end at the next checkpoint. Given what `open` returned, and called in another thread."""
    grown: Callable[[], bool] = lambda: False
    """On rank 0's host, after a generation: did it end for that?"""
    finished: Callable[[], None] = lambda: None
    """On rank 0's host, when all is well and over."""


def run_over_hosts(plan: Plan, run: Run) -> int:
    """Take part until the last word, which is the same on all hosts, and print it. Returns the exit code.

    Where the number of hosts is open and the meeting is lost, this waits for --join-timeout that the first host comes back.

    Raises UsageError where the meeting cannot be reached, or what the hosts were given does not go together.
    """
    token = Token.read(plan.token, os.environ)
    address, port = _where(plan)
    with noted() as stop:
        hosting = True  # tried once: after that another process holds the meeting, or this one did and it is over
        seconds = REACH_SECONDS if plan.join_timeout is None else plan.join_timeout
        while True:
            with _attended(plan, token, address, port, run, seconds, may_host=hosting) as guest:
                hosting = False
                try:
                    end, last = _generations(plan, guest, run, lambda: stop.number is not None)
                except Lost as lost:
                    end, last = None, None
                    if not plan.elastic:
                        print(f"{socket.gethostname()} ({guest.address}): {lost}; all ranks of this host have ended", file=sys.stderr)
                        return ExitCode.FAILED
                    seconds = JOIN_SECONDS if plan.join_timeout is None else plan.join_timeout
                    to_stderr(f"{lost}; waiting up to {seconds:g} s for it")
                if stop.number is not None and end is None:
                    print(f"stopped by {failures.signal_name(stop.number)}; all ranks have ended", file=sys.stderr)
                    return 128 + stop.number
            if end is not None:
                return _leave(end, last, run)


def _generations(plan: Plan, guest: Guest, run: Run, stopping: Callable[[], bool]) -> tuple[End | None, Roll | None]:
    """Until the last word. Raises Lost."""
    from lockstep.launcher import agent  # imports torch: the connection is kept alive by its thread meanwhile

    last: Roll | None = None
    guest.on_grow = run.grow
    workers = plan.workers or agent.gpus() or 1
    guest.join(
        Newcomer(
            name=socket.gethostname(),
            address=guest.address,
            pid=os.getpid(),
            workers=workers,
            node_rank=plan.node_rank,
            hosting=guest.own,
            facts=plan.facts,
        )
    )
    while True:
        word = guest.wait(stopping)
        if not isinstance(word, Roll):
            return word, last
        last = word
        _say_roll(word, guest.address)
        outcome = _share(run, word, guest)
        if outcome.failure is None and outcome.exit_code > 128:
            return _stopped(guest, outcome.exit_code), last
        grown = word.index == 0 and outcome.failure is None and run.grown()
        guest.report(Report(failure=outcome.failure, grown=grown))


def _share(run: Run, roll: Roll, guest: Guest) -> Outcome:
    """This host's part of a generation. What it cannot do is a failure like that of a rank: all hosts hear of it."""
    try:
        return run.start(
            Share(roll, guest.called_off, guest.listen(roll.generation) if len(roll.hosts) > 1 else None),
            environment(guest.address, os.environ),
        )
    except UsageError as error:
        failure = failures.of_exception(error, roll.first_rank)
        return Outcome(failure.code, replace(failure, where=""))


def _stopped(guest: Guest, code: int) -> End:
    """A signal has ended this host's part: tell the others."""
    number = code - 128
    guest.report(Report(signal=number))
    until = monotonic() + _ANSWER_SECONDS
    answer = guest.wait(lambda: monotonic() > until)
    return answer if isinstance(answer, End) else End(code=code, line=f"stopped by {failures.signal_name(number)}; all ranks have ended")


def environment(address: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables for ranks: gloo and NCCL use the interface that reaches the other hosts, unless the user named another."""
    interface = interface_of(address)
    names = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in names.items() if name not in env}


def _say_roll(roll: Roll, address: str) -> None:
    interface = interface_of(address)
    first = roll.first_rank
    ours = failures.named(range(first, first + roll.share))
    count = len(roll.hosts)
    to_stderr(
        f"host {roll.index} of {count} ({', '.join(roll.hosts)}): {ours} of {roll.size} here, on {address}{f' ({interface})' if interface else ''}"
    )


def _leave(end: End, last: Roll | None, run: Run) -> int:
    if end.code == ExitCode.PREEMPTED:
        print("stopped as asked; all ranks of all hosts have ended", file=sys.stderr)
    elif end.failure is not None:
        print(failures.render(end.failure), file=sys.stderr)
    elif end.line:
        print(end.line, file=sys.stderr)
    elif end.code == ExitCode.OK and last is not None and last.index == 0:
        run.finished()
    return end.code


def _where(plan: Plan) -> tuple[str, int]:
    host, port = host_and_port(plan.meet)
    return resolved(host, REACH_SECONDS), port


@contextmanager
def _attended(plan: Plan, token: Token, address: str, port: int, run: Run, seconds: float, *, may_host: bool) -> Iterator[Guest]:
    """Be connected to the meeting, and hold it if `address` is this host's and nobody does yet."""
    try:
        listener = listen(address, port) if may_host else None
    except PermissionError:
        raise UsageError(f"--meet {plan.meet}: this user may not listen on port {port}; give one above 1023") from None
    if listener is None:
        guest = Guest(address, port, token, seconds)
        try:
            yield guest
        finally:
            guest.close()
        return
    stores: list[object] = []

    def open_store(size: int) -> tuple[str, int]:
        from lockstep.launcher import agent

        run.prepare(size)
        store, number = agent.serve_store(address)
        stores[:] = [store]  # the last generation's goes, this one's stays for as long as it may be needed
        return address, number

    membership = Membership(plan, monotonic(), open_store)
    meeting = Meeting(listener, token, membership, to_stderr)
    try:
        try:
            membership.about = dict(run.open())
        except UsageError as error:
            meeting.call_off(f"error: {socket.gethostname()} ({address}): {error}", ExitCode.USAGE)
            raise
        to_stderr(f"meeting of {plan.nodes} hosts on {address}:{port} ({interface_of(address)}), job {token.job}")
        if said := remark(address):
            to_stderr(f"warning: {said}")
        guest = Guest(address, port, token, REACH_SECONDS, own=True)
        try:
            yield guest
        finally:
            guest.close()
    finally:
        if membership.end is None:
            meeting.call_off(f"error: {socket.gethostname()} ({address}), where the hosts meet, has ended", ExitCode.FAILED)
        meeting.close()
