"""Which node and rank holds which layers, and works on which share of the samples: a mesh as text and as a drawing.

    node 0
      rank 0   share 0 of 2   stage 0 of 4: bytes, blocks.0
      rank 1   share 0 of 2   stage 1 of 4: blocks.1

Drawn from the Mesh object that a training asks, so what is shown is what runs. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.collectives.draw_svg import words
from lockstep.errors import UsageError
from lockstep.mesh.layout import AXES, Axis, Mesh

DRAWN = 64
"""The most ranks that fit in a drawing."""
_USES: dict[Axis, str] = {
    "data": "the same layers, other samples: gradients are summed",
    "shard": "a part of each parameter, other samples: parameters are gathered, gradients summed",
    "pipeline": "consecutive layers, the same samples: activations go on, gradients come back",
    "tensor": "a part of the matrices, the same samples: outputs are summed",
}
_SHARES = ("#deebf7", "#fde0c5", "#d9f0d3", "#e7d4e8", "#fff3b0", "#d5f0f0", "#f7d6d6", "#e4e4e4")  # then again
_LEFT, _TOP, _WIDTH, _GAP, _ROW = 20, 20, 190, 26, 4  # px, and boxes in a row


@dataclass(frozen=True, slots=True)
class Place:
    """One rank."""

    rank: int
    node: int
    share: int
    holds: str
    """The layers."""
    parts: tuple[str, ...]
    """How much of each of them; none: all."""


def places(mesh: Mesh, nodes: int, layers: Sequence[Sequence[str]] | None = None) -> list[Place]:
    """Every rank, in order; consecutive ones share a node. `layers` are the names in every stage. Raises UsageError."""
    if nodes < 1 or mesh.size % nodes:
        raise UsageError(
            f"--nodes {nodes}: {mesh.size} ranks (mesh {mesh}) cannot stand on {nodes} nodes, equally many on each: choose a divisor"
        )
    return [
        Place(rank, rank * nodes // mesh.size, mesh.share(rank), _layers(mesh, mesh.at(rank).pipeline, layers), _parts(mesh, rank))
        for rank in range(mesh.size)
    ]


def _layers(mesh: Mesh, stage: int, layers: Sequence[Sequence[str]] | None) -> str:
    names = list(layers[stage]) if layers is not None else []
    shown = ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]}"
    if mesh.pipeline == 1:
        return "all layers"
    return f"stage {stage} of {mesh.pipeline}" + (f": {shown}" if shown else "")


def _parts(mesh: Mesh, rank: int) -> tuple[str, ...]:
    at = mesh.at(rank)
    of_matrices = (f"part {at.tensor} of {mesh.tensor} of matrices",) if mesh.tensor > 1 else ()
    return (*of_matrices, f"shard {at.shard} of {mesh.shard}") if mesh.shard > 1 else of_matrices


def title(mesh: Mesh, nodes: int) -> str:
    """In one line."""
    each = "1 node" if nodes == 1 else f"{nodes} nodes of {mesh.size // nodes}"
    shares = "one model for all micro-batches" if mesh.replicas == 1 else f"the micro-batches of a step in {mesh.replicas} shares"
    return f"mesh {mesh}: {mesh.size} rank{'s' * (mesh.size > 1)} on {each}, {shares}"


def lines(mesh: Mesh, nodes: int) -> list[str]:
    """Who talks to whom along each axis, and whether that crosses nodes."""
    rows = []
    for axis in AXES:
        if getattr(mesh, axis) == 1:
            continue
        groups = list(dict.fromkeys(mesh.line(rank, axis) for rank in range(mesh.size)))
        across = any(len({rank * nodes // mesh.size for rank in group}) > 1 for group in groups)
        where = "" if nodes == 1 else ", between nodes" if across else ", inside nodes"
        who = "  ".join("-".join(map(str, group)) for group in groups[:8]) + ("  ..." if len(groups) > 8 else "")
        rows.append((axis, who, f"{_USES[axis]}{where}"))
    width = max((len(who) for _, who, _ in rows), default=0)
    return [f"{axis:<8}   {who:<{width}}   {use}" for axis, who, use in rows]


def text(mesh: Mesh, nodes: int = 1, layers: Sequence[Sequence[str]] | None = None) -> str:
    """The whole picture."""
    every = places(mesh, nodes, layers)
    rows = [(f"rank {each.rank}", f"share {each.share} of {mesh.replicas}", each.holds, ", ".join(each.parts)) for each in every]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    said = [title(mesh, nodes)]
    for place, row in zip(every, rows, strict=True):
        if place.node * mesh.size // nodes == place.rank:
            said += ["", f"node {place.node}"]
        said.append("  " + "   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return "\n".join([*said, *([""] if mesh.size > 1 else []), *lines(mesh, nodes)])


# -- drawn ---------------------------------------------------------------------------------------------------------------------------


def svg(mesh: Mesh, nodes: int = 1, layers: Sequence[Sequence[str]] | None = None) -> str:
    """A box a rank, in a box a node; one colour a share of the samples; arrows from stage to stage. Raises UsageError for too many ranks."""
    if mesh.size > DRAWN:
        raise UsageError(f"{mesh.size} ranks do not fit in a drawing: up to {DRAWN} do; the text form shows more")
    every = places(mesh, nodes, layers)
    boxes = _Boxes(mesh, nodes, max(len(_said(mesh, each)) for each in every))
    below = boxes.bottom + 24
    width, height = boxes.width, below + 18 * len(lines(mesh, nodes)) + 12
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#b5541c"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        words(_LEFT, _TOP + 10, title(mesh, nodes), size=16, weight="bold"),
    ]
    drawn += [boxes.node(node) for node in range(nodes)]
    drawn += [part for each in every for part in boxes.rank(each)]
    drawn += [arrow for rank in range(mesh.size) for arrow in boxes.onward(rank)]
    for number, line in enumerate(lines(mesh, nodes)):
        for x, said in zip((0, 70, 90 + boxes.told), filter(None, line.split("   ")), strict=True):
            drawn.append(words(_LEFT + x, below + 18 * number, said.strip(), size=12))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _said(mesh: Mesh, place: Place) -> list[str]:
    """In its box, one below the other."""
    return [f"share {place.share} of {mesh.replicas}", *place.holds.split(": "), *place.parts]


class _Boxes:
    """Where things are."""

    def __init__(self, mesh: Mesh, nodes: int, said: int) -> None:
        self._mesh = mesh
        self._each = mesh.size // nodes
        self._row = min(_ROW, self._each)
        self._high = 30 + 15 * said
        self._tall = 30 + -(-self._each // self._row) * (self._high + _GAP)
        wide = self._row * (_WIDTH + _GAP) + _GAP
        told = [line.split("   ") for line in lines(mesh, nodes)]
        self.told = 6.2 * max((len(line[-2].strip()) for line in told), default=0)
        self.bottom = _TOP + 30 + nodes * (self._tall + 16)
        uses = 90 + self.told + 6.2 * max((len(line[-1]) for line in told), default=0)
        self.width = round(2 * _LEFT + max(wide, uses, 9.2 * len(title(mesh, nodes))))
        self._wide = self.width - 2 * _LEFT

    def _corner(self, rank: int) -> tuple[int, int]:
        node, place = divmod(rank, self._each)
        row, column = divmod(place, self._row)
        return _LEFT + _GAP + column * (_WIDTH + _GAP), self._top(node) + 30 + row * (self._high + _GAP)

    def _top(self, node: int) -> int:
        return _TOP + 30 + node * (self._tall + 16)

    def node(self, node: int) -> str:
        top = self._top(node)
        box = f'<rect x="{_LEFT}" y="{top}" width="{self._wide}" height="{self._tall}" fill="#fafafa" stroke="#777"/>'
        return box + "\n" + words(_LEFT + 10, top + 20, f"node {node}", weight="bold")

    def rank(self, place: Place) -> list[str]:
        x, y = self._corner(place.rank)
        fill = _SHARES[place.share % len(_SHARES)]
        return [
            f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{self._high}" fill="{fill}" stroke="#777"/>',
            words(x + 8, y + 17, f"rank {place.rank}", weight="bold"),
            *(words(x + 8, y + 34 + 15 * number, line, size=12) for number, line in enumerate(_said(self._mesh, place))),
        ]

    def onward(self, rank: int) -> list[str]:
        """To the next stage."""
        stages = self._mesh.line(rank, "pipeline")
        place = stages.index(rank)
        if place + 1 == len(stages):
            return []
        (x, y), (to_x, to_y) = self._corner(rank), self._corner(stages[place + 1])
        if y == to_y and to_x - x == _WIDTH + _GAP:
            start, end = (x + _WIDTH + 2.0, y + 20.0), (to_x - 2.0, y + 20.0)
            bend, back = (start[0] + 6, start[1]), (end[0] - 6, end[1])
        elif y == to_y:  # below the boxes between them
            start, end = (x + _WIDTH / 2, y + self._high + 2.0), (to_x + _WIDTH / 2, y + self._high + 3.0)
            bend, back = (start[0], start[1] + 24), (end[0], end[1] + 24)
        else:
            start, end = (x + _WIDTH / 2, y + self._high + 2.0), (to_x + _WIDTH / 2, to_y - 2.0)
            bend, back = (start[0], start[1] + 14), (end[0], end[1] - 14)
        curve = " ".join(f"{a:.1f},{b:.1f}" for a, b in (bend, back, end))
        return [
            f'<path class="next" d="M{start[0]:.1f},{start[1]:.1f} C{curve}" fill="none" stroke="#b5541c" stroke-width="1.6" '
            'marker-end="url(#head)"/>'
        ]
