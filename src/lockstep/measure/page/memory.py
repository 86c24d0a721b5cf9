"""What each rank's memory holds."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.anatomy.generation import Anatomy
from lockstep.anatomy.lines import Memory
from lockstep.measure.page.parts import Figure, Section, Table
from lockstep.measure.page.ranks import MOST
from lockstep.measure.page.svg import PHASE_COLOURS, Picture

_PARTS = {"parameters": "forward", "gradients": "backward", "optimizer": "optimizer", "activations": "data"}
"""The phase whose colour it has."""
_MIB = 2**20


def section(anatomy: Anatomy | None) -> Section:
    """Empty where no rank has told."""
    found = {} if anatomy is None else _latest(anatomy)
    if not found:
        return Section(name="memory", title="Memory")
    return Section(name="memory", title="Memory", figures=[_figure(found)])


def _latest(anatomy: Anatomy) -> dict[int, Memory]:
    """Of the latest stretch in which a rank has told."""
    for generation in reversed(anatomy.generations):
        found = {rank: lane.memory for rank, lane in generation.lanes.items() if lane.memory is not None}
        if found:
            return found
    return {}


def _figure(found: Mapping[int, Memory]) -> Figure:
    ranks = sorted(found)[:MOST]
    picture = Picture("memory", 1.2 + 0.24 * len(ranks))
    left = dict.fromkeys(ranks, 0.0)
    for part, colour in _PARTS.items():
        widths = [(getattr(found[rank], part) or 0) / _MIB for rank in ranks]
        if any(widths):
            picture.axes.barh(range(len(ranks)), widths, left=list(left.values()), color=PHASE_COLOURS[colour], height=0.7, label=part)
        left = {rank: left[rank] + width for rank, width in zip(ranks, widths, strict=True)}
    picture.axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    picture.axes.set_ylim(len(ranks) - 0.4, -0.6)
    picture.axes.set_xlabel("MiB")
    picture.legend(3)
    rows = [[f"rank {rank}", *(_mib(getattr(found[rank], part)) for part in (*_PARTS, "peak"))] for rank in ranks]
    table = Table(caption="MiB", head=["", *_PARTS, "peak"], rows=rows)
    more = f" The first {len(ranks)} of {len(found)} ranks." if len(found) > len(ranks) else ""
    caption = (
        f"What each rank holds, in MiB. A part that the device does not tell is not drawn; peak is of the whole process or device.{more}"
    )
    return Figure(svg=picture.svg(), title="Memory by rank", caption=caption, table=table)


def _mib(size: int | None) -> str:
    return "not known" if size is None else f"{size / _MIB:.2f}" if size < 100 * _MIB else f"{size / _MIB:,.0f}"
