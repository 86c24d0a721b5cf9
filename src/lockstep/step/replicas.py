"""Every stage of data parallelism in one process: a master copy, replicas, chunks of a batch, an
average, equal updates.

              batch ── cut into chunks ──┬────────────┬────────────┐
    master (CPU) ── copied to ──>    replica 0    replica 1    replica 2    each on its device
                                     forward      forward      forward      gather: outputs in order
                                     backward     backward     backward
                                         └── gradients averaged: ring, central ... ──┘
                                     update       update       update       same sum, same step
    master <── weights of replica 0 ──

`torch.nn.DataParallel` copies the module to the devices in every forward and brings all gradients
to the first. Here the replicas persist, as in DistributedDataParallel, so that each stage of a step
is a method and can be inspected. It is meant for teaching, tests and notebooks. For speed use one
process per device (`lockstep run`): threads in one process share the interpreter lock.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lockstep.collectives import in_process
from lockstep.config import knob
from lockstep.errors import ReplicaDivergence, UsageError
from lockstep.schedules.algorithms import algorithms_of

Device = torch.device | str | int


class Replicas:
    """Copies of a module in one process that train on parts of a batch and stay equal.

    Buffers (BatchNorm's statistics) belong to each replica until `sync_buffers()`. Replicas on
    several devices run in threads. Threads do not inherit autocast: enter it in the function.

    Example::

        replicas = lockstep.Replicas(model, 4)
        replicas.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for batch in DataLoader(dataset, batch_size=32):
            loss = replicas.gradients(batch, loss_sum)  # loss_sum(model, x, y)
            replicas.average_gradients()
            replicas.update()

    Args:
        module: the module to copy. It is not changed itself: all replicas are copies.
        replicas: number of replicas. Default: one for each of `devices`.
        devices: devices of the replicas. A list that is too short is repeated. Default: every GPU,
            else the CPU. Replicas on one CPU share its cores: no faster than one, and the same
            arithmetic.
        algorithm: the all-reduce algorithm for gradients: "ring" (every replica sends and receives
            2(N-1)/N of the gradient), "central" (all to replica 0 and back), "tree",
            "recursive_doubling", "halving_doubling" or "direct".

    Raises:
        UsageError: a number of replicas below 1, no devices, or an unknown algorithm.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: int | None = None,
        devices: Sequence[Device] | None = None,
        *,
        algorithm: str = "ring",
    ) -> None:
        self.devices = _devices(replicas, devices)
        on_one_node = [name for name in algorithms_of("all_reduce") if name != "hierarchical"]
        knob.chosen("algorithm", algorithm, on_one_node)
        self.algorithm = algorithm
        self.master = copy.deepcopy(module).cpu()
        self.replicas = [copy.deepcopy(self.master).to(device) for device in self.devices]
        self._optimizers: list[Optimizer] = []
        self._weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.replicas)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all chunks, joined along dim 0 on the first device, as
        `nn.DataParallel` does.

        A backward from the outputs leaves in each replica the gradients of its own samples. A step
        of DataParallel is: `zero_grad()`, call, `loss.backward()`, `sum_gradients()`, `update()`.

        Tensors in the arguments (also in tuples, lists and dicts) are cut along dim 0, as
        `torch.tensor_split` does, and must have equal lengths. 0-d tensors and other values go to
        every replica. A replica without samples does not run. Outputs are tensors of samples, or
        tuples, lists and dicts of them. Raises UsageError for tensors of different lengths and
        outputs that cannot be joined.
        """
        chunks = self.scatter((args, kwargs))

        def forward(rank: int) -> Any:
            arguments, named = chunks[rank]
            return self.replicas[rank](*arguments, **named)

        # Replica 0 runs an empty batch, so that the output has the right shape and dtype.
        working = [rank for rank, size in enumerate(self._sizes((args, kwargs))) if size] or [0]
        return gather(self._run(forward, working), self.devices[0])

    def scatter(self, batch: Any) -> list[Any]:
        """Cut a batch into one part for each replica, on its device.

        Args:
            batch: a tensor, or a tuple, list or dict of tensors of shape [n, ...].

        Returns:
            The parts. If n does not divide evenly, the first parts have one sample more.
        """
        _length(batch)
        return [_chunk(batch, rank, len(self), device) for rank, device in enumerate(self.devices)]

    def gradients(
        self,
        batch: Sequence[Any],
        loss_sum: Callable[..., Tensor],
        weights: Sequence[float] | None = None,
    ) -> float:
        """Compute the gradients of each replica's part of a batch, into its `.grad`.

        Args:
            batch: as for `scatter`.
            loss_sum: `loss_sum(replica, *part)` returns the sum of the losses of a part, shape [],
                on the replica's device.
            weights: the weight of each part. Default: its number of samples. A replica without
                samples adds no gradient.

        Returns:
            The sum of the losses, divided by the sum of the weights.

        Raises:
            UsageError: a loss that is not one number, or invalid weights.
        """
        sizes = self._sizes(batch)
        part_weights = self._checked(weights, sizes)
        chunks = self.scatter(batch)

        def forward_and_backward(rank: int) -> Tensor:
            replica = self.replicas[rank]
            replica.zero_grad()
            total = torch.zeros((), device=self.devices[rank])
            if sizes[rank]:
                total = loss_sum(replica, *chunks[rank])
                if total.numel() != 1:
                    raise UsageError(
                        "loss-not-one-number",
                        what="the tensor that loss_sum returned",
                        shape=list(total.shape),
                    )
                total.backward()
            return total.detach()

        losses = self._run(forward_and_backward, range(len(self)))
        self._weights = part_weights
        return float(sum(loss.item() for loss in losses) / sum(part_weights))

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace every replica's gradients by the mean over the batch: the sum over all replicas,
        divided once by the sum of the weights.

        Raises:
            UsageError: called before `gradients()`, or twice after it.
        """
        if self._weights is None:
            raise UsageError(
                "needs-call-before", call="average_gradients()", before="gradients(batch, loss_sum)"
            )
        total = sum(self._weights)
        self._weights = None
        self.sum_gradients()
        for replica in self.replicas:
            for parameter in replica.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(total)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Replace every replica's gradients by the sum over all replicas. Use it for a loss of the
        gathered outputs that is a mean already.

        A parameter without a gradient on any replica keeps none. If only some replicas have a
        gradient, the others count as zeros.
        """
        for parameters in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            if all(parameter.grad is None for parameter in parameters):
                continue
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in parameters]
            in_process.all_reduce(gradients, "sum", self.algorithm)

    def zero_grad(self) -> None:
        """Clear every replica's gradients; `gradients()` does so itself."""
        for replica in self.replicas:
            replica.zero_grad()

    def optimize(self, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        """Give every replica its own optimizer. Equal gradients and equal optimizers make equal
        steps.

        Args:
            make_optimizer: called with the list of a replica's parameters; returns an optimizer.
        """
        self._optimizers = [make_optimizer(list(replica.parameters())) for replica in self.replicas]

    def update(self) -> None:
        """Take one step on every replica.

        Raises:
            UsageError: called before `optimize()`, or before the gradients were averaged.
        """
        if not self._optimizers:
            raise UsageError(
                "needs-call-before", call="update()", before="optimize(make_optimizer)"
            )
        if self._weights is not None:
            raise UsageError("needs-call-before", call="update()", before="average_gradients()")
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            for source, target in zip(
                self.replicas[0].parameters(), self.master.parameters(), strict=True
            ):
                target.copy_(source)

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Make the buffers of all replicas equal: average BatchNorm's statistics, and copy other
        buffers from replica 0.
        """
        modules_of_replicas = [replica.modules() for replica in self.replicas]
        for module, *copies in zip(self.master.modules(), *modules_of_replicas, strict=True):
            for name, buffer in module.named_buffers(recurse=False):
                buffers = [replica.get_buffer(name) for replica in copies]
                if isinstance(module, _NormBase) and buffer.is_floating_point():
                    in_process.all_reduce(buffers, "mean", self.algorithm)
                else:
                    in_process.broadcast(buffers)
                buffer.copy_(buffers[0])

    def check(self) -> None:
        """Compare the parameters of all replicas with those of replica 0.

        Raises:
            ReplicaDivergence: replicas differ. It names the first parameter and the replicas.
        """
        named_parameters = [replica.named_parameters() for replica in self.replicas]
        for (name, first), *others in zip(*named_parameters, strict=True):
            parameters = [parameter for _, parameter in others]
            differing = [
                rank
                for rank, parameter in enumerate(parameters, start=1)
                if not _equal(first, parameter)
            ]
            if differing:
                raise ReplicaDivergence(
                    "in-process-replicas-differ", parameter=name, ranks=differing
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the master copy. It loads into the original module."""
        return self.master.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into every replica. The optimizers keep their state.

        Args:
            state: a state of the original module.
        """
        self.master.load_state_dict(state)
        for replica in self.replicas:
            replica.load_state_dict(self.master.state_dict())

    def train(self, mode: bool = True) -> Replicas:
        """Set every replica to training mode, as `nn.Module.train` does.

        Args:
            mode: False sets evaluation mode.
        """
        for module in (self.master, *self.replicas):
            module.train(mode)
        return self

    def eval(self) -> Replicas:
        """Set every replica to evaluation mode, as `nn.Module.eval` does."""
        return self.train(False)

    def _sizes(self, batch: Any) -> list[int]:
        least, remainder = divmod(_length(batch), len(self))
        return [least + (rank < remainder) for rank in range(len(self))]

    def _checked(self, weights: Sequence[float] | None, sizes: Sequence[int]) -> list[float]:
        if not any(sizes):
            raise UsageError("batch-without-samples")
        checked = list(map(float, sizes if weights is None else weights))
        usable = all(0 <= weight < math.inf for weight in checked) and sum(checked) > 0
        if len(checked) != len(self) or not usable:
            raise UsageError("weights-do-not-fit", weights=checked, replicas=len(self))
        return checked

    def _run(self, work: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
        """Call `work` for every rank: in threads if there are several devices, so that all are
        busy; one after the other on a single device.
        """
        if len({self.devices[rank] for rank in ranks}) <= 1:
            return [work(rank) for rank in ranks]
        grad = torch.is_grad_enabled()  # a thread begins with its own setting

        def in_thread(rank: int) -> Any:
            with torch.set_grad_enabled(grad):
                return work(rank)

        with ThreadPoolExecutor(len(ranks), "replica") as pool:
            return list(pool.map(in_thread, ranks))


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Join the outputs of chunks along dim 0, in order, on a device."""
    first = outputs[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, dict):
        joined = {}
        for key in first:
            joined[key] = gather([output[key] for output in outputs], device)
        return joined
    if isinstance(first, (tuple, list)):
        return _like(first, [gather(column, device) for column in zip(*outputs, strict=True)])
    returned = "a 0-d tensor" if isinstance(first, Tensor) else f"a {type(first).__name__}"
    raise UsageError("outputs-cannot-be-joined", returned=returned)


def _like(value: Any, members: list[Any]) -> Any:
    """A tuple, named tuple or list of the same class."""
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)


def _devices(replicas: int | None, devices: Sequence[Device] | None) -> list[torch.device]:
    if replicas is not None:
        knob.whole("replicas", replicas)
    if devices is None:
        gpus = range(torch.cuda.device_count())
        devices = [torch.device("cuda", gpu) for gpu in gpus] or ["cpu"]
    if not devices:
        raise UsageError("no-devices")
    count = replicas or len(devices)
    return [torch.device(devices[rank % len(devices)]) for rank in range(count)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that `scatter` cuts, also inside dicts, lists, tuples and subclasses."""
    if isinstance(value, Tensor) and value.dim():
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from _tensors(member)


def _length(batch: Any) -> int:
    lengths = [len(tensor) for tensor in _tensors(batch)]
    if not lengths:
        raise UsageError("batch-without-tensors", kind=type(batch).__name__)
    if len(set(lengths)) > 1:
        raise UsageError("tensors-of-unequal-length", lengths=lengths)
    return lengths[0]


def _chunk(value: Any, rank: int, size: int, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        chunk = value.tensor_split(size)[rank] if value.dim() else value
        return chunk.to(device)
    if isinstance(value, dict):
        return {key: _chunk(member, rank, size, device) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        return _like(value, [_chunk(member, rank, size, device) for member in value])
    return value


def _equal(a: Tensor, b: Tensor) -> bool:
    a = a.detach()
    b = b.detach().to(a.device)
    # NaN counts as equal to NaN: replicas with NaN in the same elements are still equal.
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
