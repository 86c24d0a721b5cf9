"""`lockstep.prepare`: the loop that people have, on any number of ranks, against one process of plain
torch that gets the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

import lockstep
from lockstep.errors import UsageError
from tests.teams import on_team
from tests.training.prepared import (
    RANKS,
    SAMPLES,
    equal,
    noisy_net,
    plain_net,
    same_on_all,
    samples,
    state_of,
)

# -- one model ------------------------------------------------------------------------------------


def usual_loop(
    world: lockstep.World, net: Callable[[], nn.Module] = noisy_net, **options: Any
) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = lockstep.prepare(
        model, optimizer, loader, scheduler, micro_batch=8, world=world, **options
    )
    iterations = 0
    for _ in loader.epochs(2):
        for x, y in loader:
            iterations += 1
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert iterations == 2 * len(loader)
    assert loader.step == 2 * loader.steps == scheduler.last_epoch == 8
    return state_of(model)


def test_the_usual_loop_gives_the_same_bits_on_any_number_of_ranks() -> None:
    same_on_all(partial(usual_loop, exact=True))


def replayed(world: lockstep.World) -> list[list[int]]:
    """The samples of window 1 of epoch 1, which this rank reads while its loop is in epoch 0."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(range(SAMPLES), batch_size=32, shuffle=True)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, micro_batch=8, world=world
    )
    window = loader.window(1, 1)
    batches = loader.indices(1, 1)
    for slot, batch in zip(window.slots, window, strict=True):
        assert batch.tolist() == batches[slot]
    return [batches[slot] for slot in window.slots]


def test_a_prepared_loader_reads_any_window() -> None:
    first = len(order_of(1, 8)) + 4  # 4 micro-batches a step
    parts = on_team(replayed, 2)
    assert parts[0] + parts[1] == order_of(2, 8)[first : first + 4]


def order_of(epochs: int, batch: int) -> list[list[int]]:
    """The global batches of the keyed shuffle."""
    loader = lockstep.Loader(range(SAMPLES), global_batch=batch, micro_batch=batch, rank=0, size=1)
    return [list(map(int, b)) for epoch in loader.epochs(epochs) for w in epoch for b in w]


def old_script(batches: list[list[int]]) -> list[Tensor]:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    x, y = samples().tensors
    for batch in batches:
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_it_trains_what_the_old_script_trains_on_the_same_order(ranks: int, exact: bool) -> None:
    expected = old_script(order_of(2, 32))
    for result in on_team(partial(usual_loop, net=plain_net, exact=exact), ranks):
        for tensor, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-6)


# -- several models, losses, a scaler -------------------------------------------------------------


def gan(world: lockstep.World, backwards: Any = (1, 2)) -> list[Tensor]:
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    d = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_g, of_d = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    g, d, of_g, of_d, loader = lockstep.prepare(
        g, d, of_g, of_d, loader, micro_batch=8, backwards=backwards, exact=True, world=world
    )
    loss = F.binary_cross_entropy_with_logits
    for _ in loader.epochs(2):
        for x, _ in loader:
            real, fake = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            d.zero_grad()
            loss(d(x), real).backward()
            made = g(torch.randn(len(x), 4))
            loss(d(made.detach()), fake).backward()
            of_d.step()
            g.zero_grad()
            loss(d(made), real).backward()  # reaches d too, whose step has its gradients already
            of_g.step()
    return state_of(g, d)


def miscounted(world: lockstep.World, backwards: tuple[int, int]) -> str:
    try:
        gan(world, backwards)
    except UsageError as error:
        return error.code
    return ""


@pytest.mark.parametrize("ranks", RANKS)
def test_backwards_are_counted_for_each_optimizer(ranks: int) -> None:
    """The generator's loss goes through the discriminator too, after its step."""
    few = on_team(partial(miscounted, backwards=(1, 3)), ranks)
    many = on_team(partial(miscounted, backwards=(1, 1)), ranks)
    assert few == ["too-few-backwards"] * ranks
    assert many == ["too-many-backwards"] * ranks


def test_a_gan_gives_the_same_bits_on_any_number_of_ranks() -> None:
    same_on_all(gan)


def sharded(world: lockstep.World, update: str) -> list[Tensor]:
    model = plain_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, micro_batch=8, clip=0.1, update=update, exact=True, world=world
    )
    for _ in loader.epochs(2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return state_of(model)


def test_a_sharded_update_clips_the_whole_gradient() -> None:
    for result, expected in zip(
        on_team(partial(sharded, update="sharded"), 3),
        on_team(partial(sharded, update="replicated"), 3),
        strict=True,
    ):
        for tensor, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-6)


def scaled(world: lockstep.World) -> list[Tensor]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    model, optimizer, loader, scaler = lockstep.prepare(
        model, optimizer, loader, scaler, micro_batch=8, exact=True, world=world
    )
    for _ in loader.epochs(3):
        for x, y in loader:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**127
    assert loader.step == 12
    return [*state_of(model), torch.tensor(scaler.get_scale())]


def test_a_grad_scaler_acts_once_a_window_and_an_overflow_skips_its_step() -> None:
    same_on_all(scaled)


# -- weights --------------------------------------------------------------------------------------


class Sentences(Dataset[Tensor]):
    """Row i has 1 + i % 5 tokens; others are -1."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        row = torch.full((5,), -1.0)
        row[: 1 + index % 5] = float(index)
        return row


def by_tokens(world: lockstep.World, kind: str) -> list[Tensor]:
    model = nn.Linear(1, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reduction = {"sum": "sum", "as is": "as is"}.get(kind, "mean")
    weight = (lambda rows: int((rows >= 0).sum())) if kind == "tokens, by prepare" else None
    model, optimizer, loader = lockstep.prepare(
        model,
        optimizer,
        DataLoader(Sentences(), batch_size=12),
        micro_batch=3,
        reduction=reduction,
        weight=weight,
        world=world,
    )
    for _ in loader.epochs(1):
        for rows in loader:
            tokens = rows[rows >= 0].double()[:, None]
            squares = (model(tokens) - 1) ** 2
            if kind == "tokens":
                lockstep.weigh(len(tokens))
            if kind.startswith("tokens"):
                squares.mean().backward()
            else:
                squares.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("kind", ["tokens", "tokens, by prepare", "sum", "as is"])
def test_the_weight_is_what_the_loss_is_a_mean_over(kind: str) -> None:
    model = nn.Linear(1, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    data = Sentences()
    for begin in (0, 12):
        rows = torch.stack([data[index] for index in range(begin, begin + 12)])
        tokens = rows[rows >= 0].double()[:, None]
        squares = (model(tokens) - 1) ** 2
        divisor = {"sum": 12, "as is": 1}.get(kind, len(tokens))
        model.zero_grad()
        (squares.sum() / divisor).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
    for ranks in RANKS:
        for result in on_team(partial(by_tokens, kind=kind), ranks):
            for tensor, expected in zip(result, state_of(model), strict=True):
                torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=0)


# -- what the loop may do -------------------------------------------------------------------------


def counting(world: lockstep.World) -> tuple[float, float]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samples()
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, DataLoader(data, batch_size=32), micro_batch=16, world=world
    )

    def evaluation() -> float:
        batches = lockstep.evaluating(DataLoader(data, batch_size=7, shuffle=True))
        return lockstep.total(count=sum(len(x) for x, _ in batches))["count"]

    seen = 0.0
    for _ in loader.epochs(1):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += lockstep.total(count=len(x))["count"]
            if loader.step == 1:  # where a rank may have only copies
                evaluated = evaluation()
    assert evaluated == SAMPLES
    return seen, evaluation()


@pytest.mark.parametrize("ranks", RANKS)
def test_padding_counts_nothing_and_an_evaluation_counts_once(ranks: int) -> None:
    assert on_team(counting, ranks) == [(SAMPLES, SAMPLES)] * ranks


def leaving_out(world: lockstep.World, clip: float | None = None) -> list[Tensor]:
    """Micro-batches whose first label is 0 are left out. In the first step one rank of three sees
    only such.
    """
    model = noisy_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = lockstep.prepare(
        model, optimizer, loader, scheduler, micro_batch=8, exact=True, world=world
    )
    for _ in loader.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if y[0] == 0:
                continue
            if clip is not None and loader.step == 2 and loader.stepped:
                continue
            lockstep.log(first=float(y[0]))
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert loader.step == 12
    assert loader.logged["first"] >= 1
    return state_of(model)


def test_a_micro_batch_without_a_backward_is_left_out_on_any_number_of_ranks() -> None:
    same_on_all(leaving_out)


def leaving_out_a_clip(world: lockstep.World) -> str:
    try:
        leaving_out(world, clip=0.01)
    except UsageError as error:
        return error.code
    return ""


def test_a_clip_that_a_rank_would_not_reach_is_refused() -> None:
    assert on_team(leaving_out_a_clip, 1) == ["left-out-before-clip"]


def own_generator(world: lockstep.World) -> list[int]:
    data = DataLoader(
        range(20),  # type: ignore[arg-type]
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=8, world=world)
    order: list[int] = []
    for _ in loader.epochs(3):
        for batch in loader:
            order += batch.tolist()
            model(torch.randn(len(batch), 6)).sum().backward()
            optimizer.step()
    return order


def test_the_order_of_a_generator_is_that_of_the_old_script() -> None:
    data = DataLoader(
        range(20),  # type: ignore[arg-type]
        batch_size=8,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )
    expected = [int(index) for _ in range(3) for batch in data for index in batch]
    assert on_team(own_generator, 1) == [expected]


def endless_sampler(world: lockstep.World) -> list[int]:
    numbers: Any = range(20)
    sampler = RandomSampler(numbers, replacement=True, num_samples=10**10)
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = DataLoader(numbers, batch_size=8, sampler=sampler)
    _, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=2, world=world)
    drawn: list[int] = []
    for batch in loader.endless():
        drawn += batch.tolist()
        model(torch.randn(len(batch), 6)).sum().backward()
        optimizer.step()
        if loader.step == 50:
            break
    return drawn


def test_draws_with_replacement_may_be_more_than_memory_holds() -> None:
    (drawn,) = on_team(endless_sampler, 1)
    assert set(drawn) == set(range(20))
    first, second = on_team(endless_sampler, 2)
    assert sorted(first + second) == sorted(drawn)


# -- bad input ------------------------------------------------------------------------------------


def refusal(world: lockstep.World, mistake: str) -> str:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = samples()
    options: dict[str, Any] = {"micro_batch": 8, "world": world}
    loader: Any = DataLoader(data, batch_size=32)
    if mistake == "no batches":
        loader = DataLoader(data, batch_size=None)
    if mistake == "unequal batches":
        loader = DataLoader(data, batch_sampler=[[0, 1], [2], [3, 4]])
    if mistake == "wrapped":
        model = DistributedDataParallel(model)
    if mistake == "backwards":
        options["backwards"] = (1, 2)
    if mistake == "a typo":
        options["microbatch"] = options.pop("micro_batch")
    if mistake == "witness":
        options |= {"witness": 0.5, "exact": True}
    if mistake == "server":
        options["update"] = "server"
    if mistake == "clip of slices":
        options["update"] = "sharded"
    if mistake == "worker init":
        loader = DataLoader(data, batch_size=32, num_workers=1, worker_init_fn=print)
    if mistake == "other parameters":
        optimizer = torch.optim.SGD(plain_net().parameters(), lr=0.1)
    try:
        if mistake == "no optimizer":
            lockstep.prepare(model, loader, **options)
        if mistake == "a loss":
            lockstep.prepare(model, optimizer, loader, nn.functional.mse_loss, **options)
        if mistake == "two loaders in a run":
            lockstep.prepare(model, optimizer, loader, loader, run="run", **options)
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader, **options)
        if mistake == "twice":
            lockstep.prepare(model, optimizer, DataLoader(data, batch_size=32), **options)
        if mistake == "step outside":
            optimizer.step()
        if mistake == "weigh outside":
            lockstep.weigh(1)
        for _ in loader.epochs(2):
            for number, (x, y) in enumerate(loader):
                if mistake == "loop in loop":
                    next(iter(loader))
                F.cross_entropy(model(x), y).backward()
                if mistake == "second backward":
                    F.cross_entropy(model(x), y).backward()
                if mistake == "clip of slices":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if mistake == "log":
                    lockstep.log(lr=0.1)
                if mistake == "weigh late":
                    lockstep.weigh(1)
                if mistake == "no step" or (mistake == "accumulation" and number % 4 != 3):
                    continue
                if mistake == "written":
                    parameter = next(model.parameters())
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                if mistake == "left" and number == 0:
                    break
    except UsageError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("no batches", "dataloader-without-batches"),
        ("unequal batches", "global-batches-of-different-size"),
        ("other parameters", "optimizer-of-other-models"),
        ("no optimizer", "nothing-to-prepare"),
        ("twice", "prepared-twice"),
        ("a loss", "cannot-prepare"),
        ("wrapped", "already-wrapped"),
        ("backwards", "wrong-value"),
        ("two loaders in a run", "several-run-loaders"),
        ("worker init", "dataloader-with-worker-init"),
        ("loop in loop", "two-prepared-loops"),
        ("step outside", "step-outside-loop"),
        ("weigh outside", "outside-prepared-loop"),
        ("second backward", "too-many-backwards"),
        ("server", "not-in-prepared-loop"),
        ("clip of slices", "slices-written"),
        ("log", "metric-name-taken"),
        ("weigh late", "weigh-after-backward"),
        ("no step", "window-without-step"),
        ("accumulation", "window-without-step"),
        ("a typo", "unknown-name"),
        ("written", "partial-gradient-written"),
        ("left", "window-left"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_is_an_error_with_a_code_on_all_ranks(
    mistake: str, code: str, ranks: int
) -> None:
    assert on_team(partial(refusal, mistake=mistake), ranks) == [code] * ranks


def test_a_witness_is_refused() -> None:
    assert on_team(partial(refusal, mistake="witness"), 3) == ["not-in-prepared-loop"] * 3


def adding_up_copies(world: lockstep.World) -> int:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(samples(), batch_size=32)
    model, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=16, world=world)
    seen = 0
    for _ in loader.epochs(1):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += len(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.total(seen=seen)
        lockstep.total(seen=seen)
    return len(caught)


def test_who_adds_up_copies_is_told_once() -> None:
    assert on_team(adding_up_copies, 1) == [0]
    assert on_team(adding_up_copies, 3) == [0, 1, 1]  # rank 0 has a share of every step


def by_batch_sampler(world: lockstep.World) -> list[list[int]]:
    batches = BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = DataLoader(range(10), batch_sampler=batches)  # type: ignore[arg-type]
    _, optimizer, loader = lockstep.prepare(model, optimizer, data, micro_batch=4, world=world)
    seen = []
    for _ in loader.epochs(1):
        for batch in loader:
            seen.append(batch.tolist())
            model(torch.randn(len(batch), 6)).sum().backward()
            optimizer.step()
    return seen


def test_a_batch_sampler_gives_the_global_batches() -> None:
    assert on_team(by_batch_sampler, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]]


# -- closures -------------------------------------------------------------------------------------


def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(50, 1, generator=generator, dtype=torch.float64)


def tanh_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=6, line_search_fn="strong_wolfe")


def with_closures(
    world: lockstep.World, micro_batch: int | None = 10, exact: bool = True, bound: bool = True
) -> list[Tensor]:
    model = tanh_net()
    data = DataLoader(TensorDataset(*regression()), batch_size=25)
    model, optimizer, loader = lockstep.prepare(
        model, lbfgs(model), data, micro_batch=micro_batch, exact=exact, world=world
    )
    for _ in loader.epochs(3):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            def of_the_last_batch() -> Tensor:
                return closure(x, y)  # noqa: B023 - that is the mistake

            optimizer.step(closure if bound else of_the_last_batch)
    return state_of(model)


def old_lbfgs() -> list[Tensor]:
    model = tanh_net()
    optimizer = lbfgs(model)
    x, y = regression()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        return loss

    for rows in (slice(25), slice(25, 50)) * 3:  # noqa: B007 - the closure looks it up
        optimizer.step(closure)
    return state_of(model)


def test_an_optimizer_may_evaluate_the_window_again() -> None:
    for result in (same_on_all(with_closures), *on_team(partial(with_closures, exact=False), 2)):
        for tensor, expected in zip(result, old_lbfgs(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)


def test_a_closure_may_look_its_batch_up_where_a_rank_has_one_micro_batch() -> None:
    result = on_team(partial(with_closures, micro_batch=None, exact=False, bound=False), 3)
    for tensor, expected in zip(result[0], old_lbfgs(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12)


def unbound(world: lockstep.World) -> str:
    try:
        with_closures(world, bound=False)
    except UsageError as error:
        return error.code
    return ""


@pytest.mark.parametrize("ranks", RANKS)
def test_a_closure_that_may_mean_another_batch_is_refused(ranks: int) -> None:
    assert on_team(unbound, ranks) == ["closure-not-bound"] * ranks


# -- streams, several loaders, carried states -----------------------------------------------------


class Numbers(IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        yield from samples().tensors[0][: self.count]


def streamed(world: lockstep.World, count: int = 90) -> list[Tensor]:
    model = noisy_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = DataLoader(Numbers(count), batch_size=32)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, data, micro_batch=8, exact=True, world=world
    )
    iterations = 0
    for _ in loader.epochs(2):
        for x in loader:
            iterations += 1
            model(x).square().mean().backward()
            optimizer.step()
    assert lockstep.total(iterations=iterations)["iterations"] == iterations * world.size
    assert loader.step == 6
    return state_of(model)


def test_a_stream_gives_the_same_bits_on_any_number_of_ranks() -> None:
    """The last step of an epoch has four micro-batches of which one is short; 70 items leave one
    rank of three without any.
    """
    same_on_all(streamed)
    same_on_all(partial(streamed, count=70))


def in_turns(world: lockstep.World) -> list[Tensor]:
    """Two loaders, one after the other in each epoch."""
    model = noisy_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    few, many = DataLoader(samples(40), batch_size=32), DataLoader(samples(), batch_size=32)
    model, optimizer, first, second = lockstep.prepare(
        model, optimizer, few, many, micro_batch=8, exact=True, world=world
    )
    for _ in range(2):
        for loader in (first, second):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert first.step == second.step == 12
    return state_of(model)


def test_loaders_train_one_model_in_turns() -> None:
    same_on_all(in_turns)


# -- other losses and other models ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._middle, self.first(x), use_reentrant=self.reentrant)
        return self.second(hidden)  # type: ignore[no-any-return]

    def _middle(self, x: Tensor) -> Tensor:
        return F.dropout(x.tanh(), 0.3)


def special(world: lockstep.World, kind: str) -> list[Tensor]:
    model: Any = noisy_net()
    judge = plain_net()
    if kind.startswith("checkpoint"):
        torch.manual_seed(0)
        model = Checkpointed(kind == "checkpoint, reentrant")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager") if kind == "compiled" else model
    loader = DataLoader(samples(), batch_size=32, shuffle=True)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, micro_batch=8, exact=True, world=world
    )
    for _ in loader.epochs(2):
        for x, y in loader:
            if kind == "another model":  # trained by the script itself, alike on all ranks
                F.cross_entropy(judge(torch.ones(1, 6)), torch.tensor([1])).backward()
                of_judge.step()
                of_judge.zero_grad()
            x.requires_grad_(kind == "gradient penalty")
            loss = F.cross_entropy(forward(x), y)
            if kind == "gradient penalty":
                (gradient,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
                loss = loss + gradient.square().sum() / len(x)
            if kind == "term outside":
                loss = loss + sum(weight.square().sum() for weight in model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "validation":
                model.eval()
                with torch.no_grad():
                    forward(x)
                model.train()
            if kind == "forward in training mode":
                forward(x)
    return state_of(model)


@pytest.mark.parametrize(
    "kind",
    [
        "another model",
        "gradient penalty",
        "term outside",
        "compiled",
        "checkpoint, reentrant",
        "checkpoint",
        "forward in training mode",
    ],
)
def test_what_loops_do_gives_the_same_bits_on_any_number_of_ranks(kind: str) -> None:
    same_on_all(partial(special, kind=kind))


def test_a_validation_inside_the_loop_changes_nothing() -> None:
    assert equal(
        same_on_all(partial(special, kind="validation")),
        on_team(partial(special, kind="usual"), 1)[0],
    )
