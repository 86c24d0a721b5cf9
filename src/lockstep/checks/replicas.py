"""Replicas that must be equal: compared after a process's first two steps, at least every 100
steps, and where a result depends on it.

Each rank digests all its replicated tensors into one number, and the numbers travel in one small
all-gather. Only where they differ does every tensor get a number of its own, so that the error
names the tensor and the ranks. All ranks raise the same error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.checks.digest import digest, octets_of
from lockstep.collectives.group import Group
from lockstep.collectives.tags import listed
from lockstep.errors import ReplicaDivergence

_PLACE = "for the replica check"
_SHOWN = 4  # names of tensors in a message
CAUSES = (
    "Usual causes: weights changed by hand on one rank; an own no_sync() or modulo around the step;"
    " a parameter that the other ranks do not train; a memory or processor error on one rank"
)

Named = Sequence[tuple[str, Tensor]]


class ReplicaCheck:
    """When replicas were compared last, and when to compare them again. Every rank makes it and
    calls it alike.
    """

    def __init__(self, every: int = 100) -> None:
        self._every = every
        self._times = 0
        self.compared: int | None = None
        """The step after which the replicas were equal last; None: not compared in this process."""
        self.on_divergence: list[Callable[[int | None], str]] = []
        """Called with `compared` on all ranks before the error is raised; what they return is
        added to its message.
        """

    def due(self, step: int) -> bool:
        """Whether to compare after `step`: after the first two of this process, and when the
        last comparison is `every` steps old.
        """
        return self._times < 2 or step - (self.compared or 0) >= self._every

    @torch.no_grad()
    def compare(self, group: Group, named: Named, step: int, when: str) -> None:
        """Compare `named` among the ranks of `group`, after `step` steps. Raises
        ReplicaDivergence on all of them, which says `when`.
        """
        self._times += 1
        if group.size > 1 and named:
            mine = torch.tensor(digest(tensor for _, tensor in named), device=named[0][1].device)
            everyone = group.all_gather(mine, place=_PLACE).view(-1).tolist()
            if len(set(everyone)) > 1:
                raise self._divergence(group, named, when)
        self.compared = step

    def _divergence(self, group: Group, named: Named, when: str) -> ReplicaDivergence:
        """What differs, and where. A collective."""
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
        ranks = [rank for rank, each in enumerate(digests) if each != right]
        root = digests.index(right)
        elements, gap = _distance(group, tensor, root)
        where = (
            f"on {listed(ranks)} from the other {votes} ranks"
            if majority
            else f"between rank {root} and {listed(ranks)}"
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
    """How many elements differ from those of rank `root`, and by how much at most, on the rank
    that is farthest. A collective.
    """
    ours = octets_of(tensor)
    theirs = ours.clone()  # bytes: every dtype can be sent
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
