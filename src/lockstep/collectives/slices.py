"""Which elements of a flat tensor are which rank's: slices that tile it, cut at fixed places."""

from __future__ import annotations

BLOCK = 1024
"""Elements. Slices begin at a multiple of it, so that what is computed block by block does not
depend on the number of ranks.
"""


def slice_of(numel: int, rank: int, size: int) -> range:
    """One rank's elements of `numel`: whole blocks, and the tensor's end. Empty for some ranks
    where there are fewer blocks than ranks.
    """
    blocks = -(-numel // BLOCK)
    begin, end = (min(numel, place * blocks // size * BLOCK) for place in (rank, rank + 1))
    return range(begin, end)
