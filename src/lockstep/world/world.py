"""`lockstep.init()` tells a process its rank and the world size, however the script was started.

The same script runs under `lockstep run`, torchrun, mpirun, srun, inside the user's own `mp.spawn`,
and as plain `python`, which is a world of one rank. A World owns everything that must be closed
(groups, threads, files), and closes them in reverse order.
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
from types import TracebackType
from typing import ClassVar, Literal, get_args
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from lockstep.collectives import store_barrier
from lockstep.collectives.fingerprints import call_site
from lockstep.collectives.group import Group
from lockstep.config.knob import chosen
from lockstep.errors import LockstepError, UsageError
from lockstep.runtime import environment, preemption, status
from lockstep.runtime.determinism import Determinism
from lockstep.runtime.environment import Placement, check_rank
from lockstep.world.groups import C, Closable, Tagging, WorldGroups
from lockstep.world.last_comparison import LastComparison
from lockstep.world.rendezvous import (
    SharedCores,
    choose_backend,
    find_store,
    loopback,
    spare_forks,
    timeout_of_launcher,
)

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_opened = itertools.count()  # numbers the worlds that this process opens, equally on all ranks


class World:
    """All ranks of one run, seen from one of them. `lockstep.init` opens it.

    Use it as a context manager, or call `close()`. A world that is open when the process ends is
    closed then.

    Example::

        with lockstep.init() as world:
            print(f"rank {world.rank} of {world.size} on {world.device}")

    Attributes:
        rank: this process's number, from 0.
        size: the number of ranks, the world size.
        local_rank: this process's number among the ranks of this host.
        local_size: the number of ranks on this host.
        node: this host's number.
        device: where this rank's model and gradients are.
        group: a `Group` of all ranks, for tensors on `device`.
        control: a `Group` of all ranks, for CPU tensors.
    """

    _open: ClassVar[WeakKeyDictionary[dist.ProcessGroup, World]] = WeakKeyDictionary()
    # process groups of worlds that were closed without waiting
    _failed: ClassVar[WeakSet[dist.ProcessGroup]] = WeakSet()

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        *,
        store: dist.Store,
        timeout: timedelta,
        adopted: bool,
        tags: Tagging = "host",
        at_end: ExitStack | None = None,
    ) -> None:
        spare_forks()
        self.rank = placement.rank
        self.size = placement.size
        self.local_rank = placement.local_rank
        self.local_size = placement.local_size
        self.node = placement.node
        self.device = device
        self.timeout = timeout
        self.adopted = adopted
        self._store = store
        self._at_end = at_end or ExitStack()  # closed after the last use of the store
        self._barriers = 0
        self._depth = 0
        self._owned: list[Closable] = []
        self.last_comparison = LastComparison(store, self.rank, self.size)
        self._determinism: Determinism | None = None
        self.failing = False
        """Whether this world is being closed without waiting for the other ranks."""
        self._groups = WorldGroups(
            store,
            placement,
            device,
            timeout=timeout,
            tags=tags,
            subgroup=self.subgroup,
        )
        self.group = Group.default()
        self._groups.set_up(self.group)
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
        """The world of torch's default process group.

        A process group that your own code initialised is adopted: it is used, and never closed.
        """
        if not dist.is_initialized():
            if len(World._open):
                raise UsageError("process-group-destroyed", what="World.current()")
            raise UsageError("no-world-open", why="")
        assert dist.group.WORLD is not None
        if dist.group.WORLD in World._failed:
            raise UsageError("world-failed")
        return World._open.get(dist.group.WORLD) or _adopt()

    @staticmethod
    def close_open(*, failed: bool = False) -> None:
        """Close the world of torch's default process group, if Lockstep has one open.

        Args:
            failed: wait for no other rank.
        """
        if dist.is_initialized() and dist.group.WORLD is not None:
            world = World._open.get(dist.group.WORLD)
            if world is not None:
                world.close(failed=failed)

    # -- agreement --------------------------------------------------------------------------------

    def agree(self, flag: bool, how: Literal["any", "all"] = "any") -> bool:
        """Combine a flag of every rank; all ranks get the same answer. Every rank calls it.

        Args:
            flag: this rank's flag.
            how: "any": whether some rank's flag is true; "all": whether every flag is true.
        """
        chosen("how", how, ("any", "all"))
        value = torch.tensor(int(flag))
        op: Literal["max", "min"] = "max" if how == "any" else "min"
        self.control.all_reduce(value, op, place=f"for agree() {call_site()}").wait()
        return bool(value.item())

    def mean(self, value: float, weight: float) -> float:
        """The weighted mean of all ranks' values: sum(value * weight) / sum(weight), in float64.
        Every rank calls it.

        There is no unweighted mean: a mean of means is wrong if ranks hold different numbers of
        samples.

        Args:
            value: this rank's value.
            weight: the number of samples (or other units) that the value is the mean of.

        Returns:
            The mean, equal on all ranks; nan where all weights are 0.
        """
        if weight < 0:
            expected = "a count of at least 0"
            raise UsageError("wrong-value", name="weight", value=float(weight), expected=expected)
        total = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64)
        self.control.all_reduce(total, place=f"for mean() {call_site()}").wait()
        return float(total[0] / total[1])

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Return when all ranks have called it.

        Args:
            timeout: the longest wait; default: the timeout of `init`.

        Raises:
            BarrierTimeout: on all ranks; `missing` has the ranks that did not come in time.
        """
        timeout = timeout or self.timeout
        self.group.say(f"barrier {call_site()}")
        if self.group.memory is not None:
            # Before it comes here, another rank may wait for a collective in which this rank's part
            # is not done.
            self.group.memory.finish_all(timeout)
        self._wait_for_all(timeout)

    def _wait_for_all(self, timeout: timedelta) -> None:
        self._barriers += 1
        store_barrier.wait(
            self._store, f"barrier/{self._barriers}", self.rank, self.size, timeout, self.group.look
        )

    def first(self, timeout: timedelta | None = None) -> AbstractContextManager[bool]:
        """Run a block on rank 0, and then on the others.

        Use it for work that one rank does and the others use, such as the preparation of a data
        set. The block may take any time. The others fail as soon as rank 0 raises.

        Example::

            with world.first() as mine:  # True on rank 0
                path = prepare(download=mine)

        Args:
            timeout: how long rank 0 may show no sign of life; default 30 seconds.
        """
        self._barriers += 1
        return store_barrier.first(
            self._store, f"first/{self._barriers}", self.rank, self.size, timeout
        )

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """Return a Group of some ranks. All its members call this, and no other rank does.

        Args:
            ranks: numbers in this world, in the order of their numbers in the group.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise UsageError("not-ranks-of-world", ranks=list(ranks), last=self.size - 1)
        if self.rank not in ranks:
            raise UsageError("not-in-subgroup", rank=self.rank, ranks=list(ranks))
        return self._groups.make(list(ranks), self.rank)

    def for_messages(self) -> dist.ProcessGroup:
        """Return a gloo process group for point-to-point messages. Its timeout is a year, because
        ranks wait for such messages during the whole training. Every rank calls it.
        """
        return self._groups.twin(self.group, timeout=timedelta(days=365))

    def group_of(self, process_group: dist.ProcessGroup) -> Group:
        """Return the Group of a process group that your own code made. All its members call this.

        Args:
            process_group: this process must be a member.
        """
        return self._groups.set_up(Group.of(process_group))

    def compute_deterministically(self, threads: int | None = None) -> Determinism:
        """Compute deterministically in this process, until the world closes: the same micro-batch
        then gives the same gradient on every rank.

        A second call changes nothing. With another number of threads it raises UsageError.

        Args:
            threads: intra-op threads; default: 1.
        """
        if self._determinism is None:
            self._determinism = self.own(Determinism(threads or 1))
        if threads not in (None, self._determinism.threads):
            raise UsageError("threads-differ", threads=threads, current=self._determinism.threads)
        return self._determinism

    def heed_signals(self) -> None:
        """Take SIGTERM and SIGUSR1 as a request to stop, until the world closes.

        `StepResult.stop` is then true on all ranks after the same step. Save, and leave with exit
        code 75, as `lockstep train` does. The launcher tells all ranks when it or one of them gets
        such a signal.
        """
        self.own(ExitStack()).callback(preemption.listen())

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank has been asked to stop. The others may not know it yet."""
        return preemption.asked

    # -- lifetime ---------------------------------------------------------------------------------

    def own(self, resource: C) -> C:
        """Have `resource.close()` called when this world closes, the last resource first. Return
        `resource`.
        """
        self._owned.append(resource)
        return resource

    def close(self, *, failed: bool = False) -> None:
        """Wait for all ranks, at most for the timeout of `init`. Then close what this world owns,
        and its process group.

        A second call does nothing. A process group that your own code made stays.

        Args:
            failed: wait for no other rank.
        """
        if self._open.get(self.group.process_group) is not self:
            return
        # the user's code may have destroyed it, as torch's examples do at the end
        destroyed = self.group.within is not dist.group.WORLD
        self.group.within = None
        try:
            if not failed:
                self.last_comparison.publish()
            if not failed and not self.adopted:
                if not destroyed or self._groups.on_one_host:
                    # on several hosts ranks compare over groups that are gone then
                    self.group.say("end of the world (close)")
                    self.group.wait_for_all(self.group.number)
                self._wait_for_all(self.timeout)
            if not failed:
                self.last_comparison.compare()
        except BaseException:
            failed = True
            raise
        finally:
            self.failing = failed
            del self._open[self.group.process_group]
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
            # The rank that hosts the store leaves last: another rank may still read it.
            with suppress(dist.DistError, LockstepError):
                self._store.add("left", 1)
                if self.rank == 0:
                    store_barrier.wait_for_count(
                        self._store, "left", self.size, timedelta(seconds=10)
                    )
        self._at_end.close()

    def _at_exit(self) -> None:
        try:
            self.close(failed=getattr(sys, "last_value", None) is not None)
        except Exception:
            sys.excepthook(*sys.exc_info())
            self._failed.add(self.group.process_group)
        if self.group.process_group in self._failed:
            # A normal end of the interpreter would wait for a rank that has left the collective.
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
            ends_early = isinstance(error, SystemExit) and error.code in (None, 0)
            self.close(failed=error is not None and not ends_early)


def init(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    tags: Tagging = "host",
    device: torch.device | str | None = None,
) -> World:
    """Open the world that this process belongs to.

    Without arguments the launcher's variables decide (`lockstep run`, torchrun, mpirun, srun,
    PyTorchJob). Without a launcher this is a world of one rank. Ranks that your own code started
    pass `rank` and `world_size`; without an address they find each other on this host.

    It makes the local rank's GPU the current device. It sets the intra-op threads to cores / local
    ranks, unless you set OMP_NUM_THREADS. A second call returns the open world. A process group
    that your code initialised is adopted, and never closed.

    Example::

        with lockstep.init() as world:
            model = Net().to(world.device)
            world.barrier()

    Args:
        rank: this process's number, if your own code started it.
        world_size: the number of processes; needed with `rank`.
        backend: "nccl" for GPUs, "gloo" for CPUs, "mpi" if torch was built with it. Default:
            by `device` if it is given, else "nccl" if there are GPUs.
        init_method: the rendezvous, as torch takes it, such as "tcp://host:port". Default: the
            launcher's variables.
        timeout: the longest that one collective may take. Default: the launcher's `--timeout`, else
            torch's own.
        tags: whether ranks compare each collective before it runs. "host": if all of them are on
            one host, at no cost. "all": on several hosts too, at one small message a collective.
            "off": never.
        device: where this rank computes. Default: the local rank's GPU with "nccl", else the CPU.
            With "gloo" several ranks may share one GPU.

    Returns:
        The open world.

    Raises:
        UsageError: arguments or variables contradict each other, or a host has fewer GPUs than
            ranks.
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
    placement = _placement(rank, world_size)
    if backend is None and device is not None:
        backend = {"cpu": "gloo", "cuda": "nccl"}.get(torch.device(device).type)
    backend = choose_backend(backend, placement)
    device = _choose_device(backend, device, placement)
    with ExitStack() as at_end:
        # A launcher's store outlives a world: a second world of the same processes must not find
        # the keys of the first.
        store = dist.PrefixStore(
            f"lockstep/{next(_opened)}", find_store(placement, init_method, timeout, at_end)
        )
        patience = timeout or _DEFAULT_TIMEOUT
        store_barrier.wait(
            store, "start", placement.rank, placement.size, patience, what="call lockstep.init()"
        )
        with loopback(placement.local_size == placement.size):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=placement.rank,
                world_size=placement.size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
        world = World(
            placement,
            device,
            store=store,
            timeout=patience,
            adopted=False,
            tags=tags,
            at_end=at_end.pop_all(),
        )
    world.own(SharedCores(placement.local_size))
    return world


def _choose_device(
    backend: str, device: torch.device | str | None, placement: Placement
) -> torch.device:
    """Return this rank's device: the one that was asked for, or the one that fits the backend. A
    GPU becomes the current device.
    """
    devices = ["cuda"] if backend == "nccl" else ["cpu", "cuda"]
    device = torch.device(device or devices[0])
    chosen("device", device.type, devices)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("no-gpu-visible")
        if device.index is None:
            device = torch.device("cuda", placement.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _already_open(**arguments: object) -> World:
    world = World.current()
    current = {
        "rank": world.rank,
        "world_size": world.size,
        "backend": dist.get_backend(),
        "device": world.device.type,
    }
    for name, value in arguments.items():
        if value not in (None, current.get(name)):
            opened = ", ".join(f"{name}={value!r}" for name, value in current.items())
            raise UsageError("process-group-already-open", name=name, value=value, current=opened)
    return world


def _adopt() -> World:
    rank = dist.get_rank()
    device = torch.device("cpu")
    local_rank = rank
    if dist.get_backend() == "nccl":
        local_rank = torch.cuda.current_device()
        device = torch.device("cuda", local_rank)
    placement = _placement_on_one_host(rank, dist.get_world_size(), local_rank, "adopted")
    store = dist.PrefixStore(
        f"lockstep/adopted/{next(_opened)}", dist.distributed_c10d._get_default_store()
    )
    timeout = timeout_of_launcher() or _DEFAULT_TIMEOUT
    return World(placement, device, store=store, timeout=timeout, adopted=True)


def _placement(rank: int | None, world_size: int | None) -> Placement:
    """Return this rank's placement from `init`'s arguments, or from the environment."""
    if rank is None and world_size is None:
        started = environment.placement(os.environ)
        return started or Placement(
            rank=0, size=1, local_rank=0, local_size=1, node=0, source="plain"
        )
    if rank is None:
        raise UsageError("incomplete-settings", given=f"world_size={world_size}", lacking="rank")
    if world_size is None:
        raise UsageError("incomplete-settings", given=f"rank={rank}", lacking="world_size")
    check_rank("rank", rank, "world_size", world_size)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return _placement_on_one_host(rank, world_size, local_rank, "arguments")


def _placement_on_one_host(rank: int, size: int, local_rank: int, source: str) -> Placement:
    """Return this rank's placement from the environment, or one on a single host if the environment
    describes another rank, or none.
    """
    with suppress(UsageError):
        started = environment.placement(os.environ)
        if started is not None and (started.rank, started.size) == (rank, size):
            return started
    return Placement(
        rank=rank, size=size, local_rank=local_rank, local_size=size, node=0, source=source
    )
