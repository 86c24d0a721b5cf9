"""Show a mesh as text and as a drawing: the layers that each rank holds, its node, and its share of
the samples.

    node 0
      rank 0   share 0 of 2: samples 0-15   stage 0 of 4: bytes, blocks.0
      rank 1   share 0 of 2: samples 0-15   stage 1 of 4: blocks.1

The picture comes from the Mesh object and the batch plan that a training uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, MARGIN, SERIES, TINT, Curve, Drawing
from lockstep.tools.timing.output_files import counted, table

DRAWN = 64
"""The largest number of ranks that is drawn."""
_USES: dict[str, str] = {
    "data": "the same layers, other samples: an all-reduce sums the gradients",
    "shard": "a part of each parameter, other samples: parameters are gathered, gradients summed",
    "pipeline": "consecutive layers, the same samples: activations go on, gradients come back",
    "tensor": "a part of the matrices, the same samples: outputs are summed",
}
_COLOURS: dict[str, str] = {
    "data": "var(--green)",
    "shard": "var(--purple)",
    "pipeline": "var(--orange)",
    "tensor": "var(--teal)",
}
_WIDTH, _GAP, _ROW, _WRAP = 178, 34, 4, 430  # px, except _ROW: boxes in a row


@dataclass(frozen=True, slots=True)
class MeshRank:
    """A rank's place in the mesh, its samples and its part of the model."""

    number: int
    node: int
    share: int
    samples: range
    """Its samples in the step's batch."""
    holds: str
    """The layers that it holds."""
    part: str
    """The part of each layer that it holds; empty for the whole layers."""

    def lines(self, shares: int) -> list[str]:
        samples = f"samples {_between(self.samples)}" if self.samples else "no samples"
        return [f"share {self.share} of {shares}: {samples}", self.holds, self.part]


def _between(numbers: range) -> str:
    """Format a range: `0-15`, `7`."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def places(
    mesh: Any,
    nodes: int,
    samples: Sequence[range],
    layers: Sequence[Sequence[str]] | None = None,
) -> list[MeshRank]:
    """Return all ranks of a Mesh in order; consecutive ranks share a node. `samples` are those of
    each share of the batch, `layers` the layer names of each stage. Raises UsageError for a number
    of nodes that does not fit.
    """
    if nodes < 1 or mesh.size % nodes:
        raise UsageError("nodes-not-even", nodes=nodes, ranks=mesh.size, mesh=str(mesh))
    per_node = mesh.size // nodes
    ranks = []
    for rank in range(mesh.size):
        share = mesh.share(rank)
        holds = _layers(mesh, mesh.at(rank).pipeline, layers)
        ranks.append(
            MeshRank(rank, rank // per_node, share, samples[share], holds, _part(mesh, rank))
        )
    return ranks


def _layers(mesh: Any, stage: int, layers: Sequence[Sequence[str]] | None) -> str:
    if mesh.pipeline == 1:
        return "all layers"
    line = f"stage {stage} of {mesh.pipeline}"
    names = layers[stage] if layers is not None else ()
    if not names:
        return line
    if len(names) > 3:
        return f"{line}: {names[0]} to {names[-1]}"
    return f"{line}: {', '.join(names)}"


def _part(mesh: Any, rank: int) -> str:
    at = mesh.at(rank)
    parts = []
    if mesh.tensor > 1:
        parts.append(f"part {at.tensor} of {mesh.tensor} of matrices")
    if mesh.shard > 1:
        parts.append(f"shard {at.shard} of {mesh.shard}")
    return ", ".join(parts)


def title(mesh: Any, nodes: int = 1) -> str:
    """Describe the mesh in one line."""
    hosts = counted(nodes, "node")
    if nodes > 1:
        hosts += f" of {mesh.size // nodes}"
    shares = "one model for all micro-batches"
    if mesh.replicas > 1:
        shares = f"the micro-batches of a step in {mesh.replicas} shares"
    return f"mesh {mesh}: {counted(mesh.size, 'rank')} on {hosts}, {shares}"


def _axes(mesh: Any, nodes: int) -> list[tuple[str, str, str]]:
    """Return the groups of ranks along each axis, what they communicate, and whether they cross
    nodes.
    """
    per_node = mesh.size // nodes
    rows = []
    for axis in _USES:
        if getattr(mesh, axis) == 1:
            continue
        groups = _groups(mesh, axis)
        listed = ["-".join(map(str, group)) for group in groups[:8]]
        if len(groups) > 8:
            listed.append("...")
        use = _USES[axis]
        if nodes > 1:
            crossing = [group for group in groups if group[0] // per_node != group[-1] // per_node]
            use += ", between nodes" if crossing else ", inside nodes"
        rows.append((axis, "  ".join(listed), use))
    return rows


def _groups(mesh: Any, axis: str) -> list[tuple[int, ...]]:
    lines = [mesh.line(rank, axis) for rank in range(mesh.size)]
    return list(dict.fromkeys(lines))


def text(ranks: Sequence[MeshRank], mesh: Any, nodes: int) -> str:
    """Return the whole picture as text."""
    rows = [(f"  rank {rank.number}", *rank.lines(mesh.replicas)) for rank in ranks]
    rank_lines = table(["", "", "", ""], rows, left=range(4), gap=3).splitlines()
    lines = [title(mesh, nodes)]
    node = None
    for rank, line in zip(ranks, rank_lines, strict=True):
        if rank.node != node:
            node = rank.node
            lines += ["", f"node {node}"]
        lines.append(line)
    axes = [(f"{axis:<8}", listed, use) for axis, listed, use in _axes(mesh, nodes)]
    if axes:
        lines += ["", table(["", "", ""], axes, left=range(3), gap=3)]
    return "\n".join(lines)


def drawing(ranks: Sequence[MeshRank], mesh: Any, nodes: int) -> Drawing:
    """Draw a box for each node with a box for each rank, one colour for each share of the samples,
    and arrows between ranks that communicate. Raises UsageError for too many ranks.
    """
    if mesh.size > DRAWN:
        raise UsageError("drawing-too-large", what=f"{mesh.size} ranks", most=DRAWN)
    return _MeshDrawing(mesh, nodes, ranks)


def _shortened(lines: Sequence[str]) -> list[str]:
    """Split the lines of a rank into the shorter lines of its box."""
    parts = []
    for line in lines:
        parts += re.split(": |, (?=shard)", line)
    return [part for part in parts if part]


class _MeshDrawing(Drawing):
    def __init__(self, mesh: Any, nodes: int, ranks: Sequence[MeshRank]) -> None:
        heading = title(mesh, nodes)
        super().__init__(heading, text(ranks, mesh, nodes).replace("\n", ". "))
        contents = [_shortened(rank.lines(mesh.replicas)) for rank in ranks]
        model_ranks = mesh.pipeline * mesh.tensor
        self._per_node: int = mesh.size // nodes
        self._columns = min(_ROW, self._per_node, model_ranks if model_ranks > 1 else 2)
        self._high = 28 + 16 * max(map(len, contents))
        rows = -(-self._per_node // self._columns)
        self._tall: float = 30 + rows * (self._high + _GAP)
        width = self._columns * (_WIDTH + _GAP) + _GAP
        wrap = max(_WRAP, width)
        self._first = self.heading([heading], wrap=wrap) + 4
        for node in range(nodes):
            top = self._top(node)
            self.box(MARGIN, top, width, self._tall, CARD, rx=6)
            self.words(MARGIN + 10, top + 20, f"node {node}", weight="bold")
        for rank, lines in zip(ranks, contents, strict=True):
            self._rank(rank, lines)
        for axis in _USES:
            self._arrows(mesh, axis)
        y = self._top(nodes) + 23
        for axis, listed, use in _axes(mesh, nodes):
            note = f"{axis} {listed}: {use}"
            y = self.note(y, note, wrap, _COLOURS[axis]) + 22
        self.enlarge(680, most=1.4)

    def _corner(self, rank: int) -> tuple[float, float]:
        node, number = divmod(rank, self._per_node)
        row, column = divmod(number, self._columns)
        left = MARGIN + _GAP + column * (_WIDTH + _GAP)
        return left, self._top(node) + 30 + row * (self._high + _GAP)

    def _top(self, node: int) -> float:
        return self._first + node * (self._tall + 16)

    def _rank(self, rank: MeshRank, lines: Sequence[str]) -> None:
        left, top = self._corner(rank.number)
        colour = SERIES[rank.share % len(SERIES)]
        self.box(left, top, _WIDTH, self._high, colour, tint=TINT, stroke=colour, rx=5)
        left += 8
        top += 19
        self.words(left, top, f"rank {rank.number}", weight="bold")
        top += 17
        for line in lines:
            self.words(left, top, line, size=12)
            top += 16

    def _arrows(self, mesh: Any, axis: str) -> None:
        """Draw arrows between neighbours along an axis: one way between pipeline stages, both ways
        on other axes.
        """
        one_way = axis == "pipeline"
        for group in _groups(mesh, axis):
            for source, target in pairwise(group):
                curve = self._between(source, target, list(_USES).index(axis))
                self.arrow(curve, "next" if one_way else axis, _COLOURS[axis], both=not one_way)

    def _between(self, source: int, target: int, lane: int) -> Curve:
        """Return the curve between two boxes: straight to the next box in a row, below the boxes
        to another box in the row, or down to another row. Each axis has its own `lane`, so that
        arrows do not overlap.
        """
        left, top = self._corner(source)
        to_left, to_top = self._corner(target)
        same_row = top == to_top
        if same_row and to_left - left == _WIDTH + _GAP:
            start = left + _WIDTH + 2
            end = to_left - 2
            y = top + 16 + 14 * lane
            return (start, y), (start + 6, y), (end - 6, y), (end, y)
        side = _WIDTH * (0.5 + 0.12 * lane)
        start = left + side
        end = to_left + side
        foot = top + self._high + 2
        if same_row:
            return (start, foot), (start, foot + 24), (end, foot + 25), (end, foot + 1)
        return (start, foot), (start, foot + 14), (end, to_top - 16), (end, to_top - 2)
