"""The plan of buckets: a pure function, so it is tested as one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.gradients.layout import ALIGNMENT, Entry, Layout, plan

CPU = torch.device("cpu")


def entries(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Entry]:
    return [Entry(f"p{number}", size, dtype, CPU) for number, size in enumerate(sizes)]


def picture(layout: Layout) -> list[str]:
    return [
        " ".join(f"{span.name}[{span.start}:{span.stop}]" for span in bucket.spans)
        + f" of {bucket.numel}"
        for bucket in layout.buckets
    ]


def test_a_bucket_is_closed_when_it_is_full_and_the_first_is_small() -> None:
    layout = plan(entries(64, 64, 640, 64, 64), range(5), bucket=4 * 256, first_bucket=4 * 64)
    assert picture(layout) == [
        "p0[0:64] of 64",
        "p1[0:64] p2[64:704] of 704",
        "p3[0:64] p4[64:128] of 192",
    ]


def test_dtypes_do_not_mix_and_buckets_leave_as_they_fill() -> None:
    mixed = [
        Entry("a", 5, torch.float32, CPU),
        Entry("b", 5, torch.bfloat16, CPU),
        Entry("c", 5, torch.float32, CPU),
    ]
    assert picture(plan(mixed, [0, 1, 2])) == ["b[0:5] of 64", "a[0:5] c[64:69] of 192"]


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
    st.integers(256, 40_000),
)
def test_every_gradient_has_one_place_and_none_overlap(
    sizes: list[int], random: object, limit: int
) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    layout = plan(entries(*sizes), order, bucket=limit, first_bucket=limit // 2)
    placed = [span for bucket in layout.buckets for span in bucket.spans]
    assert sorted(span.parameter for span in placed) == list(range(len(sizes)))
    for bucket in layout.buckets:
        end = 0
        for span in bucket.spans:
            assert span.start >= end
            assert span.start % ALIGNMENT == 0
            assert span.stop - span.start == sizes[span.parameter]
            end = span.stop
        assert bucket.numel >= end
        assert (bucket.flag is None) == (bucket is not layout.buckets[-1])
        held = bucket.numel if bucket.flag is None else bucket.flag
        full = [
            span.start * 4 >= (limit // 2 if bucket.index == 0 else limit) for span in bucket.spans
        ]
        assert not any(full), "nothing is added to a full bucket"
        assert end <= held <= bucket.numel
