"""clip-inside-no-sync: before the gradient is the sum of all, by no_sync() or by the order of
lines.
"""

from __future__ import annotations

import pytest

from tests.tools.lint.snippets import agrees

IMPORTS = (
    "import torch.distributed as dist\nfrom torch.nn.utils import clip_grad_norm_\nimport"
    " lockstep\n"
)
SNIPPETS = {
    "inside": """
with model.no_sync():
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- clip-inside-no-sync
""",
    "inside, for a condition": """
with model.no_sync():
    loss.backward()
    if clip:
        clip_grad_value_(model.parameters(), clip)  # <- clip-inside-no-sync
""",
    "some of the time": """
with nullcontext() if last else model.no_sync():
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)  # <- clip-inside-no-sync
""",
    "fabric": """
with fabric.no_backward_sync(model, enabled=accumulating):
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)  # <- clip-inside-no-sync
""",
    "a name for the context": """
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


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(IMPORTS + SNIPPETS[name])
