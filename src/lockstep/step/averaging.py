"""What the ranks of a wrapper do together, around a forward and at the end of a backward; and in
the steps for which some ranks have no inputs left.

Uneven inputs: ranks that have run out shadow the others, step by step, until all have run out.
torch's `Join` asks who still has inputs and calls the hook of what takes part: this one, a
ShardedOptimizer's, a user's own. Before each forward that will be reduced the wrapper counts the
ranks that have inputs, which is what its mean may be over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from lockstep.checks.divergence import ReplicaCheck
from lockstep.checks.unused import UnusedCheck
from lockstep.collectives.group import Group
from lockstep.gradients.buffers import SharedBuffers, replicate
from lockstep.gradients.fold import KeepsSparse
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction
from lockstep.gradients.torch_hook import TorchHook


class Averaging:
    """The gradients of `module` are averaged over `group` at the end of each backward. Every rank
    makes it.

    Args:
        module: its hooks are on the parameters.
        group: the ranks.
        reduce: how gradients are summed.
        caps: bytes of bucket 0, 1 and so on; the last holds for all others.
        ignored: full names of the parameters and buffers that are left alone.
        compares: whether replicas are compared.
        may_be_unused: whether a parameter without a gradient is meant so.
        static_graph: every backward is like the first one.
        shares_buffers: every forward begins with rank 0's buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        reduce: str,
        caps: Sequence[int],
        ignored: Collection[str],
        compares: bool,
        may_be_unused: bool,
        static_graph: bool,
        shares_buffers: bool,
    ) -> None:
        self._module, self._group = module, group
        self.reducer = Reducer(
            module,
            group,
            reduction(reduce, group),
            fold=KeepsSparse(module, group),
            bucket_bytes=caps[-1],
            bucket_caps=caps,
            ignored=ignored,
        )
        hooks = self.reducer.hooks
        hooks.closing, hooks.scale, hooks.end_of_backward = True, 1 / group.size, self.finish
        hooks.static_graph.on = static_graph
        self._unused = UnusedCheck(self.reducer, "skip" if may_be_unused else "error")
        self._replicas = ReplicaCheck() if compares else None
        self._forwards = 0  # that were compared, or might have been
        self.unchecked = 0
        """Backwards since the last forward."""
        self._shares_buffers = shares_buffers
        self.follows_backward = True
        """Whether the next forward follows a reduced backward. After a forward without a backward
        buffers are the same on all ranks still.
        """
        self.buffers = SharedBuffers(module, group, ignored)
        self.uneven: Uneven | None = None  # inside `join`
        self.authoritative_rank = 0
        """Whose model all ranks had at the end of the last `join`."""

    def set_static_graph(self) -> None:
        self.reducer.hooks.static_graph.on = True
        self._unused = UnusedCheck(self.reducer, "skip")

    @property
    def joining(self) -> Uneven | None:
        return self.uneven if self.uneven is not None and self.uneven.enabled() else None

    def will_share_buffers(self) -> bool:
        return self.follows_backward and self._shares_buffers

    def share_buffers(self, *, after_forward: bool, mine: bool = True) -> None:
        """Make the buffers equal, where it is time: those of rank 0, or of one that still has
        inputs. `mine`: this rank has.
        """
        if self.will_share_buffers() and self.buffers.after_forward == after_forward:
            joining = self.joining
            self.buffers.share(lambda: 0 if joining is None else joining.root(mine))

    def before_forward(self) -> None:
        """What all ranks do together before a forward that will be reduced."""
        active = self._group.size if self.joining is None else self.joining.active
        if self.unchecked and self._replicas is not None and active == self._group.size:
            self._forwards += 1
            if self._replicas.due(self._forwards):
                trained = [
                    (name, each)
                    for name, each in self._module.named_parameters()
                    if name not in self.reducer.ignored
                ]
                self._replicas.compare(
                    [(self._group, trained)], self._forwards, f"after step {self._forwards}"
                )
        self.unchecked = 0
        self.reducer.renew()

    def finish(self) -> None:
        """A backward is at its end."""
        self.reducer.finish()
        self.unchecked += 1
        self.buffers.wait()
        self._unused()

    def shadow(self, reduced: bool) -> None:
        """What this rank does in a step for which it has no inputs and others have."""
        if reduced:
            self.before_forward()
        self.share_buffers(after_forward=False, mine=False)
        self.follows_backward = reduced
        if reduced:
            self.finish()

    def settle(self, root: int) -> None:
        """Take the model of rank `root` at the end of `join`."""
        replicate(
            self._module,
            self._group,
            self.reducer.ignored,
            root=root,
            buffers=self._shares_buffers,
        )
        self.uneven, self.authoritative_rank = None, root


class Uneven(JoinHook):
    """One `join` block on one rank.

    `enabled()` says whether torch's `Join` is; `divide_by_all`: the mean is over all ranks, also
    those that have run out.
    """

    def __init__(
        self, averaging: Averaging, enabled: Callable[[], bool], *, divide_by_all: bool
    ) -> None:
        self._averaging, self.enabled = averaging, enabled
        self._divide_by_all = divide_by_all
        self._before = averaging.reducer.hooks.scale
        self._own: list[Tensor | None] | None = None
        self.active = averaging.reducer.group.size
        """Ranks that have inputs for the step at hand."""

    def count(self, mine: int, reduced: bool) -> bool:
        """Say whether this rank has inputs, and whether its backward will be reduced; returns
        what those say that have. Sets the divisor.
        """
        reducer = self._averaging.reducer
        counts = torch.tensor([mine, int(reduced)], device=reducer.parameters[0].device)
        reducer.group.all_reduce(counts, place="for join()").wait()
        self.active, reducing = counts.tolist()
        if not isinstance(reducer.reduction, TorchHook):  # a hook divides by itself
            reducer.hooks.scale = 1 / (reducer.group.size if self._divide_by_all else self.active)
        return bool(reducing)

    def root(self, mine: bool) -> int:
        """The highest of the ranks that say `mine`."""
        group = self._averaging.reducer.group
        root = torch.tensor(
            group.rank if mine else -1, device=self._averaging.reducer.parameters[0].device
        )
        group.all_reduce(root, "max", place="for join()").wait()
        return int(root)

    def main_hook(self) -> None:
        """This rank has run out, and others have not: take part in their step with zeros. Its
        own gradients are put aside.
        """
        parameters = self._averaging.reducer.parameters
        if self._own is None:
            self._own = [None if each.grad is None else each.grad.clone() for each in parameters]
        for parameter in parameters:
            parameter.grad = None
        self._averaging.shadow(self.count(0, False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: every rank gets the model of one that came last, and its own
        gradients back.
        """
        self._averaging.settle(self.root(is_last_joiner))
        if self._own is not None:
            for parameter, gradient in zip(
                self._averaging.reducer.parameters, self._own, strict=True
            ):
                parameter.grad = gradient
        self.end()

    def end(self) -> None:
        """Divide as before again."""
        self._averaging.reducer.hooks.scale = self._before
