"""forgotten-set-epoch: a sampler that shuffles, epochs that train on it, and nobody who tells
it.
"""

from __future__ import annotations

import pytest

from tests.tools.lint.snippets import agrees

IMPORTS = (
    "from torch.utils.data import DataLoader, BatchSampler\nfrom torch.utils.data.distributed"
    " import DistributedSampler\nimport lockstep\n"
)
SNIPPETS = {
    "plain": """
def main():
    sampler = DistributedSampler(data)  # <- forgotten-set-epoch
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        for batch in loader:
            model(batch).backward()
""",
    "made in the loader, seen through a bar": """
loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=True))  # <- forgotten-set-epoch
while epoch < 9:
    for i, batch in enumerate(tqdm(loader)):
        model(batch).backward()
    epoch += 1
""",
    "lockstep's, where it is distributed": """
sampler = lockstep.DistributedSampler(data) if distributed else None  # <- forgotten-set-epoch
loader = DataLoader(data, sampler=sampler, shuffle=sampler is None)
for epoch in range(3):
    for batch in loader:
        model(batch).backward()
""",
    "an epoch is a function": """
def train(model, batches):
    for batch in batches:
        model(batch).backward()

def main():
    sampler = DistributedSampler(data, 2, rank, True)  # <- forgotten-set-epoch
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 8, True))
    for epoch in range(3):
        train(model, batches=loader)
""",
    "attributes": """
class Trainer:
    def __init__(self):
        self.sampler = DistributedSampler(data)  # <- forgotten-set-epoch
        self.loader = DataLoader(data, sampler=self.sampler)
    def fit(self):
        for epoch in range(3):
            for batch in self.loader:
                self.model(batch).backward()
""",
    "the other one is told": """
train_sampler = DistributedSampler(train)  # <- forgotten-set-epoch
test_sampler = DistributedSampler(test)
train_loader = DataLoader(train, sampler=train_sampler)
test_loader = DataLoader(test, sampler=test_sampler)
for epoch in range(3):
    test_sampler.set_epoch(epoch)
    for batch in train_loader:
        model(batch).backward()
""",
}
PLAIN = SNIPPETS["plain"].replace("  # <- forgotten-set-epoch", "")
for told in (
    "sampler.set_epoch(epoch)",
    "loader.sampler.set_epoch(epoch)",
    "sampler.epoch = epoch",
    "for sampler in samplers: sampler.set_epoch(epoch)",
    "begin_epoch(epoch, loader)",  # out of sight
):
    SNIPPETS[told] = PLAIN.replace("range(epochs):", f"range(epochs):\n        {told}")
SNIPPETS |= {
    "in order": PLAIN.replace("(data)", "(data, shuffle=False)", 1),
    "perhaps in order": PLAIN.replace("(data)", "(data, shuffle=training)", 1),
    "one epoch": PLAIN.replace("range(epochs)", "range(1)"),
    "once": PLAIN.replace(
        "    for epoch in range(epochs):\n        for", "    if True:\n        for"
    ),
    "evaluation": PLAIN.replace("model(batch).backward()", "correct += model(batch)"),
    "made anew for each": """
for seed in range(3):
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, sampler=sampler)
    for batch in loader:
        model(batch).backward()
""",
    "a library's loader": PLAIN.replace(
        "    for epoch in", "    loader = accelerator.prepare(loader)\n    for epoch in"
    ),
    "another class": PLAIN.replace("DistributedSampler(", "RandomSampler("),
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(IMPORTS + SNIPPETS[name])


def test_a_sampler_of_the_same_name_from_elsewhere_is_not_known() -> None:
    agrees("from mine import DistributedSampler\nfrom torch.utils.data import DataLoader\n" + PLAIN)
