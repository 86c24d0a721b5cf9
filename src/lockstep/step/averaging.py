"""The collective work of lockstep.DistributedDataParallel: before a forward, at the end of a
backward, and in steps in which some ranks have no inputs left.

Uneven inputs: a rank without inputs takes part in the others' collectives with zeros, until no rank
has inputs. torch's `Join` finds out which ranks still have inputs, and calls the hooks of all
participants: this wrapper's, a ShardedOptimizer's, a user's own. Before each forward that will be
reduced, the wrapper counts the ranks with inputs, because the mean may be over these only.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.checks.divergence import ReplicaCheck, digests
from lockstep.checks.start import optimizer_numbers
from lockstep.checks.unused import UnusedCheck
from lockstep.collectives.group import Group
from lockstep.gradients.fold import KeepsSparse
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction
from lockstep.gradients.running_statistics import SharedBuffers, replicate
from lockstep.gradients.torch_hook import TorchHook
from lockstep.runtime import status
from lockstep.step.backward_end import BackwardEnd

_DRIFT = 1e-4  # of a tensor's largest value
_watching: weakref.WeakSet[Averaging] = weakref.WeakSet()  # they are told of optimizers' steps


@functools.cache
def _watch_optimizers() -> None:
    """Have each wrapper note every step of an optimizer. The hook stays: an optimizer cannot step
    while a hook is removed, which could be at any time if it followed a wrapper's lifetime.
    """

    def stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for averaging in list(_watching):
            averaging.note_step(optimizer)

    register_optimizer_step_post_hook(stepped)


class Averaging:
    """Averages the gradients of `module` over `group` at the end of each backward. Every rank of
    the group creates one.

    Args:
        module: the module; hooks are registered on its parameters.
        group: the ranks to average over.
        reduce: the algorithm that sums gradients.
        caps: maximum bytes of bucket 0, 1 and so on; the last value applies to all others.
        ignored: full names of the parameters and buffers that are not synchronized.
        compares: whether replicas are compared.
        may_be_unused: whether a parameter may have no gradient on any rank.
        static_graph: whether every backward is like the first one.
        shares_buffers: whether every forward begins with rank 0's buffers.
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
        self._module = module
        self._group = group
        self.reducer = Reducer(
            module,
            group,
            reduction(reduce, group),
            fold=KeepsSparse(module, group),
            bucket_bytes=caps[-1],
            bucket_caps=caps,
            ignored=ignored,
        )
        self.reducer.closing = True
        self.reducer.scale = 1 / group.size
        self.backward_end = BackwardEnd(self.reducer, self.finish)
        if static_graph:
            self.reducer.use_static_graph()
        self._unused = UnusedCheck(self.reducer, "skip" if may_be_unused else "error")
        self._replicas = ReplicaCheck(drift=_DRIFT) if compares else None
        if compares:
            self._own = {id(parameter) for parameter in module.parameters()}
            _watch_optimizers()
            _watching.add(self)
        self._reduced = 0  # forwards so far whose backward is reduced
        self._forwards = 0  # forwards at which replicas could be compared
        self._left: list[tuple[str, Tensor]] | None = None  # the weights after the optimizer's step
        self._version = -1  # of the first parameter's memory, at that time
        self._optimizer: Callable[[], Optimizer | None] = lambda: None  # the last that stepped
        self.unchecked = 0
        """The number of reduced backwards since the last forward that was reduced."""
        self._shares_buffers = shares_buffers
        self.follows_backward = True
        """Whether buffers may differ between ranks: true before the first forward, and after a
        forward whose backward is reduced.
        """
        self.buffers = SharedBuffers(module, group, ignored)
        self.uneven: Uneven | None = None  # set inside a `join` block
        self.authoritative_rank = 0
        """The rank whose model all ranks took at the end of the last `join`."""

    def set_static_graph(self) -> None:
        self.reducer.use_static_graph()
        self._unused = UnusedCheck(self.reducer, "skip")

    @property
    def joining(self) -> Uneven | None:
        return self.uneven if self.uneven is not None and self.uneven.enabled() else None

    def will_share_buffers(self) -> bool:
        return self.follows_backward and self._shares_buffers

    def share_buffers(self, *, after_forward: bool, has_inputs: bool = True) -> None:
        """Broadcast the buffers if they are due at this point: those of rank 0, or inside `join`
        those of a rank that still has inputs. `has_inputs`: whether this rank has.
        """
        if self.will_share_buffers() and self.buffers.after_forward == after_forward:
            joining = self.joining
            self.buffers.share(lambda: 0 if joining is None else joining.root(has_inputs))

    def before_forward(self) -> None:
        """Compare the replicas if it is due, and prepare the reducer. All ranks call it before a
        forward that will be reduced.
        """
        active = self._group.size if self.joining is None else self.joining.active
        if self.unchecked and self._compared() and active == self._group.size:
            self._forwards += 1
            if self._replicas is not None and self._replicas.due(self._forwards):
                weights = self._trained() if self._left is None else self._left
                self._replicas.compare(
                    [(self._group, weights)], self._forwards, f"after step {self._forwards}"
                )
            self._left = None
        self.unchecked = 0
        self.reducer.renew()
        self._reduced += 1
        for bucket in self.reducer.buckets[:1]:
            bucket.place = bucket.place_of(self._reduced)

    def _compared(self) -> bool:
        """Whether the replicas are equal between steps, and compared."""
        reduction = self.reducer.reduction
        local = isinstance(reduction, TorchHook) and not reduction.keeps_replicas_equal
        return self._replicas is not None and not local

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if name not in self.reducer.ignored
        ]

    def note_step(self, optimizer: Optimizer) -> None:
        """Note a step of these parameters' optimizer. Until the next forward the program may move the
        weights on purpose, differently on each rank (sharpness-aware minimization does), so a copy is
        kept when they are to be compared.
        """
        for group in optimizer.param_groups:
            if any(id(parameter) in self._own for parameter in group["params"][:1]):
                break
        else:
            return
        if self._replicas is not None and self._replicas.due(self._forwards + 1):
            self._left = [(name, weight.detach().clone()) for name, weight in self._trained()]
        self._version = self.reducer.parameters[0]._version
        self._optimizer = weakref.ref(optimizer)

    def last_digests(self) -> Mapping[str, int]:
        """Return digests of what is equal on all ranks after the last step, by name. Nothing if this
        rank has changed its weights since then.
        """
        optimizer = self._optimizer()
        if (
            optimizer is None
            or self._replicas is None
            or self._replicas.drifted
            or not self._compared()
            or self.reducer.parameters[0]._version != self._version
        ):
            return {}
        numbers = optimizer_numbers(optimizer, self.reducer.parameters[0].device)
        return digests([(self._group, [*self._trained(), *numbers])])

    def finish(self) -> None:
        """Complete the sum of gradients at the end of a backward."""
        with status.inside("reduce"):
            self.reducer.finish()
        self.unchecked += 1
        self.buffers.wait()
        self._unused()

    def shadow(self, reduced: bool) -> None:
        """Take part in the collectives of a step for which only other ranks have inputs."""
        if reduced:
            self.before_forward()
        self.share_buffers(after_forward=False, has_inputs=False)
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
        self.uneven = None
        self.authoritative_rank = root
        self._left = None


class Uneven(JoinHook):
    """One `join` block on one rank.

    Args:
        averaging: the wrapper's Averaging.
        enabled: returns whether torch's `Join` is enabled.
        divide_by_all: whether the mean is over all ranks, also those without inputs.
    """

    def __init__(
        self, averaging: Averaging, enabled: Callable[[], bool], *, divide_by_all: bool
    ) -> None:
        self._averaging = averaging
        self.enabled = enabled
        self._divide_by_all = divide_by_all
        self._before = averaging.reducer.scale
        self._own: list[Tensor | None] | None = None
        self.active = averaging.reducer.group.size
        """The number of ranks that have inputs for the current step."""

    def count(self, has_inputs: bool, reduced: bool) -> bool:
        """Count the ranks with inputs, and set the divisor. Return whether any rank will reduce
        its backward. Collective.

        Args:
            has_inputs: whether this rank has inputs.
            reduced: whether this rank's backward will be reduced.
        """
        reducer = self._averaging.reducer
        counts = torch.tensor([int(has_inputs), int(reduced)], device=reducer.parameters[0].device)
        reducer.group.all_reduce(counts, place="for join()").wait()
        self.active, reducing = counts.tolist()
        if not isinstance(reducer.reduction, TorchHook):  # a comm hook divides itself
            reducer.scale = 1 / (reducer.group.size if self._divide_by_all else self.active)
        return bool(reducing)

    def root(self, candidate: bool) -> int:
        """Return the highest rank whose `candidate` is true. Collective."""
        reducer = self._averaging.reducer
        group = reducer.group
        root = torch.tensor(group.rank if candidate else -1, device=reducer.parameters[0].device)
        group.all_reduce(root, "max", place="for join()").wait()
        return int(root)

    def main_hook(self) -> None:
        """Take part with zeros in a step for which only other ranks have inputs. The first call
        saves this rank's own gradients.
        """
        parameters = self._averaging.reducer.parameters
        if self._own is None:
            self._own = []
            for parameter in parameters:
                gradient = parameter.grad
                self._own.append(None if gradient is None else gradient.clone())
        for parameter in parameters:
            parameter.grad = None
        self._averaging.shadow(self.count(has_inputs=False, reduced=False))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that finished last to all ranks, and restore this rank's
        gradients. torch calls it when no rank has inputs.
        """
        self._averaging.settle(self.root(is_last_joiner))
        if self._own is not None:
            for parameter, gradient in zip(
                self._averaging.reducer.parameters, self._own, strict=True
            ):
                parameter.grad = gradient
        self.end()

    def end(self) -> None:
        """Restore the divisor from before the `join` block."""
        self._averaging.reducer.scale = self._before
