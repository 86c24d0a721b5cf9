"""What is wrong with the data is said with the sample's number; what is well is not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep.data.loader import Loader
from lockstep.errors import UsageError
from lockstep.tools import audit as module
from lockstep.tools.audit import Audit, audit


class Samples(Dataset[Any]):
    """`make(index)` for each index."""

    def __init__(self, make: Any, count: int = 22) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def found(make: Any, count: int = 22, **options: Any) -> Audit:
    return audit(
        Samples(make, count), **{"global_batch": 8, "micro_batch": 2, "workers": 3, **options}
    )


def said(report: Audit, about: str) -> list[tuple[str, str]]:
    return [(each.level, each.value) for each in report.findings if each.name == about]


def plain(index: int) -> Tensor:
    return torch.full((3,), float(index))


def test_every_sample_once_and_who_has_how_many() -> None:
    report = found(plain)
    counts = [
        sum(
            len(window.positions[n])
            for epoch in loader.epochs(1)
            for window in epoch
            for n in range(len(window))
        )
        for loader in (
            Loader(Samples(plain), global_batch=8, micro_batch=2, rank=rank, size=3)
            for rank in range(3)
        )
    ]
    assert report.samples_by_rank == counts == [12, 6, 4]
    assert said(report, "coverage") == [("ok", "each of 22 samples once in epoch 1")]
    assert said(report, "samples") == [
        (
            "note",
            (
                "a rank has 4 to 12 samples an epoch: the fullest 63.6% above the mean; the others wait for it"
            ),
        )
    ]
    assert not report.wrong
    assert report.tokens_by_rank is None
    assert report.table().splitlines()[:3] == [report.described, "rank  samples", "   0       12"]


def test_ranks_without_samples_are_counted() -> None:
    ((standing, text),) = said(found(plain, workers=6), "samples")
    assert standing == "note"
    assert "; 2 ranks have none: use fewer workers, or a smaller micro_batch" in text


def test_what_is_missing_and_what_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._seen

    def broken(*args: Any) -> Any:
        seen, by_rank = right(*args)
        seen[[3, 5]] = 0, 2
        return seen, by_rank

    monkeypatch.setattr(module, "_seen", broken)
    report = found(plain, epochs=1)
    assert said(report, "coverage") == [("WRONG", "epoch 0 leaves out 1 sample of 22: 3")]
    assert said(report, "duplicates") == [("WRONG", "epoch 0 has 1 sample more than once: 5")]
    assert report.wrong


def ragged(index: int) -> tuple[int, Tensor]:
    return index, torch.ones(1 + index % 4, 2)


def padded(samples: list[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([index for index, _ in samples]), pad_sequence(
        [part for _, part in samples], batch_first=True
    )


def test_tokens_and_padding() -> None:
    report = found(ragged, collate=padded)
    loader = Loader(
        Samples(ragged), global_batch=8, micro_batch=2, collate_fn=padded, rank=0, size=1
    )
    batches = [x for epoch in loader.epochs(1) for window in epoch for _, x in window]
    real = sum(int(x[..., 0].sum()) for x in batches)
    room = sum(x.shape[0] * x.shape[1] for x in batches)
    assert report.looked_at == len(batches) == 11
    assert report.tokens_by_rank is not None
    assert sum(report.tokens_by_rank) == real
    assert report.padding == 1 - real / room
    ((_, text),) = said(report, "padding")
    assert text.startswith(f"{report.padding:.1%} of field 1 is padding, in 11 micro-batches")
    assert said(found(plain), "padding") == [
        ("ok", "no field varies in length in 11 micro-batches")
    ]


def test_how_many_micro_batches_were_looked_at() -> None:
    report = found(ragged, count=400, collate=padded, micro_batches=9)
    assert report.looked_at == 8  # two whole steps of four
    assert "in 8 micro-batches" in said(report, "padding")[0][1]


def test_samples_that_cannot_be_a_batch() -> None:
    report = found(ragged)
    ((standing, text),) = said(report, "batches")
    assert standing == "WRONG"
    assert "cannot be made a batch: RuntimeError: " in text


def keyed(index: int) -> Tensor:
    return torch.randn(2) + random.random() + np.random.rand() + index


def by_itself(index: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng().normal(size=3))


def reseeds(index: int) -> Tensor:
    torch.manual_seed(7)
    return index + torch.randn(3) + np.random.rand()


def odd(index: int) -> Any:
    return {"x": torch.ones(2), "more": [torch.Generator()]}


@pytest.mark.parametrize(
    ("make", "standing", "text"),
    [
        (
            keyed,
            "ok",
            "different in every epoch, and the same on every rank, 8 samples checked",
        ),
        (
            plain,
            "note",
            "sample 0 is the same in epochs 0 and 1 (8 of 8 checked)",
        ),
        (
            by_itself,
            "WRONG",
            "sample 0 differs when it is read twice in epoch 0",
        ),
        (
            reseeds,
            "WRONG",
            "sample 0 in epoch 0 and sample 0 in epoch 1 leave the same random state",
        ),
        (odd, "note", "sample 0 holds a Generator, which cannot be compared"),
    ],
)
def test_augmentation(make: Any, standing: str, text: str) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    ((found_standing, found_text),) = said(found(make, collate=list), "augmentation")
    assert found_standing == standing
    assert found_text.startswith(text)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, r"workers=0: .* at least 1.* \[not-a-whole-number\]"),
        ({"epochs": 0}, r"epochs=0: .* \[not-a-whole-number\]"),
        ({"micro_batch": 9}, "micro_batch=9 is larger than global_batch=8"),
        ({"count": 0}, "the dataset is empty"),
    ],
)
def test_mistakes_are_sentences(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        found(plain, **options)
