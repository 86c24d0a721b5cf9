"""Values as JSON and back: the same value of the same type, and nothing that only pickle could
keep.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.plain_json import decoded, encoded
from tests.refused import refused

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner),
        st.sets(st.integers()),
    ),
)


@given(VALUES)
def test_there_and_back(value: Any) -> None:
    found = decoded(json.loads(json.dumps(encoded(value, "a value"))))
    assert found == value
    assert type(found) is type(value)


def test_what_schedulers_and_optimizers_keep() -> None:
    value = {
        "milestones": Counter({3: 1, 9: 2}),
        "betas": (0.9, 0.999),
        "!": "a key like ours",
        "lr": np.float64(0.5),
        "inf": float("inf"),
    }
    found = decoded(json.loads(json.dumps(encoded(value, "a value"))))
    assert found == value
    assert type(found["milestones"]) is Counter
    lr = decoded(encoded(torch.tensor([0.5, -0.0], dtype=torch.bfloat16), "lr"))
    assert torch.equal(lr, torch.tensor([0.5, 0.0], dtype=torch.bfloat16))
    assert torch.signbit(lr).tolist() == [False, True]


def test_what_needs_pickle_is_refused_by_its_place() -> None:
    for value in (
        object(),
        lambda: 0,
        {1: object()},
        OrderedDict(a=1),
        torch.zeros(2**22 + 1),
        range(3),
    ):
        with refused("value-not-storable") as caught:
            encoded([value], "the scheduler's state")
        assert caught.value.values["what"].startswith("the scheduler's state")


def test_a_kind_that_we_do_not_write_is_not_read() -> None:
    for value in (
        {"!": "os.system", "of": ["ls"]},
        {"!": "tuple"},
        {"!": "tensor", "dtype": "load", "shape": [1], "of": "AA=="},
    ):
        with pytest.raises(ValueError, match="unknown"):
            decoded(value)
