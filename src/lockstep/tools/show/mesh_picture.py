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

from lockstep.config.mesh import AXES, Axis, Mesh
from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, MARGIN, SERIES, TINT, Curve, Drawing
from lockstep.tools.show.step_picture import BATCH, DataParallelStep, between
from lockstep.tools.timing.output_files import table

DRAWN = 64
"""The largest number of ranks that is drawn."""
_USES: dict[Axis, str] = {
    "data": "the same layers, other samples: an all-reduce sums the gradients",
    "shard": "a part of each parameter, other samples: parameters are gathered, gradients summed",
    "pipeline": "consecutive layers, the same samples: activations go on, gradients come back",
    "tensor": "a part of the matrices, the same samples: outputs are summed",
}
_COLOURS: dict[Axis, str] = {
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

    def said(self, shares: int) -> list[str]:
        samples = f"samples {between(self.samples)}" if self.samples else "no samples"
        return [f"share {self.share} of {shares}: {samples}", self.holds, self.part]


def places(
    mesh: Mesh,
    nodes: int,
    layers: Sequence[Sequence[str]] | None = None,
    batch: int = BATCH,
    micro_batch: int | None = None,
) -> list[MeshRank]:
    """Return all ranks in order; consecutive ranks share a node. `layers` are the layer names of
    each stage; `batch` and `micro_batch` are sizes in samples, as in step_picture. Raises
    UsageError for sizes that do not fit.
    """
    step = DataParallelStep.of(mesh.replicas, batch, micro_batch)
    if nodes < 1 or mesh.size % nodes:
        raise UsageError("nodes-not-even", nodes=nodes, ranks=mesh.size, mesh=str(mesh))
    each = mesh.size // nodes
    return [
        MeshRank(
            rank,
            rank // each,
            mesh.share(rank),
            step.samples(mesh.share(rank)),
            _layers(mesh, mesh.at(rank).pipeline, layers),
            _part(mesh, rank),
        )
        for rank in range(mesh.size)
    ]


def _layers(mesh: Mesh, stage: int, layers: Sequence[Sequence[str]] | None) -> str:
    names = list(layers[stage]) if layers is not None else []
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}"
    if mesh.pipeline == 1:
        return "all layers"
    return f"stage {stage} of {mesh.pipeline}" + (f": {shown}" if shown else "")


def _part(mesh: Mesh, rank: int) -> str:
    at = mesh.at(rank)
    of_matrices = f"part {at.tensor} of {mesh.tensor} of matrices" if mesh.tensor > 1 else ""
    return ", ".join(
        filter(None, (of_matrices, f"shard {at.shard} of {mesh.shard}" if mesh.shard > 1 else ""))
    )


def title(mesh: Mesh, nodes: int = 1) -> str:
    """Describe the mesh in one line."""
    each = "1 node" if nodes == 1 else f"{nodes} nodes of {mesh.size // nodes}"
    shares = (
        "one model for all micro-batches"
        if mesh.replicas == 1
        else f"the micro-batches of a step in {mesh.replicas} shares"
    )
    return f"mesh {mesh}: {mesh.size} rank{'s' * (mesh.size > 1)} on {each}, {shares}"


def _lines(mesh: Mesh, nodes: int) -> list[tuple[str, str, str]]:
    """Return the groups of ranks along each axis, what they communicate, and whether they cross
    nodes.
    """
    rows = []
    for axis in AXES:
        if getattr(mesh, axis) == 1:
            continue
        groups = list(dict.fromkeys(mesh.line(rank, axis) for rank in range(mesh.size)))
        across = any(len({rank * nodes // mesh.size for rank in group}) > 1 for group in groups)
        where = "" if nodes == 1 else ", between nodes" if across else ", inside nodes"
        who = "  ".join("-".join(map(str, group)) for group in groups[:8]) + (
            "  ..." if len(groups) > 8 else ""
        )
        rows.append((f"{axis:<8}", who, f"{_USES[axis]}{where}"))
    return rows


def text(every: Sequence[MeshRank], mesh: Mesh, nodes: int) -> str:
    """Return the whole picture as text."""
    said = [title(mesh, nodes)]
    rows = [(f"  rank {each.number}", *each.said(mesh.replicas)) for each in every]
    ranks = table(["", "", "", ""], rows, left=range(4), gap=3)
    for place, line in zip(every, ranks.splitlines(), strict=True):
        if place.node * mesh.size // nodes == place.number:
            said += ["", f"node {place.node}"]
        said.append(line)
    axes = (
        [table(["", "", ""], lines, left=range(3), gap=3)] if (lines := _lines(mesh, nodes)) else []
    )
    return "\n".join([*said, *([""] if axes else []), *axes])


def drawing(every: Sequence[MeshRank], mesh: Mesh, nodes: int) -> Drawing:
    """Draw a box for each node with a box for each rank, one colour for each share of the samples,
    and arrows between ranks that communicate. Raises UsageError for too many ranks.
    """
    if mesh.size > DRAWN:
        raise UsageError("drawing-too-large", what=f"{mesh.size} ranks", most=DRAWN)
    return _MeshDrawing(mesh, nodes, every)


def _inside(said: Sequence[str]) -> list[str]:
    """Split the lines of a rank into the shorter lines of its box."""
    return [part for line in said for part in re.split(": |, (?=shard)", line) if part]


class _MeshDrawing(Drawing):
    def __init__(self, mesh: Mesh, nodes: int, every: Sequence[MeshRank]) -> None:
        heading = title(mesh, nodes)
        super().__init__(heading, text(every, mesh, nodes).replace("\n", ". "))
        said = [_inside(each.said(mesh.replicas)) for each in every]
        self._each = mesh.size // nodes
        inner = mesh.pipeline * mesh.tensor
        self._columns = min(_ROW, self._each, inner if inner > 1 else 2)
        self._high = 28 + 16 * max(map(len, said))
        self._tall = 30 + -(-self._each // self._columns) * (self._high + _GAP)
        across = self._columns * (_WIDTH + _GAP) + _GAP
        wrap = max(_WRAP, across)
        self._first = self.heading([heading], wrap=wrap) + 4
        for node in range(nodes):
            self.box(MARGIN, self._top(node), across, self._tall, CARD, rx=6)
            self.words(MARGIN + 10, self._top(node) + 20, f"node {node}", weight="bold")
        for place, inside in zip(every, said, strict=True):
            self._place(place, inside)
        for axis in AXES:
            self._arrows(mesh, axis)
        low = self._top(nodes) + 6
        for name, who, use in _lines(mesh, nodes):
            colour = _COLOURS[name.strip()]  # type: ignore[index]  # an axis
            low = self.note(low + 17, f"{name.strip()} {who}: {use}", wrap, colour) + 5
        self.zoom = max(1.0, min(1.4, 680 / self.width))

    def _corner(self, rank: int) -> tuple[float, float]:
        node, place = divmod(rank, self._each)
        row, column = divmod(place, self._columns)
        left = MARGIN + _GAP + column * (_WIDTH + _GAP)
        return left, self._top(node) + 30 + row * (self._high + _GAP)

    def _top(self, node: int) -> float:
        return self._first + node * (self._tall + 16)

    def _place(self, place: MeshRank, inside: Sequence[str]) -> None:
        x, y = self._corner(place.number)
        colour = SERIES[place.share % len(SERIES)]
        self.box(x, y, _WIDTH, self._high, colour, tint=TINT, stroke=colour, rx=5)
        self.words(x + 8, y + 19, f"rank {place.number}", weight="bold")
        for number, line in enumerate(inside):
            self.words(x + 8, y + 36 + 16 * number, line, size=12)

    def _arrows(self, mesh: Mesh, axis: Axis) -> None:
        """Draw arrows between neighbours along an axis: one way between pipeline stages, both ways
        on other axes.
        """
        for line in dict.fromkeys(mesh.line(rank, axis) for rank in range(mesh.size)):
            for one, other in pairwise(line):
                kind = "next" if axis == "pipeline" else axis
                curve = self._between(one, other, AXES.index(axis))
                self.arrow(curve, kind, _COLOURS[axis], both=axis != "pipeline")

    def _between(self, one: int, other: int, lane: int) -> Curve:
        """Return the curve between two boxes: straight to the next box in a row, below the boxes
        to another box in the row, or down to another row. Each axis has its own `lane`, so that
        arrows do not overlap.
        """
        (x, y), (to_x, to_y) = self._corner(one), self._corner(other)
        if y == to_y and to_x - x == _WIDTH + _GAP:
            left, right, at = x + _WIDTH + 2, to_x - 2, y + 16 + 14 * lane
            return (left, at), (left + 6, at), (right - 6, at), (right, at)
        side = _WIDTH * (0.5 + 0.12 * lane)
        start, end, foot = x + side, to_x + side, y + self._high + 2
        if y == to_y:
            return (start, foot), (start, foot + 24), (end, foot + 25), (end, foot + 1)
        return (start, foot), (start, foot + 14), (end, to_y - 16), (end, to_y - 2)
