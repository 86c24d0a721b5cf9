"""Exercise 3: a ring all-reduce.

Grade it with `pytest docs/course -k lesson3`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def ring_all_reduce(
    tensor: Tensor, rank: int, size: int, pass_on: Callable[[Tensor], Tensor]
) -> None:
    """Replace `tensor` by the sum of all ranks' tensors.

    Cut the tensor into `size` cells (`tensor.tensor_split(size)` gives views). First the cells go
    round and are added, `size - 1` times. Then the complete cells go round and replace what is
    there, `size - 1` times. Some cells may be empty: pass them on too.

    Args:
        tensor: [elements]. The same number of elements on all ranks.
        rank: the number of this rank.
        size: the number of ranks.
        pass_on: sends a tensor to rank + 1 (the last rank sends to rank 0), and returns the tensor
            that rank - 1 has sent. It waits until that tensor is there.
    """
    raise NotImplementedError
