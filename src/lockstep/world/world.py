"""Who am I among how many: `lockstep.init()` answers it once, for every way a script can be
started.

The same script runs under `lockstep run`, torchrun, mpirun, srun, inside the user's own `mp.spawn`,
and as plain `python`, which is a world of one rank. A World owns everything that has a lifetime
(groups, threads, files) and closes it last in, first out.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from lockstep.collectives import store_barrier as meeting
from lockstep.collectives.choose import share_tuning
from lockstep.collectives.fingerprints import call_site
from lockstep.collectives.group import Group
from lockstep.config.knob import chosen
from lockstep.errors import LockstepError, UsageError
from lockstep.launcher import preemption
from lockstep.runtime import status
from lockstep.runtime.determinism import Determinism
from lockstep.runtime.environment import Placement, check_rank, placement
from lockstep.world.groups import C, Closable, Tagging, WorldGroups
from lockstep.world.rendezvous import (
    SharedCores,
    choose_backend,
    find_store,
    loopback,
    spare_forks,
    timeout_of_launcher,
)

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_generations = itertools.count()  # of worlds that this process has opened, equal on all ranks


class World:
    """All ranks of one run, seen from one of them.

    `rank` of `size` ranks; `local_rank` of `local_size` ranks on this host, which is number `node`;
    `device` is where this rank's model and gradients live. `group` is all ranks with tensors on
    `device`, `control` all ranks with CPU tensors (the same on a CPU). Use it as a context manager,
    or call `close()`; a world that is still open at exit is closed there.
    """

    _open: ClassVar[WeakKeyDictionary[dist.ProcessGroup, World]] = WeakKeyDictionary()
    # of worlds that were closed without waiting
    _failed: ClassVar[WeakSet[dist.ProcessGroup]] = WeakSet()

    def __init__(
        self,
        place: Placement,
        device: torch.device,
        *,
        store: dist.Store,
        timeout: timedelta,
        adopted: bool,
        tags: Tagging = "host",
        tuning: Path | str | None = None,
        at_end: ExitStack | None = None,
    ) -> None:
        spare_forks()
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size, self.node = place.local_rank, place.local_size, place.node
        self.device = device
        self.timeout = timeout
        self.adopted = adopted
        self._store = store
        self._at_end = at_end or ExitStack()  # of the last use of the store
        self._meetings = 0
        self._depth = 0
        self._owned: list[Closable] = []
        self._determinism: Determinism | None = None
        self.failing = False
        """Whether it is being closed without waiting for the others."""
        self.tuning = share_tuning(store, tuning, self.rank, self.size)
        self._groups = WorldGroups(
            self,
            store,
            place,
            device,
            timeout=timeout,
            tags=tags,
            tuning=self.tuning,
            subgroup=self.subgroup,
        )
        self.group = Group.default()
        self._groups.take(self.group)
        status.opened()
        self._open[self.group.process_group] = self
        self.control = self.group.host
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.size}, local rank {self.local_rank} of"
            f" {self.local_size}, node {self.node}, {self.device})"
        )

    @staticmethod
    def current() -> World:
        """The world of torch's default process group. One that the user's own code initialised
        is adopted: used, never closed.
        """
        if not dist.is_initialized():
            if len(World._open):
                raise UsageError("process-group-destroyed", what="World.current()")
            raise UsageError("no-world-open")
        assert dist.group.WORLD is not None
        if dist.group.WORLD in World._failed:
            raise UsageError("world-failed")
        return World._open.get(dist.group.WORLD) or _adopt()

    @staticmethod
    def close_open(*, failed: bool = False) -> None:
        """Close the world of torch's default process group, if Lockstep has one open."""
        world = (
            World._open.get(dist.group.WORLD)
            if dist.is_initialized() and dist.group.WORLD is not None
            else None
        )
        if world is not None:
            world.close(failed=failed)

    # -- agreement --------------------------------------------------------------------------------

    def agree(self, flag: bool, how: Literal["any", "all"] = "any") -> bool:
        """Whether any rank's (or all ranks') flag is true: the same answer on every rank. A
        collective: every rank calls it.
        """
        chosen("how", how, ("any", "all"))
        value = torch.tensor(int(flag))
        self.control.all_reduce(
            value, "max" if how == "any" else "min", place=f"for agree() {call_site()}"
        ).wait()
        return bool(value.item())

    def mean(self, value: float, weight: float) -> float:
        """The mean of all ranks' values, weighted: sum(value * weight) / sum(weight), in float64;
        nan if all weights are 0.

        There is no unweighted mean: means of means are wrong as soon as ranks hold different
        numbers of samples.
        """
        if weight < 0:
            expected = "a count of at least 0"
            raise UsageError(
                "number-out-of-range", name="weight", value=float(weight), expected=expected
            )
        total = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
        self.control.all_reduce(total, place=f"for mean() {call_site()}").wait()
        return float(total[0] / total[1])

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Return when all ranks are here. Raises BarrierTimeout on all ranks, naming the
        missing, when some are late.
        """
        timeout = timeout or self.timeout
        self.group.say(f"barrier {call_site()}")
        if self.group.memory is not None:
            # a rank that waits for one of them before it comes here needs this one's share of it
            self.group.memory.finish_all(timeout)
        self._meet(timeout)

    def _meet(self, timeout: timedelta) -> None:
        self._meetings += 1
        meeting.meet(
            self._store, f"barrier/{self._meetings}", self.rank, self.size, timeout, self.group.look
        )

    def first(self, timeout: timedelta | None = None) -> AbstractContextManager[bool]:
        """`with world.first() as mine:` runs the block on rank 0 first (mine is True), then on the
        others, however long rank 0 needs.

        For work that is done once and found by the rest, such as preparing a data set. The others
        fail as soon as rank 0 raises, and when it shows no sign of life for `timeout` (default 30
        s): the time that the block takes does not matter.
        """
        self._meetings += 1
        return meeting.first(self._store, f"first/{self._meetings}", self.rank, self.size, timeout)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A Group of some ranks (numbers in this world, in the order in which they shall count).
        Called by its members, all of them, only.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise UsageError("not-ranks-of-world", ranks=list(ranks), last=self.size - 1)
        if self.rank not in ranks:
            raise UsageError("not-in-subgroup", rank=self.rank, ranks=list(ranks))
        whole = self.group.ranks  # other numbers where some have died (go_on_among)
        return self._groups.make([whole[rank] for rank in ranks], whole[self.rank])

    def for_messages(self) -> dist.ProcessGroup:
        """A process group over gloo for messages from point to point, which are listened for as
        long as the training takes. Every rank calls it.
        """
        return self._groups.twin(self.group, timeout=timedelta(days=365))

    def go_on_among(self, ranks: Sequence[int]) -> Group:
        """Go on without those that have died: from now on the world is these ranks (numbers in the
        whole one). All of them call it, at one point.

        `rank`, `size`, `group` and `control` are then those of the living; what was made with the
        old ones has to be made anew.
        """
        ranks = [self.group.ranks.index(rank) for rank in ranks]
        group = self.subgroup(ranks)
        self.rank, self.size, self.group, self.control = group.rank, group.size, group, group.host
        group.watched = True
        self._open[group.process_group] = self
        return group

    def group_of(self, process_group: dist.ProcessGroup) -> Group:
        """The Group of a process group that the user's own code made. Called by all its members."""
        return self._groups.take(Group.of(process_group))

    def compute_deterministically(self, threads: int | None = None) -> Determinism:
        """Have this process compute so, until the world closes, that the same micro-batch gives the
        same gradient on every rank.

        With `threads` intra-op threads, 1 by default. Asked for again it goes on as it is; with
        another number that is a UsageError.
        """
        if self._determinism is None:
            self._determinism = self.own(Determinism(threads or 1))
        if threads not in (None, self._determinism.threads):
            raise UsageError("threads-differ", threads=threads, current=self._determinism.threads)
        return self._determinism

    def heed_signals(self) -> None:
        """Until the world closes, take SIGTERM and SIGUSR1 as a request to stop: `StepResult.stop`
        is then true on all ranks after the same step.

        Save then, and leave with exit code 75 (`lockstep train` does). The launcher tells all ranks
        when it or one of them gets such a signal.
        """
        self.own(ExitStack()).callback(preemption.listen())

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank was. The others may not know yet."""
        return preemption.to_stop()

    # -- lifetime ---------------------------------------------------------------------------------

    def own(self, resource: C) -> C:
        """Have `resource.close()` called when this world closes, last in, first out. Returns the
        resource.
        """
        self._owned.append(resource)
        return resource

    def close(self, *, failed: bool = False) -> None:
        """Leave together: wait for all ranks (`init`'s timeout at most), then end what this world
        owns and its process group.

        With `failed=True` wait for nobody. A second call does nothing. A process group that the
        user made stays.
        """
        if self._open.get(self.group.process_group) is not self:
            return
        # by the user's own code, as torch's examples end
        destroyed = self.group.within is not dist.group.WORLD
        self.group.within = None
        try:
            if not failed and not self.adopted:
                if not destroyed or self._groups.on_one_host:
                    # elsewhere ranks compare by messages of groups that are gone
                    self.group.say("end of the world (close)")
                    self.group.wait_for_all(self.group.number)
                self._meet(self.timeout)
        except BaseException:
            failed = True
            raise
        finally:
            self.failing = failed
            for process_group in [known for known, world in self._open.items() if world is self]:
                del self._open[process_group]
            while self._owned:
                self._owned.pop().close()
            for group in set(self._groups.made):
                group.forget()
            if not self.adopted:
                self._end_process_group(failed, destroyed)

    def _end_process_group(self, failed: bool, destroyed: bool) -> None:
        if failed and self.size > 1:
            # Destroying it would wait for collectives whose partners never come; its sockets end
            # with the process.
            self._failed.add(self.group.process_group)
            return
        atexit.unregister(self._at_exit)
        if not destroyed:
            dist.destroy_process_group()
        if self.size > 1:
            # Whoever hosts the store must leave last: a rank that still looks at it would find its
            # host gone.
            with suppress(dist.DistError, LockstepError):
                self._store.add("left", 1)
                if self.rank == 0:
                    meeting.wait_for_count(self._store, "left", self.size, timedelta(seconds=10))
        self._at_end.close()

    def _at_exit(self) -> None:
        self.close(failed=getattr(sys, "last_value", None) is not None)
        if self.group.process_group in self._failed:
            # The interpreter's own end would wait for a partner that has left the collective: there
            # is nothing to wait for.
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def __enter__(self) -> World:
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.close(failed=error is not None)


def init(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    tags: Tagging = "host",
    tuning: Path | str | None = None,
    device: torch.device | str | None = None,
) -> World:
    """Open the world that this process belongs to. All arguments are optional; as with `open()`,
    use it plainly or in a `with`.

    Without arguments the launcher's variables decide (`lockstep run`, torchrun, mpirun, srun,
    PyTorchJob), else this is a world of one. Ranks that your own code spawned pass `rank` and
    `world_size`; without an address they find each other on this host. It sets the device to the
    local rank's GPU, and the intra-op threads to cores / local ranks unless OMP_NUM_THREADS is set
    by you. A second call returns the open world; a process group that your code initialised is
    adopted, never closed.

    Args:
        rank: this process's number, where your own code spawned it.
        world_size: how many processes there are; with `rank`.
        backend: "nccl" for GPUs, "gloo" for CPUs (the default follows the hardware), "mpi" where
            torch was built with it.
        init_method: where ranks meet, as torch takes it, such as "tcp://host:port"; default: the
            launcher's variables.
        timeout: the longest that one collective may take; default: what `--timeout` of the launcher
            says, else torch's own.
        tags: whether ranks compare what they are about to call: "host", where all of them are on
            one host, which costs nothing; "all", on several hosts too, at one small message a
            collective (to find a mistake); "off".
        tuning: a file that `lockstep bench collectives --tune FILE` wrote; rank 0 reads it
            (default: the file that LOCKSTEP_TUNING names), and every rank chooses algorithms by it.
        device: where this rank computes; default: the local rank's GPU with "nccl", else the CPU.
            With "gloo" several ranks may share one GPU.

    Raises:
        UsageError: contradictory arguments or variables, or more ranks on a host than it has GPUs.
    """
    chosen("tags", tags, get_args(Tagging))
    if dist.is_initialized():
        return _already_open(
            rank=rank,
            world_size=world_size,
            backend=backend,
            init_method=init_method,
            device=None if device is None else torch.device(device).type,
        )
    timeout = timeout or timeout_of_launcher()
    place = _place(rank, world_size)
    if backend is None and device is not None:
        backend = {"cpu": "gloo", "cuda": "nccl"}.get(torch.device(device).type)
    backend = choose_backend(backend, place)
    device = _device_of(backend, device, place)
    with ExitStack() as at_end:
        # A launcher's store outlives a world: a second world of the same processes must not find
        # the keys of the first.
        store = dist.PrefixStore(
            f"lockstep/{next(_generations)}", find_store(place, init_method, timeout, at_end)
        )
        patience = timeout or _DEFAULT_TIMEOUT
        meeting.meet(store, "start", place.rank, place.size, patience, what="call lockstep.init()")
        with loopback(place.local_size == place.size):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
        world = World(
            place,
            device,
            store=store,
            timeout=patience,
            adopted=False,
            tags=tags,
            tuning=tuning,
            at_end=at_end.pop_all(),
        )
    world.own(SharedCores(place.local_size))
    return world


def _device_of(backend: str, asked: torch.device | str | None, place: Placement) -> torch.device:
    """This rank's, made the current one if it is a GPU."""
    default = "cuda" if backend == "nccl" else "cpu"
    device = torch.device(asked or default)
    chosen("device", device.type, ["cuda"] if backend == "nccl" else ["cpu", "cuda"])
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("no-gpu-visible")
        if device.index is None:
            device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _already_open(**asked: object) -> World:
    world = World.current()
    current = {
        "rank": world.rank,
        "world_size": world.size,
        "backend": dist.get_backend(),
        "device": world.device.type,
    }
    for name, value in asked.items():
        if value not in (None, current.get(name)):
            have = ", ".join(f"{name}={value!r}" for name, value in current.items())
            raise UsageError("process-group-already-open", name=name, value=value, current=have)
    return world


def _adopt() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    found = _place_of(rank, size)
    if found is None:
        local = device.index if device.index is not None else rank
        found = Placement(
            rank=rank, size=size, local_rank=local, local_size=size, node=0, source="adopted"
        )
    store = dist.PrefixStore(
        f"lockstep/adopted/{next(_generations)}", dist.distributed_c10d._get_default_store()
    )
    return World(
        found, device, store=store, timeout=timeout_of_launcher() or _DEFAULT_TIMEOUT, adopted=True
    )


def _place_of(rank: int, size: int) -> Placement | None:
    """What the environment says of a rank that is known, if it speaks of that rank."""
    with suppress(UsageError):
        found = placement(os.environ)
        if found is not None and (found.rank, found.size) == (rank, size):
            return found
    return None


def _place(rank: int | None, world_size: int | None) -> Placement:
    if rank is None and world_size is None:
        return placement(os.environ) or Placement(
            rank=0, size=1, local_rank=0, local_size=1, node=0, source="plain"
        )
    if rank is None or world_size is None:
        given, lacking = f"rank={rank}", "world_size"
        if rank is None:
            given, lacking = f"world_size={world_size}", "rank"
        raise UsageError("incomplete-settings", given=given, lacking=lacking)
    check_rank("rank", rank, "world_size", world_size)
    if found := _place_of(rank, world_size):
        return found
    local = int(os.environ.get("LOCAL_RANK", rank))
    return Placement(
        rank=rank,
        size=world_size,
        local_rank=local,
        local_size=world_size,
        node=0,
        source="arguments",
    )
