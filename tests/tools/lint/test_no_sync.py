"""no-sync-modulo and no-sync-tail: which residue is the last micro-batch of a window, in all the
ways to write it. clip-inside-no-sync: before the gradient is the sum of all, by no_sync() or by the
order of lines.
"""

from __future__ import annotations

import pytest

from tests.tools.lint.snippets import agrees

LAST = "i == len(loader) - 1"


@pytest.mark.parametrize(
    ("loop", "without_exchange", "rule"),
    [
        ("i in range(len(loader))", "i % 4", "no-sync-modulo"),
        ("i, batch in enumerate(loader)", "(i + 1) % 4 == 0", "no-sync-modulo"),
        ("i, batch in enumerate(loader)", f"i % 4 != 0 and not {LAST}", "no-sync-modulo"),
        (
            "i, batch in enumerate(loader)",
            "i % 4 != 0 and (i + 1) % len(loader) != 0",
            "no-sync-modulo",
        ),
        ("i, batch in enumerate(loader, start=1)", "(i - 1) % 4", "no-sync-modulo"),
        ("i, batch in enumerate(loader)", "(i + 1) % 4 != 0", "no-sync-tail"),
        ("i, batch in enumerate(loader)", "world_size > 1 and i % n != n - 1", "no-sync-tail"),
        ("i, batch in enumerate(loader)", "(i + 1) % 4 != 0 and (i + 1) % len(loader) != 0", ""),
        ("i in range(n)", "i < n - 1", ""),
        ("i in range(n)", "(i + 1) % n != 0", ""),  # one window
        ("i in range(steps * n)", "(i + 1) % n != 0", ""),  # whole windows
        ("i, batch in enumerate(whole.chunk(n))", "(i + 1) % n != 0", ""),
        ("i, batch in enumerate(loader, start)", "i % 4 != 0", ""),  # it may be a resumed run
        ("i, batch in enumerate(loader)", "i % 4 != 0 and not window_is_over(i)", ""),
        ("i, batch in enumerate(loader)", "i % 1 != 0", ""),
    ],
)
def test_which_micro_batch_of_a_window_is_exchanged(
    loop: str, without_exchange: str, rule: str
) -> None:
    mark = f"  # <- {rule}" if rule else ""
    agrees(
        f"for {loop}:\n"
        f"    with model.no_sync() if {without_exchange} else nullcontext():{mark}\n"
        "        model(batch).backward()\n"
    )


SNIPPETS = {
    "with under if": """
for i, batch in enumerate(loader):
    if i % 4 != 0:
        with model.no_sync():  # <- no-sync-modulo
            model(batch).backward()
    else:
        model(batch).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
""",
    "nullcontext first, in a bar": """
for i, batch in tqdm(enumerate(loader), total=10):
    with nullcontext() if i % 4 == 0 else model.no_sync():  # <- no-sync-modulo
        model(batch).backward()
""",
    "a name for the context": """
def train():
    for i, batch in enumerate(loader):
        context = self.model.no_sync if 0 != i % self.n else nullcontext  # <- no-sync-modulo
        with context():
            self.model(batch).backward()
""",
    "ExitStack": """
for i, batch in enumerate(loader):
    with ExitStack() as stack:
        if distributed and i % 4 > 0:
            stack.enter_context(model.no_sync())  # <- no-sync-modulo
        model(batch).backward()
""",
    "fabric, a name for the condition": """
for iteration, batch in enumerate(loader):
    is_accumulating = iteration % 8 != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):  # <- no-sync-modulo
        fabric.backward(model(batch))
    if not is_accumulating:
        optimizer.step()
""",
    "a counter, raised after": """
step = 0
for batch in loader:
    with model.no_sync() if step % 4 != 0 else nullcontext():  # <- no-sync-modulo
        model(batch).backward()
    step += 1
""",
    "a parameter, but the step disagrees": """
def training_step(model, batch, i):
    with model.no_sync() if i % 4 != 0 else nullcontext():  # <- no-sync-modulo
        model(batch).backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
""",
    "the flag of torch's wrapper": """
for i, batch in enumerate(loader):
    model.require_backward_grad_sync = i % 4 == 0  # <- no-sync-modulo
    model(batch).backward()
""",
    "tail, from one": """
for i, batch in enumerate(loader, 1):
    if i % n == 0:
        model(batch).backward()
    else:
        with accelerator.no_sync(model):  # <- no-sync-tail
            model(batch).backward()
""",
    "the last batch counts": """
for i, batch in enumerate(loader):
    last = (i + 1) % 4 == 0 or i + 1 == len(loader)
    with nullcontext() if last else model.no_sync():
        model(batch).backward()
""",
    "an elif for the last": """
for i, batch in enumerate(loader):
    if i == n_batches - 1:
        model(batch).backward()
    elif (i + 1) % 4:
        with model.no_sync():
            model(batch).backward()
    else:
        model(batch).backward()
""",
    "an endless stream that is left": """
for i, batch in enumerate(stream):
    if i == steps * n:
        break
    with model.no_sync() if (i + 1) % n != 0 else nullcontext():
        model(batch).backward()
""",
    "a counter that was raised before": """
step = 0
for epoch in range(3):
    for batch in loader:
        step += 1
        with model.no_sync() if step % 4 != 0 else nullcontext():
            model(batch).backward()
""",
    "raised between the block and the step": """
def train(step):
    for batch in loader:
        with model.no_sync() if (step + 1) % 4 != 0 else nullcontext():
            model(batch).backward()
        step += 1
        if step % 4 == 0:
            optimizer.step()
""",
    "a counter that is raised sometimes": """
step = 0
for batch in loader:
    with model.no_sync() if step % 4 != 0 else nullcontext():
        model(batch).backward()
    if batch:
        step += 1
""",
    "a counter of unknown start": """
def step(model, batch, i):
    with model.no_sync() if i % 4 != 0 else nullcontext():
        model(batch).backward()
""",
    "a modulo that has nothing to do with it": """
for i, batch in enumerate(loader):
    if i % 100 == 0:
        print(i)
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        model(batch).backward()
""",
}


IMPORTS = (
    "import torch.distributed as dist\nfrom torch.nn.utils import clip_grad_norm_\nimport"
    " lockstep\n"
)
CLIPPED = {
    "inside, for a condition": """
with model.no_sync():
    loss.backward()
    if clip:
        clip_grad_value_(model.parameters(), clip)  # <- clip-inside-no-sync
""",
    "fabric": """
with fabric.no_backward_sync(model, enabled=accumulating):
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)  # <- clip-inside-no-sync
""",
    "a name for the context of a clip": """
def step(last):
    context = nullcontext() if last else model.no_sync()
    with autocast(), context:
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # <- clip-inside-no-sync
""",
    "before the sum by hand": """
for batch in loader:
    model(batch).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # <- clip-inside-no-sync
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
""",
    "each micro-batch, before a function that sums": """
def average(model):
    for p in model.parameters():
        lockstep.collectives.all_reduce(p.grad)

def train():
    for i, batch in enumerate(loader):
        model(batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # <- clip-inside-no-sync
        if (i + 1) % 4 == 0:
            average(model)
            optimizer.step()  # <- accumulation-tail
""",
    "after": "with model.no_sync():\n    a.backward()\nb.backward()\nclip_grad_norm_(p, 1.0)\n",
    "on the last one only": (
        "with nullcontext() if last else model.no_sync():\n    a.backward()\n    if last:\n       "
        " clip_grad_norm_(p, 1.0)\n"
    ),
    "accelerate": (
        "with accelerator.accumulate(model):\n    a.backward()\n    if"
        " accelerator.sync_gradients:\n        accelerator.clip_grad_norm_(p, 1.0)\n"
    ),
    "summed by hand inside": (
        "with model.no_sync():\n    a.backward()\n    dist.all_reduce(p.grad)\n   "
        " clip_grad_norm_(p, 1.0)\n"
    ),
    "never held back": (
        "with fabric.no_backward_sync(model, enabled=False):\n    a.backward()\n   "
        " fabric.clip_gradients(model, o)\n"
    ),
    "after the sum by hand": (
        "for x in y:\n    a.backward()\n    dist.all_reduce(p.grad)\n    clip_grad_norm_(p, 1.0)\n "
        "   o.step()\n"
    ),
    "another sum": (
        "for x in y:\n    a.backward()\n    clip_grad_norm_(p, 1.0)\n    o.step()\n   "
        " dist.all_reduce(loss)\n"
    ),
    "one or the other": (
        "for x in y:\n    a.backward()\n    if one:\n        clip_grad_norm_(p, 1.0)\n    else:\n  "
        "      dist.all_reduce(p.grad)\n"
    ),
    "defined inside": "with model.no_sync():\n    def later():\n        clip_grad_norm_(p, 1.0)\n",
}
SNIPPETS |= {name: IMPORTS + text for name, text in CLIPPED.items()}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(SNIPPETS[name])
