"""The rules for what people write every day: each mistake once or more, and beside it what looks
like it and is right.
"""

from __future__ import annotations

import pytest

from lockstep.tools.lint import check_source
from tests.tools.lint.snippets import agrees

WRONG = {
    "a gradient that only some ranks have": """
for p in model.parameters():
    if p.grad is not None:
        dist.all_reduce(p.grad)  # <- gradient-conditional-collective
""",
    "the same, by continue": """
for p in model.parameters():
    if p.grad is None:
        continue
    dist.all_reduce(p.grad)  # <- gradient-conditional-collective
""",
    "seeds of the weights": """
torch.manual_seed(args.seed + rank)  # <- seed-plus-rank
torch.cuda.manual_seed_all(dist.get_rank() + seed)  # <- seed-plus-rank
model = Net()
""",
    "the seed is the rank": """
torch.manual_seed(rank)  # <- seed-plus-rank
torch.manual_seed(int(os.environ["RANK"]))  # <- seed-plus-rank
criterion(model(x), y).backward()
""",
    "a sum that is never divided": """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # <- undivided-sum
    optimizer.step()
    print(total / len(loader), total / 100)
""",
    "a sum in a function, by its name": """
criterion = nn.MSELoss()
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)  # <- undivided-sum
def train():
    loss = criterion(model(x), y)
    loss.backward()
    average_gradients(model)
    optimizer.step()
""",
    "one seed for all epochs": """
for epoch in range(3):
    g = torch.Generator()
    g.manual_seed(0)  # <- constant-seed
    order = torch.randperm(n, generator=g)
    for i in order[rank::world_size]:
        train_step(data[i])
""",
    "one seed for all epochs, of the process": """
seed = 7
for epoch in range(3):
    random.seed(seed)  # <- constant-seed
    random.shuffle(indices)
    for i in indices:
        model(data[i]).backward()
""",
    "one seed for all epochs, in one line": """
for ep in range(3):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed))  # <- constant-seed
    fit(model, order)
""",
    "a group of some ranks": """
if rank < 2:
    group = dist.new_group([0, 1])  # <- rank-conditional-collective
if rank in (2, 3):
    group = dist.new_group([2, 3], backend="gloo")  # <- rank-conditional-collective
""",
    "everything on the first GPU": """
tensor = torch.tensor([rank], device='cuda')
dist.all_reduce(tensor, op=dist.ReduceOp.SUM)  # <- device-not-set
dist.broadcast(torch.ones(3).cuda(), 0)  # <- device-not-set
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.all_reduce(torch.ones(3).to(device))  # <- device-not-set
""",
    "a port": """
os.environ["MASTER_PORT"] = "12355"  # <- fixed-port
os.environ['MASTER_PORT'] = str(12355)  # <- fixed-port
dist.init_process_group("gloo", init_method="tcp://localhost:29500")  # <- fixed-port
""",
    "a variable that nobody reads": """
os.environ["NCCL_TIMEOUT"] = "1800"  # <- nccl-timeout
os.environ.setdefault("NCCL_TIMEOUT", "1800")  # <- nccl-timeout
""",
    "devices": """
def train(rank, world_size):
    torch.cuda.set_device(rank)  # <- device-from-rank
    model = Net().to(rank)  # <- device-from-rank
    model = Net().cuda(dist.get_rank())  # <- device-from-rank
    model = DDP(model, device_ids=[rank], output_device=rank)  # <- device-from-rank
    x = x.to(device=f"cuda:{rank}")  # <- device-from-rank
    y = y.to(torch.device("cuda", self.rank))  # <- device-from-rank
""",
    "data": """
inputs = torch.randn(1000, 10)  # <- unseeded-data
dataset = TensorDataset(inputs, torch.randint(0, 2, (1000,)))  # <- unseeded-data
sampler = DistributedSampler(dataset)
""",
    "a sum": """
def train(model):
    output = model(batch)
    loss = output.sum()  # <- sum-loss
    loss.backward()
    optimizer.step()
""",
    "a sum in place": """
ddp(batch).sum().backward()  # <- sum-loss
optimizer.step()
""",
    "the last loss": """
for epoch in range(9):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        value = loss.item()
        print(value)
    if rank == 0:
        print(f"{epoch}: {loss.item()}")  # <- last-batch-loss
        logging.info(value)  # <- last-batch-loss
print({"loss": loss})  # <- last-batch-loss
""",
    "copies": """
loader = DataLoader(data, batch_size=8, pin_memory=True)
for i, (x, y) in enumerate(loader):
    x = x.to(device)  # <- blocking-copy
    y = y.cuda()  # <- blocking-copy
for batch in tqdm(loader):
    batch = {name: value.to(self.device) for name, value in batch.items()}  # <- blocking-copy
""",
    "a tail": """
for i, (x, y) in enumerate(loader):
    loss = model(x, y) / n
    loss.backward()
    if (i + 1) % n == 0:
        optimizer.step()  # <- accumulation-tail
        optimizer.zero_grad()
""",
    "a tail with a scaler, counted from one": """
for step, batch in enumerate(tqdm(loader), start=1):
    scaler.scale(model(batch)).backward()
    if step % 4 == 0:
        scaler.step(optimizer)  # <- accumulation-tail
""",
    "padded samples, accelerate": """
with torch.no_grad():
    for batch in loader:
        predictions.append(accelerator.gather(model(batch)))  # <- padded-metric
""",
    "padded samples": """
def evaluate():
    test_loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))
    with torch.no_grad():
        for x, y in test_loader:
            correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)  # <- padded-metric
    return correct / len(data)
""",
}
IMPORTS = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
"""
PINNED = "loader = DataLoader(data, pin_memory=True)\nfor x in loader:\n"
EVALUATION = "with torch.no_grad():\n    for x in loader:\n"
WRAPPED = "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(net)\n"
TURN = "for i, x in enumerate(loader):\n    model(x).backward()\n"
SHARED = "loader = DataLoader(data, sampler=DistributedSampler(data))\n"
LAST = """
for epoch in range(9):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        {}
    {}
"""
SUMMED = "F.mse_loss(x, y).backward()\nfor p in ps:\n    {}\noptimizer.step()\n"
EPOCHS = """
for epoch in range(3):
    {}
    order = torch.randperm(n, generator=g)
    train(data[order])
"""
ON_CUDA = "dist.all_reduce(torch.ones(3, device='cuda'))"
RIGHT = {
    "every parameter": """
for p in ps:
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    dist.all_reduce(p.grad)
""",
    "a gradient that is read": """
for p in ps:
    if p.grad is not None:
        norm += p.grad.norm()
dist.all_reduce(norm)
""",
    "a group's business": "if p.grad is not None:\n    dist.all_reduce(p.grad, group=tensor_parallel)",
    "weights that are sent": "torch.manual_seed(seed + rank)\nmodel = DDP(Net())",
    "sent by hand": "torch.manual_seed(seed + rank)\nfor p in ps:\n    dist.broadcast(p.data, 0)",
    "a generator's own seed": "g = torch.Generator()\ng.manual_seed(seed + rank)",
    "numpy's seed": "np.random.seed(seed + rank)",
    "one seed": "torch.manual_seed(seed + epoch)",
    "a rank's seed without a training": "torch.manual_seed(rank)\ndist.all_reduce(torch.randn(3))",
    "a rank's seed, and weights that are sent": (
        "torch.manual_seed(rank)\nmodel = DDP(net)\nmodel(x).backward()"
    ),
    "another number": "torch.manual_seed(worker)\nmodel(x).backward()",
    "an average": SUMMED.format("dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)"),
    "a gradient that is divided": SUMMED.format(
        "dist.all_reduce(p.grad)\n    p.grad /= dist.get_world_size()"
    ),
    "a gradient that is divided in place": SUMMED.format(
        "dist.all_reduce(p.grad)\n    p.grad.div_(n)"
    ),
    "a learning rate that is divided": (
        "optimizer = SGD(ps, lr=0.1 / world_size)\n" + SUMMED.format("dist.all_reduce(p.grad)")
    ),
    "a loss that is divided": SUMMED.replace("F.mse_loss(x, y)", "(F.mse_loss(x, y) / n)").format(
        "dist.all_reduce(p.grad)"
    ),
    "a sum of a sum": SUMMED.replace("(x, y)", "(x, y, reduction='sum')").format(
        "dist.all_reduce(p.grad)"
    ),
    "a sum in a group": SUMMED.format("dist.all_reduce(p.grad, group=replicas)"),
    "a sum of no gradient": SUMMED.format("dist.all_reduce(p)"),
    "a seed for each epoch": EPOCHS.format("g.manual_seed(seed + epoch)"),
    "a seed that changes": EPOCHS.format("seed += 1\n    g.manual_seed(seed)"),
    "a seed by a function": EPOCHS.format("g.manual_seed(new_seed())"),
    "another generator": EPOCHS.format("other.manual_seed(0)"),
    "the process's seed, which the generator does not use": EPOCHS.format("torch.manual_seed(0)"),
    "a seed for an evaluation": (
        "for epoch in range(3):\n    train(epoch)\n    torch.manual_seed(0)\n"
        "    show(data[torch.randperm(9)])"
    ),
    "one seed for each of several runs": EPOCHS.replace("epoch", "fold").format("g.manual_seed(0)"),
    "one seed before": f"g.manual_seed(0)\n{EPOCHS.format('pass')}",
    "losses that are added up": LAST.format("total += loss.item()", "print(total, loss)"),
    "losses that are added": LAST.format("total = total + loss.item()", "print(total, loss)"),
    "losses that are collected": LAST.format("meter.update(loss.item())", "print(loss)"),
    "a loss that is called the last": LAST.format("", "print(f'last batch: {loss}')"),
    "another loss after the epoch": LAST.format("", "loss = evaluate(model)\n    print(loss)"),
    "no epoch's loss": LAST.replace("epoch", "run").format("", "print(loss)"),
    "one batch an epoch": (
        "for epoch in range(9):\n    for part in parts:\n        loss = model(part)\n"
        "        loss.backward()\n    optimizer.step()\n    print(loss)"
    ),
    "a group by all ranks": "group = dist.new_group([0, 1])\nif rank < 2:\n    use(group)",
    "groups by all ranks": "if world_size > 2:\n    group = dist.new_group([0, 1])",
    "a device that is set": f"torch.cuda.set_device(local_rank)\n{ON_CUDA}",
    "a device by the group": f"dist.init_process_group(device_id=device)\n{ON_CUDA}",
    "a device by its number": "dist.all_reduce(torch.ones(3, device=f'cuda:{local}'))",
    "one device a process": f"os.environ['CUDA_VISIBLE_DEVICES'] = gpu\n{ON_CUDA}",
    "the processor": "dist.all_reduce(torch.ones(3))\ndist.all_reduce(torch.ones(3, device='cpu'))",
    "no collective": "t = torch.ones(3, device='cuda')\nmodel(t)",
    "a default port": 'os.environ.setdefault("MASTER_PORT", "12355")',
    "a free port": 'os.environ["MASTER_PORT"] = str(free_port())\nos.environ["MASTER_PORT"] = "0"',
    "a port where none is given": (
        'if "MASTER_PORT" not in os.environ:\n    os.environ["MASTER_PORT"] = "12355"'
    ),
    "a port by name": 'dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}")',
    "a port by environment": 'dist.init_process_group("gloo", init_method="env://")',
    "what NCCL reads": 'os.environ["NCCL_DEBUG"] = "INFO"\nos.environ["NCCL_IB_TIMEOUT"] = "22"',
    "the local rank": "torch.cuda.set_device(local_rank)\nDDP(model, device_ids=[local_rank])",
    "the local rank's device": 'model.to(local_rank)\nx.to(f"cuda:{local_rank}")',
    "the local rank by another name": 'rank = int(os.environ["LOCAL_RANK"])\nmodel.to(rank)',
    "the rank on its node": "rank = dist.get_rank() % torch.cuda.device_count()\nmodel.to(rank)",
    "the rank in eights": "other.to(dist.get_rank() % 8)",
    "a number of a loop": "for rank in range(4):\n    model.to(rank)",
    "seeded data": "torch.manual_seed(0)\ndata = torch.randn(9, 2)\nDistributedSampler(data)",
    "data with a generator": "data = torch.randn(9, 2, generator=g)\nDistributedSampler(data)",
    "noise": "noise = torch.randn(9, 2)\nDistributedSampler(data)",
    "a mean": "loss = output.mean()\nloss.backward()\noptimizer.step()",
    "a sum that is divided": "loss = output.sum() / total\nloss.backward()\noptimizer.step()",
    "sums along a dimension": "losses.sum(1).backward()\noptimizer.step()",
    "a sum without an optimizer": "model(x).sum().backward()",
    "copies that overlap": f"{PINNED}    x = x.to(device, non_blocking=True)\n    x.cuda(0, True)",
    "no pinned memory": "loader = DataLoader(data)\nfor x in loader:\n    x = x.to(device)",
    "a kind of number": f"{PINNED}    x = x.to(torch.float32)\n    model.to(device)",
    "a tail that is stepped": (
        f"{TURN}    if (i + 1) % n == 0 or i + 1 == len(loader):\n        optimizer.step()"
    ),
    "a tail that cannot be": (
        f"assert len(loader) % n == 0\n{TURN}    if (i + 1) % n == 0:\n        optimizer.step()"
    ),
    "a report": f"{TURN}    optimizer.step()\n    if (i + 1) % n == 0:\n        print(i)",
    "gathered for metrics": f"{EVALUATION}        accelerator.gather_for_metrics(model(x))",
    "gathered in training": "for x in loader:\n    total += accelerator.gather(loss)",
    "whole shares": (
        "loader = DataLoader(data, sampler=DistributedSampler(data, drop_last=True))\n"
        f"{EVALUATION}        n += model(x)\ndist.all_reduce(n)"
    ),
    "no evaluation": f"{SHARED}for x in loader:\n    seen += len(x)\ndist.all_reduce(seen)",
    "training": (
        f"{SHARED}loader.sampler.set_epoch(0)\n"
        "for x in loader:\n    model(x).backward()\ndist.all_reduce(loss)"
    ),
}


@pytest.mark.parametrize("name", WRONG | RIGHT)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(IMPORTS + (WRONG | RIGHT)[name])


FIXES = {
    'os.environ["MASTER_PORT"] = "12355"  # the port\n': (
        'os.environ.setdefault("MASTER_PORT", "12355")  # the port\n'
    ),
    "local_rank = 0\ndata, target = data.to(rank), target.to(rank)\n": (
        "local_rank = 0\ndata, target = data.to(local_rank), target.to(local_rank)\n"
    ),
    f"{PINNED}    x = x.to(device)\n    x.cuda()\n": (
        f"{PINNED}    x = x.to(device, non_blocking=True)\n    x.cuda(non_blocking=True)\n"
    ),
    f"{EVALUATION}        accelerator.gather( x )\n": (
        f"{EVALUATION}        accelerator.gather_for_metrics( x )\n"
    ),
    f"{WRAPPED}m.module(x).backward()\n": f"{WRAPPED}m(x).backward()\n",
}


@pytest.mark.parametrize("text", FIXES)
def test_safe_fixes(text: str) -> None:
    checked = check_source(text.encode())
    assert (checked.fixed or b"").decode() == FIXES[text]
    assert check_source(checked.fixed or b"").findings == []


@pytest.mark.parametrize(
    ("encoding", "newline"), [("latin-1", "\n"), ("latin-1", "\r\n"), ("utf-8", "\r")]
)
def test_fixes_are_where_the_encoding_and_the_newlines_say(encoding: str, newline: str) -> None:
    lines = [f"# coding: {encoding}", 'é = "ü"; os.environ["MASTER_PORT"] = "1"; x = 1', ""]
    checked = check_source(newline.join(lines).encode(encoding))
    lines[1] = 'é = "ü"; os.environ.setdefault("MASTER_PORT", "1"); x = 1'
    assert checked.fixed == newline.join(lines).encode(encoding)


def test_a_fix_inside_another_one_waits_for_the_next_run() -> None:
    text = f"local_rank = 0\n{PINNED}    x = x.to(rank)\n"
    once = check_source(text.encode()).fixed or b""
    assert b"x.to(rank, non_blocking=True)" in once
    assert b"x.to(local_rank, non_blocking=True)" in (check_source(once).fixed or b"")


def test_what_is_ignored_is_not_fixed_and_what_has_no_safe_fix_is_left() -> None:
    ignored = b'os.environ["MASTER_PORT"] = "12355"  # lockstep: ignore[fixed-port]\n'
    assert check_source(ignored).fixed is None
    checked = check_source(b"if rank == 0:\n    torch.distributed.barrier()\n")
    assert len(checked.findings) == 1
    assert checked.fixed is None
