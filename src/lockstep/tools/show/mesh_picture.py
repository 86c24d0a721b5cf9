"""Which node and rank holds which layers, and works on which share of the samples: a mesh as text
and as a drawing.

    node 0
      rank 0   share 0 of 2   stage 0 of 4: bytes, blocks.0
      rank 1   share 0 of 2   stage 1 of 4: blocks.1

Drawn from the Mesh object that a training asks, so what is shown is what runs. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config.mesh import AXES, Axis, Mesh
from lockstep.errors import UsageError
from lockstep.tools.svg import Curve, Drawing
from lockstep.tools.timing.output_files import table

DRAWN = 64
"""The most ranks that fit in a drawing."""
_USES: dict[Axis, str] = {
    "data": "the same layers, other samples: gradients are summed",
    "shard": "a part of each parameter, other samples: parameters are gathered, gradients summed",
    "pipeline": "consecutive layers, the same samples: activations go on, gradients come back",
    "tensor": "a part of the matrices, the same samples: outputs are summed",
}
# Colours of shares; after the last, the first again.
_SHARES = ("#deebf7", "#fde0c5", "#d9f0d3", "#e7d4e8", "#fff3b0", "#d5f0f0", "#f7d6d6", "#e4e4e4")
_LEFT, _TOP, _WIDTH, _GAP, _ROW = 20, 20, 190, 26, 4  # px, and boxes in a row


@dataclass(frozen=True, slots=True)
class MeshRank:
    """One rank."""

    number: int
    node: int
    share: int
    holds: str
    """The layers, and how much of each of them; only the layers: all."""
    part: str

    def said(self, shares: int) -> list[str]:
        return [f"share {self.share} of {shares}", self.holds, self.part]


def places(mesh: Mesh, nodes: int, layers: Sequence[Sequence[str]] | None = None) -> list[MeshRank]:
    """Every rank, in order; consecutive ones share a node. `layers` are the names in every
    stage. Raises UsageError.
    """
    if nodes < 1 or mesh.size % nodes:
        raise UsageError("nodes-not-even", nodes=nodes, ranks=mesh.size, mesh=str(mesh))
    each = mesh.size // nodes
    return [
        MeshRank(
            rank,
            rank // each,
            mesh.share(rank),
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


def title(mesh: Mesh, nodes: int) -> str:
    """In one line."""
    each = "1 node" if nodes == 1 else f"{nodes} nodes of {mesh.size // nodes}"
    shares = (
        "one model for all micro-batches"
        if mesh.replicas == 1
        else f"the micro-batches of a step in {mesh.replicas} shares"
    )
    return f"mesh {mesh}: {mesh.size} rank{'s' * (mesh.size > 1)} on {each}, {shares}"


def _lines(mesh: Mesh, nodes: int) -> list[tuple[str, str, str]]:
    """Who talks to whom along each axis, for what, and whether that crosses nodes."""
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


def text(mesh: Mesh, nodes: int = 1, layers: Sequence[Sequence[str]] | None = None) -> str:
    """The whole picture."""
    every = places(mesh, nodes, layers)
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


def drawing(
    mesh: Mesh, nodes: int = 1, layers: Sequence[Sequence[str]] | None = None
) -> MeshDrawing:
    """A box a rank, in a box a node; one colour a share of the samples; arrows from stage to
    stage. Raises UsageError for too many ranks.
    """
    if mesh.size > DRAWN:
        raise UsageError("drawing-too-large", what=f"{mesh.size} ranks", most=DRAWN)
    return MeshDrawing(mesh, nodes, places(mesh, nodes, layers))


def _inside(said: Sequence[str]) -> list[str]:
    """Of a box: shorter lines."""
    return [part for line in said for part in re.split(": |, (?=shard)", line) if part]


class MeshDrawing(Drawing):
    """A box a rank, in a box a node."""

    def __init__(self, mesh: Mesh, nodes: int, every: Sequence[MeshRank]) -> None:
        said = [_inside(each.said(mesh.replicas)) for each in every]
        self._each = mesh.size // nodes
        self._columns = min(_ROW, self._each)
        self._high = 30 + 15 * max(map(len, said))
        self._tall = 30 + -(-self._each // self._columns) * (self._high + _GAP)
        below = self._top(nodes) + 24
        lines = _lines(mesh, nodes)
        use_at = _LEFT + 90 + 6.2 * max((len(who) for _, who, _ in lines), default=0)
        uses = use_at + 6.2 * max((len(use) for *_, use in lines), default=0)
        wide = max(
            self._columns * (_WIDTH + _GAP) + _GAP, uses - _LEFT, 9.2 * len(title(mesh, nodes))
        )
        super().__init__(2 * _LEFT + wide, below + 18 * len(lines) + 12)
        self.words(_LEFT, _TOP + 10, title(mesh, nodes), size=16, weight="bold")
        for node in range(nodes):
            self.box(_LEFT, self._top(node), self.width - 2 * _LEFT, self._tall, "#fafafa")
            self.words(_LEFT + 10, self._top(node) + 20, f"node {node}", weight="bold")
        for place, inside in zip(every, said, strict=True):
            self._place(place, inside)
        for rank in range(mesh.size):
            stages = mesh.line(rank, "pipeline")
            for after in stages[stages.index(rank) + 1 :][:1]:
                self.arrow(self._onward(rank, after), "next")
        for number, line in enumerate(lines):
            for x, words in zip((_LEFT, _LEFT + 70, use_at), line, strict=True):
                self.words(x, below + 18 * number, words.strip(), size=12)

    def _corner(self, rank: int) -> tuple[int, int]:
        node, place = divmod(rank, self._each)
        row, column = divmod(place, self._columns)
        return _LEFT + _GAP + column * (_WIDTH + _GAP), self._top(node) + 30 + row * (
            self._high + _GAP
        )

    def _top(self, node: int) -> int:
        return _TOP + 30 + node * (self._tall + 16)

    def _place(self, place: MeshRank, inside: Sequence[str]) -> None:
        x, y = self._corner(place.number)
        self.box(x, y, _WIDTH, self._high, _SHARES[place.share % len(_SHARES)])
        self.words(x + 8, y + 17, f"rank {place.number}", weight="bold")
        for number, line in enumerate(inside):
            self.words(x + 8, y + 34 + 15 * number, line, size=12)

    def _onward(self, rank: int, after: int) -> Curve:
        """To the rank with the next stage: to the box beside it, else below the boxes between
        them, else down.
        """
        (x, y), (to_x, to_y) = self._corner(rank), self._corner(after)
        if y == to_y and to_x - x == _WIDTH + _GAP:
            left, right = x + _WIDTH + 2, to_x - 2
            return (left, y + 20), (left + 6, y + 20), (right - 6, y + 20), (right, y + 20)
        start, end, foot = x + _WIDTH / 2, to_x + _WIDTH / 2, y + self._high + 2
        if y == to_y:
            return (start, foot), (start, foot + 24), (end, foot + 25), (end, foot + 1)
        return (start, foot), (start, foot + 14), (end, to_y - 16), (end, to_y - 2)
