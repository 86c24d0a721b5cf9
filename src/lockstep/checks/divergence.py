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
_EVERY = 100  # steps between comparisons of replicas
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

    def __init__(self, drift: float = 0.0) -> None:
        """`drift`: the largest difference, as a share of a tensor's largest value, that is only
        warned of, once. Replicas that a program moves apart and back differ by rounding.
        """
        self._drift = drift
        self.drifted = False
        """Whether replicas differed by no more than that."""
        self._times = 0
        self.next_step = 0
        """Compare after the first step that is not before this one: after the first two of this
        process, and when the last comparison is 100 steps old.
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
                _, tensors = zip(*named, strict=True)
                local = torch.tensor(digest(tensors), device=tensors[0].device)
                by_rank = group.all_gather(local, place=_PLACE).view(-1).tolist()
                if len(set(by_rank)) > 1 and not self._is_drift(group, named, when):
                    raise self._divergence(group, named, when)
        self.compared = step
        self.next_step = 0 if self._times < 2 else step + _EVERY

    def _is_drift(self, group: Group, named: Named, when: str) -> bool:
        """Whether no tensor differs by more than the drift that is allowed. If so, warn once. A
        collective.
        """
        if not self._drift:
            return False
        shares = [(_share(group, tensor), name) for name, tensor in named if tensor.numel()]
        share, name = max(shares)
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
        names, tensors = zip(*named, strict=True)
        local = torch.tensor([digest([tensor]) for tensor in tensors], device=tensors[0].device)
        table = group.all_gather(local, place=_PLACE).view(group.size, -1)
        differing = (table != table[0]).any(0).nonzero().flatten().tolist()
        if not differing:
            return ReplicaDivergence(
                "replicas-changed-while-compared", when=when, parameter=names[0], ranks=()
            )
        first = differing[0]
        tensor = tensors[first]
        digests = table[:, first].tolist()
        right, votes = Counter(digests).most_common(1)[0]
        majority = votes > group.size / 2
        if not majority:
            right = digests[0]
        root = digests.index(right)
        wrong = [rank for rank, value in zip(group.ranks, digests, strict=True) if value != right]
        elements, gap = _distance(group, tensor, root)
        difference = f"between rank {group.ranks[root]} and {listed(wrong)}"
        if majority:
            difference = f"on {listed(wrong)} from the other {votes} ranks"
        others = ", ".join(repr(names[index]) for index in differing[1:_SHOWN])
        if others:
            others = f": also {others}"
        if len(differing) > _SHOWN:
            others += " ..."
        return ReplicaDivergence(
            "replicas-differ",
            when=when,
            parameter=names[first],
            ranks=wrong,
            where=difference,
            elements=elements,
            size=tensor.numel(),
            gap=gap,
            differing=len(differing),
            tensors=len(tensors),
            others=others,
            told=sentences(self.on_divergence, self.compared),
        )


def sentences(callbacks: Iterable[Callable[[int | None], str]], step: int | None) -> str:
    """Return the texts that these return for `step`, each after a space, without the empty ones."""
    texts = [callback(step) for callback in callbacks]
    return "".join(f" {text}" for text in texts if text)


def _distance(group: Group, tensor: Tensor, root: int) -> tuple[int, float]:
    """Return how many elements differ from those of rank `root`, and by how much at most, on the
    rank with the largest difference. A collective.
    """
    local = octets_of(tensor)
    remote = local.clone()  # as bytes, tensors of every dtype can be sent
    group.broadcast(remote, root, place=_PLACE).wait()
    changed = (remote != local).view(max(1, tensor.numel()), -1).any(1)
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    gaps = (remote.view(dtype).double() - local.view(dtype).double()).abs()
    gaps = gaps.nan_to_num(torch.inf, torch.inf)
    largest = gaps.max() if gaps.numel() else gaps.sum()
    distance = torch.stack([changed.sum().double(), largest])
    group.all_reduce(distance, "max", place=_PLACE).wait()
    return int(distance[0]), float(distance[1])


def _share(group: Group, tensor: Tensor) -> float:
    """Return the largest difference from rank 0's values, as a share of the largest value. A
    collective.
    """
    _, gap = _distance(group, tensor, 0)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    largest = tensor.detach().to(wide).abs().amax().reshape(1)
    group.all_reduce(largest, "max", place=_PLACE).wait()
    if 0 < gap < math.inf:
        return gap / float(largest)
    return gap


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
            steps = math.ceil(digesting / (_SHARE * seconds))
            self.next_step = step + min(_RAREST, max(1, steps))
        return len(set(facts.digests_by_rank)) > 1


def digests(alike: Iterable[tuple[Group, Named]]) -> dict[str, int]:
    """Return the digest of each tensor, by its name and the ranks on which it is equal."""
    values = {}
    for group, named in alike:
        if group.size > 1:
            for name, tensor in named:
                values[f"{name!r} of {listed(group.ranks)}"] = digest([tensor])
    return values


@torch.no_grad()
def digest(tensors: Iterable[Tensor]) -> int:
    """Return a signed 64-bit number for the bits of `tensors`, in their order. Any dtypes, shapes,
    strides and devices.

    On the CPU it is XXH3 over the memory of each tensor, at the speed of memory. Other devices mix
    their tensors themselves, so that only a number travels.
    """
    hasher = xxhash.xxh3_64()
    on_devices = []
    for tensor in tensors:
        data = octets_of(tensor)
        if data.device.type == "cpu":
            hasher.update(data.numpy().data)
        else:
            on_devices.append(data)
    if on_devices:
        for words in chunks(on_devices):
            hasher.update(mixed(words).cpu().numpy().data)
    value = hasher.intdigest()
    if value >= 2**63:
        return value - 2**64
    return value


def mixed(words: Tensor) -> Tensor:
    """Map each int64 number and its position through a bijection, and return the sum: int64, 0-d,
    on the numbers' device.

    The bijection is the finalizer of SplitMix64 (Steele et al., OOPSLA 2014). One changed word
    always changes the sum. Two exchanged words change it too, except by chance.
    """
    mixing = torch.arange(1, words.numel() + 1, device=words.device)
    mixing = mixing.mul_(_STEP).add_(words)
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


def chunks(tensors: Iterable[Tensor], most: int = _CHUNK) -> Iterator[Tensor]:
    """Yield bytes on devices as int64 words, at most `most` bytes at a time. Small tensors are
    joined, large ones are split, and zeros fill the last word.
    """
    pieces: list[Tensor] = []
    room = most
    for tensor in tensors:
        for piece in tensor.split(most):
            if pieces and (piece.numel() > room or piece.device != pieces[0].device):
                yield _words(pieces)
                pieces = []
                room = most
            pieces.append(piece)
            room -= piece.numel()
    if pieces:
        yield _words(pieces)


def _words(pieces: list[Tensor]) -> Tensor:
    missing = -sum(piece.numel() for piece in pieces) % _WORD
    padding = pieces[0].new_zeros(missing)
    return torch.cat([*pieces, padding]).view(torch.int64)
