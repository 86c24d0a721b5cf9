"""Compares replicas that must be equal, bit by bit: a rank's tensors become one number (a digest).

    replicas        compared after a process's first two steps, at least every 100 steps, and before
                    results that depend on it, by one small all-gather. Only if the numbers differ,
                    every tensor gets its own number, so that the error names tensor and ranks
    overwritten     compared within a step: what the step overwrites, because a change on one rank
                    would not last until the next check. Sharded weights are overwritten by the
                    all-gather of their owners' values. The mean of moving buffers rounds away a
                    change of a low bit

What is overwritten is digested before the last backward of a step, and the number travels with the
facts of that step. This happens in every step if it takes less than 0.1 ms or 0.5 % of the step,
and otherwise as often as it costs 0.5 % of the time. All ranks raise the same error.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter

import torch
import xxhash
from torch import Tensor

from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.gradients.facts import Facts, FactsMessage

_PLACE = "for the replica check"
_SHOWN = 4  # names of tensors in a message

Named = Sequence[tuple[str, Tensor]]
_FREE = 1e-4  # seconds that a digest may take in every step
_SHARE = 0.005  # of the time of all steps
_RAREST = 100  # steps
_MEASURED = 10  # digests before their cost is trusted: the first ones may be interrupted
_EXACT = 2**52 - 1  # float64 holds integers up to here exactly
_WORD = 8  # bytes
_CHUNK = 2**25  # bytes that are mixed in one call
# SplitMix64's odd constants, as signed numbers
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class ReplicaCheck:
    """Knows when replicas were last compared, and when to compare them again. Every rank makes it
    and calls it alike.
    """

    def __init__(self, every: int = 100, drift: float = 0.0) -> None:
        """`drift`: the largest difference, as a share of a tensor's largest value, that is only
        warned of, once. Replicas that a program moves apart and back differ by rounding.
        """
        self._every = every
        self._drift = drift
        self.drifted = False
        """Whether replicas differed by no more than that."""
        self._times = 0
        self.next_step = 0
        """Compare after the first step that is not before this one: after the first two of this
        process, and when the last comparison is `every` steps old.
        """
        self.compared: int | None = None
        """The step after which the replicas were last equal; None: not compared in this process."""
        self.on_divergence: list[Callable[[int | None], str]] = []
        """Called with `compared` on all ranks before the error is raised. The strings that they
        return are added to its message.
        """

    def due(self, step: int) -> bool:
        """Whether to compare after `step`."""
        return step >= self.next_step

    @torch.no_grad()
    def compare(
        self,
        alike: Iterable[tuple[Group, Named]],
        step: int,
        when: str,
    ) -> None:
        """Compare each group's tensors among its ranks, after `step` steps. Raises
        ReplicaDivergence on all ranks of a group; its message contains `when`.
        """
        self._times += 1
        for group, named in alike:
            if group.size > 1 and named:
                mine = torch.tensor(digest(each for _, each in named), device=named[0][1].device)
                everyone = group.all_gather(mine, place=_PLACE).view(-1).tolist()
                if len(set(everyone)) > 1 and not self._is_drift(group, named, when):
                    raise self._divergence(group, named, when)
        self.compared = step
        self.next_step = 0 if self._times < 2 else step + self._every

    def _is_drift(self, group: Group, named: Named, when: str) -> bool:
        """Whether no tensor differs by more than the drift that is allowed. If so, warn once. A
        collective.
        """
        if not self._drift:
            return False
        share, name = max((_share(group, each), name) for name, each in named if each.numel() > 0)
        if not share <= self._drift:
            return False
        if not self.drifted and group.rank == 0:
            warnings.warn(
                f"{when} the replicas differ by rounding: {name!r} by {share:.1g} of its largest"
                " value. Code that moves the weights and moves them back must restore a copy. If they"
                " shall differ, checks='start' compares them no more.",
                LockstepWarning,
                stacklevel=4,
            )
        self.drifted = True
        return True

    def _divergence(self, group: Group, named: Named, when: str) -> ReplicaDivergence:
        """Return the error that says what differs, and where. A collective."""
        mine = torch.tensor([digest([tensor]) for _, tensor in named], device=named[0][1].device)
        table = group.all_gather(mine, place=_PLACE).view(group.size, -1)
        differing = (table != table[0]).any(0).nonzero().flatten().tolist()
        if not differing:
            return ReplicaDivergence(
                "replicas-changed-while-compared", when=when, parameter=named[0][0], ranks=()
            )
        name, tensor = named[differing[0]]
        digests = table[:, differing[0]].tolist()
        right, votes = Counter(digests).most_common(1)[0]
        majority = votes > group.size / 2
        right = right if majority else digests[0]
        ranks = [group.ranks[at] for at, each in enumerate(digests) if each != right]
        root = digests.index(right)
        elements, gap = _distance(group, tensor, root)
        where = (
            f"on {listed(ranks)} from the other {votes} ranks"
            if majority
            else f"between rank {group.ranks[root]} and {listed(ranks)}"
        )
        others = [f"{named[number][0]!r}" for number in differing[1:_SHOWN]]
        rest = (
            f": also {', '.join(others)}" + (" ..." if len(differing) > _SHOWN else "")
            if others
            else ""
        )
        told = "".join(f" {said}" for each in self.on_divergence if (said := each(self.compared)))
        return ReplicaDivergence(
            "replicas-differ",
            when=when,
            parameter=name,
            ranks=ranks,
            where=where,
            elements=elements,
            size=tensor.numel(),
            gap=gap,
            differing=len(differing),
            tensors=len(named),
            others=rest,
            told=told,
        )


def _distance(group: Group, tensor: Tensor, root: int) -> tuple[int, float]:
    """Return how many elements differ from those of rank `root`, and by how much at most, on the
    rank with the largest difference. A collective.
    """
    ours = octets_of(tensor)
    theirs = ours.clone()  # as bytes, tensors of every dtype can be sent
    group.broadcast(theirs, root, place=_PLACE).wait()
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    count = (theirs != ours).view(max(1, tensor.numel()), -1).any(1).sum()
    gaps = (
        (theirs.view(dtype).double() - ours.view(dtype).double())
        .abs()
        .nan_to_num(torch.inf, torch.inf)
    )
    found = torch.stack([count.double(), gaps.max() if gaps.numel() else gaps.sum()])
    group.all_reduce(found, "max", place=_PLACE).wait()
    return int(found[0]), float(found[1])


def _share(group: Group, tensor: Tensor) -> float:
    """Return the largest difference from rank 0's values, as a share of the largest value. A
    collective.
    """
    gap = _distance(group, tensor, 0)[1]
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    largest = tensor.detach().to(wide).abs().amax().reshape(1)
    group.all_reduce(largest, "max", place=_PLACE).wait()
    return gap / float(largest) if 0 < gap < math.inf else gap


class OverwrittenCheck:
    """Compares what a step overwrites. Every rank makes it, and calls it alike."""

    def __init__(self) -> None:
        self.next_step = 0
        """The next step whose facts carry a digest."""
        self._digests = 0
        self._fastest = math.inf  # seconds of the fastest digest, that is, an uninterrupted one

    def add_digest(self, facts: FactsMessage, overwritten: Sequence[Tensor]) -> None:
        """Add a digest of what a step overwrites, as the step found it, to its facts."""
        if not overwritten:
            return
        begin = perf_counter()
        number = digest(overwritten) & _EXACT
        self._fastest = min(self._fastest, perf_counter() - begin)
        self._digests += 1
        facts.add_digest(number, self._fastest)

    def differ(self, facts: Facts, step: int) -> bool:
        """Whether the ranks began `step` with different values. It uses only the facts, so all
        ranks get the same answer.
        """
        if step < self.next_step or not any(facts.digests_by_rank):
            return False
        digesting = max(facts.digesting_by_rank)
        # 0 in the first step, which knows no step before
        seconds = max(map(sum, zip(facts.busy_by_rank, facts.waited_by_rank, strict=True)))
        if self._digests >= _MEASURED and digesting > _FREE and seconds > 0:
            self.next_step = step + min(_RAREST, max(1, math.ceil(digesting / (_SHARE * seconds))))
        return len(set(facts.digests_by_rank)) > 1


def digests(alike: Iterable[tuple[Group, Named]]) -> dict[str, int]:
    """Return the digest of each tensor, by its name and the ranks on which it is equal."""
    return {
        f"{name!r} of {listed(group.ranks)}": digest([tensor])
        for group, named in alike
        for name, tensor in named
        if group.size > 1
    }


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Return a signed 64-bit number for the bits of `tensors`, in their order. Any dtypes, shapes,
    strides and devices.

    On the CPU it is XXH3 over the memory of each tensor, at the speed of memory. Other devices mix
    their tensors themselves, so that only a number travels.
    """
    hasher, elsewhere = xxhash.xxh3_64(), []
    for tensor in tensors:
        octets = octets_of(tensor)
        if octets.device.type == "cpu":
            hasher.update(octets.numpy().data)
        else:
            elsewhere.append(octets)
    if elsewhere:
        for words in chunks(elsewhere):
            hasher.update(mixed(words).cpu().numpy().data)
    found = hasher.intdigest()
    return found - 2**64 if found >= 2**63 else found


def mixed(words: Tensor) -> Tensor:
    """Map each int64 number and its position through a bijection, and return the sum: int64, 0-d,
    on the numbers' device.

    The bijection is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014). One changed word
    always changes the sum. Two exchanged words change it too, except by chance.
    """
    mixing = torch.arange(1, words.numel() + 1, device=words.device).mul_(_STEP).add_(words)
    mixing = (mixing ^ _shifted(mixing, 30)).mul_(_FIRST)
    mixing = (mixing ^ _shifted(mixing, 27)).mul_(_SECOND)
    return (mixing ^ _shifted(mixing, 31)).sum()


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def octets_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, flat, in the order of its elements. It is a view if the tensor is
    contiguous.
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(-1).view(torch.uint8)


def chunks(octets: Iterable[Tensor], most: int = _CHUNK) -> Iterator[Tensor]:
    """Yield bytes on devices as int64 words, at most `most` bytes at a time. Small tensors are
    joined, large ones are split, and zeros fill the last word.
    """
    together: list[Tensor] = []
    room = most
    for each in octets:
        for piece in each.split(most):
            if together and (piece.numel() > room or piece.device != together[0].device):
                yield _words(together)
                together, room = [], most
            together.append(piece)
            room -= piece.numel()
    if together:
        yield _words(together)


def _words(pieces: list[Tensor]) -> Tensor:
    missing = -sum(piece.numel() for piece in pieces) % _WORD
    return torch.cat([*pieces, pieces[0].new_zeros(missing)]).view(torch.int64)
