"""Replicas in one process, against one process over the same chunks and over one big batch, and
against torch's DataParallel.
"""

from __future__ import annotations

import itertools
import threading
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.errors import ReplicaDivergence
from tests.refused import refused

ALGORITHMS = ["ring", "central", "tree", "recursive_doubling", "halving_doubling", "direct"]
COUNTS = [1, 2, 3, 4]


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator), torch.randint(
        0, 3, (size,), generator=generator
    )


def loss_sum(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_and_weights_equal_those_of_one_big_batch(algorithm: str) -> None:
    """Sizes that do not divide, and fewer samples than replicas."""
    for count, size in itertools.product(COUNTS, (8, 7, 2, 1)):
        plain = small().double()
        replicas = lockstep.Replicas(plain, count, algorithm=algorithm)
        replicas.optimize(sgd)
        one = sgd(list(plain.parameters()))
        for step in range(3):
            x, y = batch(size, seed=step)
            loss = F.cross_entropy(plain(x.double()), y)
            one.zero_grad()
            loss.backward()
            ours = replicas.gradients((x.double(), y), loss_sum)
            replicas.average_gradients()
            assert ours == pytest.approx(loss.item(), rel=1e-12)
            expected = [parameter.grad for parameter in plain.parameters()]
            for replica in replicas.replicas:
                gradients = [parameter.grad for parameter in replica.parameters()]
                torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-13)
            untouched = weights_of(plain)
            replicas.update()
            torch.testing.assert_close(weights_of(plain), untouched, rtol=0, atol=0)
            one.step()
        replicas.check()
        for copied in (replicas.master, *replicas.replicas):
            torch.testing.assert_close(
                weights_of(copied), weights_of(plain), rtol=1e-11, atol=1e-13
            )


class DataParallelOnCpu(nn.DataParallel):
    """torch's forward of four devices: scatter, replicate, apply, gather. Each of the four is the CPU.
    tests/gpu/test_replicas.py compares on GPUs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids = [0, 1, 2, 3]
        self.output_device, self.src_device_obj = 0, torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = list(zip(*(tensor.chunk(len(device_ids)) for tensor in inputs), strict=True))
        return parts, [kwargs] * len(parts)

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        return [module] * len(device_ids)  # torch's copies share the module's gradients

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return [model(*part) for model, part in zip(replicas, inputs, strict=True)]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(outputs)


def test_losses_and_weights_are_those_of_data_parallel() -> None:
    """torch gathers the outputs and takes one loss of the whole batch. Ten samples on four devices
    are parts of 3, 3, 3 and 1, so a mean of the parts' mean losses is another number.
    """
    theirs = DataParallelOnCpu(small())
    gathered, summed = lockstep.Replicas(small(), 4), lockstep.Replicas(small(), 4)
    for replicas in (gathered, summed):
        replicas.optimize(sgd)
    one = sgd(list(theirs.parameters()))
    for step in range(3):
        x, y = batch(10, seed=step)
        one.zero_grad()
        expected = F.cross_entropy(theirs(x), y)
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        means = [F.cross_entropy(theirs.module(part), labels).item() for part, labels in parts]
        assert sum(means) / 4 != pytest.approx(expected.item(), rel=1e-4)
        expected.backward()
        one.step()

        gathered.zero_grad()
        loss = F.cross_entropy(gathered(x), y)
        loss.backward()
        gathered.sum_gradients()
        gathered.update()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)

        assert summed.gradients((x, y), loss_sum) == pytest.approx(expected.item(), rel=1e-6)
        summed.average_gradients()
        summed.update()
    for replicas in (gathered, summed):
        replicas.check()
        torch.testing.assert_close(replicas.state_dict(), theirs.module.state_dict())


def test_outputs_come_back_in_order() -> None:
    module = small()
    for size, count in itertools.product((0, 1, 5, 12), COUNTS):
        x, _ = batch(size)
        torch.testing.assert_close(lockstep.Replicas(module, count)(x), module(x))


Pair = namedtuple("Pair", ["a", "b"])


class Named(dict[str, Any]):
    """A container of a class that torch does not know."""


class Nested(nn.Module):
    def forward(self, pair: Pair, options: Named, scale: Tensor, *, flag: str) -> Named:
        assert flag == options["name"] == "same for all"
        assert len(pair.a) == len(options["mask"])
        return Named(sum=(pair.a + pair.b) * scale, more=[options["mask"], Pair(pair.a, (pair.b,))])


def test_nested_arguments_and_outputs() -> None:
    a, b, mask = torch.arange(7.0), torch.arange(7.0) * 2, torch.arange(7) % 2 == 0
    options = Named(mask=mask, name="same for all")
    outputs = lockstep.Replicas(Nested(), 3)(
        Pair(a, b), options, torch.tensor(2.0), flag="same for all"
    )
    assert torch.equal(outputs["sum"], (a + b) * 2)
    assert torch.equal(outputs["more"][0], mask)
    assert isinstance(outputs["more"][1], Pair)
    assert torch.equal(outputs["more"][1].b[0], b)


def test_chunks_count_by_their_weights() -> None:
    """A loss over tokens: chunk 0 has 2 samples with 9 tokens, chunk 1 has 1 with 1."""
    plain = small()
    x, y = batch(3)
    tokens = torch.tensor([4.0, 5.0, 1.0])

    def by_token(model: nn.Module, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return (F.cross_entropy(model(x), y, reduction="none") * tokens).sum()

    expected = by_token(plain, x, y, tokens) / 10
    expected.backward()
    replicas = lockstep.Replicas(plain, 2)
    assert replicas.gradients((x, y, tokens), by_token, weights=[9, 1]) == pytest.approx(
        expected.item(), rel=1e-6
    )
    replicas.average_gradients()
    for a, b in zip(replicas.replicas[1].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Partly(nn.Module):
    """Uses `sometimes` for samples above 0 only, `never` never."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.tensor(2.0))
        self.never = nn.Parameter(torch.tensor(3.0))
        self.frozen = nn.Parameter(torch.tensor(4.0), requires_grad=False)
        self.always = nn.Parameter(torch.tensor(1.0))
        self.tied = self.always

    def forward(self, x: Tensor) -> Tensor:
        return x * self.tied * (self.sometimes if x.max() > 0 else self.frozen)


def test_parameters_used_by_some_replicas_or_by_none() -> None:
    replicas = lockstep.Replicas(Partly(), 2)
    replicas.optimize(sgd)
    replicas.gradients((torch.tensor([1.0, 2.0, -1.0]),), lambda model, x: model(x).sum())
    replicas.average_gradients()
    for replica in replicas.replicas:
        assert replica.sometimes.grad == 1.0  # type: ignore[comparison-overlap]
        assert replica.always.grad == torch.tensor((3 * 2 - 1 * 4) / 3)  # type: ignore[comparison-overlap]
        assert replica.never.grad is None
        assert replica.frozen.grad is None
    replicas.update()
    replicas.check()
    assert replicas.master.never == 3.0  # type: ignore[comparison-overlap]


def test_every_replica_has_its_own_batch_norm_until_they_are_made_equal() -> None:
    replicas = lockstep.Replicas(nn.Sequential(nn.BatchNorm1d(2, momentum=1.0)), 2)
    x = torch.arange(12.0).view(6, 2)
    replicas(x)
    means = [replica[0].running_mean for replica in replicas.replicas]  # type: ignore[index]
    assert [mean.tolist() for mean in means] == [x[:3].mean(0).tolist(), x[3:].mean(0).tolist()]
    replicas.sync_buffers()
    for module in (replicas.master, *replicas.replicas):
        torch.testing.assert_close(module[0].running_mean, x.mean(0))  # type: ignore[index]
        assert module[0].num_batches_tracked == 1  # type: ignore[index]


def test_state_and_mode_reach_every_copy() -> None:
    replicas = lockstep.Replicas(small(0), 3)
    other = small(1)
    replicas.load_state_dict(other.state_dict())
    replicas.check()
    torch.testing.assert_close(replicas.state_dict(), other.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(weights_of(replicas.replicas[2]), weights_of(other), rtol=0, atol=0)
    dropping = lockstep.Replicas(nn.Dropout(0.5), 2).eval()
    assert torch.equal(dropping(torch.ones(8)), torch.ones(8))
    assert all(module.training for module in (dropping.train().master, *dropping.replicas))


def test_a_replica_that_differs_is_named() -> None:
    module = small()
    module[0].weight.data[0, 0] = torch.nan  # type: ignore[index]
    replicas = lockstep.Replicas(module, 3)
    replicas.check()  # nan everywhere is no difference
    with torch.no_grad():
        replicas.replicas[2][2].bias[1] += 1e-6  # type: ignore[index]
    with refused(
        "in-process-replicas-differ", ReplicaDivergence, parameter="2.bias", ranks=[2]
    ) as caught:
        replicas.check()
    assert (caught.value.parameter, caught.value.ranks) == ("2.bias", (2,))  # type: ignore[attr-defined]


def test_several_devices_work_in_threads_and_one_does_not() -> None:
    """A CPU has one device, so the replicas are told that theirs differ."""
    seen: list[str] = []

    def noting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(threading.current_thread().name)
        return loss_sum(model, x, y)

    replicas = lockstep.Replicas(small(), 2, ["cpu"])
    replicas.gradients(batch(4), noting)
    assert set(seen) == {threading.main_thread().name}
    seen.clear()
    assert replicas.devices == [torch.device("cpu")] * 2
    replicas.devices[1] = torch.device("cpu", 0)
    replicas.gradients(batch(4), noting)
    assert len(seen) == 2
    assert all(name.startswith("replica") for name in seen)
    with torch.no_grad():
        assert not replicas(batch(4)[0]).requires_grad


def ready() -> lockstep.Replicas:
    replicas = lockstep.Replicas(small(), 2)
    replicas.optimize(sgd)
    return replicas


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def test_what_cannot_work_is_said() -> None:
    with refused("wrong-value", name="replicas", value=0):
        lockstep.Replicas(small(), 0)
    with refused("no-devices"):
        lockstep.Replicas(small(), devices=[])
    with refused("unknown-choice", name="algorithm", value="hierarchical"):
        lockstep.Replicas(small(), 2, algorithm="hierarchical")
    with refused("outputs-cannot-be-joined", returned="a 0-d tensor"):
        lockstep.Replicas(Mean(), 2)(torch.ones(4))
    with refused("batch-without-tensors", kind="tuple"):
        ready()(3)
    with refused("tensors-of-unequal-length", lengths=[3, 4]):
        ready().scatter((torch.ones(3), torch.ones(4)))
    with refused("batch-without-samples"):
        ready().gradients(batch(0), loss_sum)
    for weights in ([1], [1, -1], [0, 0]):
        with refused("weights-do-not-fit", weights=[float(weight) for weight in weights]):
            ready().gradients(batch(4), loss_sum, weights=weights)


def test_calls_out_of_order_are_refused() -> None:
    with refused("needs-call-before", call="update()", before="optimize(make_optimizer)"):
        lockstep.Replicas(small(), 2).update()
    replicas = ready()
    average_too_early = {"call": "average_gradients()", "before": "gradients(batch, loss_sum)"}
    with refused("needs-call-before", **average_too_early):
        replicas.average_gradients()
    # a loss that raises leaves nothing to average
    with refused("loss-not-one-number", what="the tensor that loss_sum returned", shape=[2]):
        replicas.gradients(
            batch(4), lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
        )
    with refused("needs-call-before", **average_too_early):
        replicas.average_gradients()
    replicas.gradients(batch(4), loss_sum)
    with refused("needs-call-before", call="update()", before="average_gradients()"):
        replicas.update()
    replicas.average_gradients()
    with refused("needs-call-before", call="average_gradients()"):
        replicas.average_gradients()
