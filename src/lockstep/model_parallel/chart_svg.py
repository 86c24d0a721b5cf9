"""A pipeline's clock chart as a drawing: a row a rank, time to the right, grey where a rank waits."""

from __future__ import annotations

from lockstep.collectives.draw_svg import words
from lockstep.errors import UsageError
from lockstep.model_parallel.chart import Chart, Placed, label, title

_COLOURS = {"F": ("#9ecae1", "#4f94c8"), "B": ("#a1d99b", "#4fa85c"), "I": ("#a1d99b", "#4fa85c"), "W": ("#fdd49e", "#f0a04b")}
"""Of a rank's first and last stage."""
_IDLE = "#eeeeee"
_TOP, _LEFT, _ROW, _GAP = 96, 76, 32, 8  # px: above the first row, left of it, a row's height, between two
_WIDEST, _UNIT, _NARROWEST, _ROOM = 1500, 44, 9, 22  # px: of the chart; most and fewest of a forward; that a box's words need
_RANKS = 32


def svg(found: Chart) -> str:
    """The drawing as SVG. Raises UsageError for more than fits on a page."""
    unit = min(_UNIT, _WIDEST / float(found.length))
    if unit < _NARROWEST or found.ranks > _RANKS:
        raise UsageError(
            f"{found.ranks} ranks and {found.micro_batches} micro-batches do not fit in a drawing: up to {_RANKS} ranks and "
            f"{_WIDEST // _NARROWEST} forwards' time do, and this takes {float(found.length):g}; the text form shows more"
        )
    width = max(_LEFT + float(found.length) * unit + 20, 640)
    height = _TOP + found.ranks * (_ROW + _GAP) + 40
    first, *others = title(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
        words(20, 28, first, size=17, weight="bold"),
        *(words(20, 50 + 18 * number, line) for number, line in enumerate(others)),
    ]
    for rank, row in enumerate(found.rows):
        top = _TOP + rank * (_ROW + _GAP)
        parts.append(words(20, top + 21, f"rank {rank}", weight="bold"))
        parts.append(_box(_LEFT, top, float(found.length) * unit, _IDLE))
        for placed in row:
            parts += _work(found, placed, top, unit)
    return "\n".join([*parts, *_legend(found, height), "</svg>"]) + "\n"


def _work(found: Chart, placed: Placed, top: float, unit: float) -> list[str]:
    left, width = _LEFT + float(placed.start) * unit, float(placed.length) * unit
    parts = [_box(left, top, width, _colour(found, placed.work.kind, placed.work.stage // found.ranks))]
    inside = label(placed.work, found)[1:]
    if width >= _ROOM - 6 + 6 * (len(inside) - 1):
        parts.append(words(left + width / 2, top + 21, inside, anchor="middle", size=12))
    return parts


def _colour(found: Chart, kind: str, which: int) -> str:
    """The later a rank's stage, the darker."""
    light, dark = (tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in _COLOURS[kind])
    share = which / max(1, found.schedule.per_rank - 1)
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in zip(light, dark, strict=True))


def _legend(found: Chart, height: float) -> list[str]:
    kinds = [kind for kind in "FBIW" if any(placed.work.kind == kind for row in found.rows for placed in row)]
    meanings = {"F": "forward", "B": "backward", "I": "backward for the inputs", "W": "backward for the weights"}
    parts, left = [], 20.0
    for colour, meaning in [*((_colour(found, kind, 0), meanings[kind]) for kind in kinds), (_IDLE, "idle")]:
        parts += [_box(left, height - 28, 14, colour, 14), words(left + 20, height - 16, meaning, size=12)]
        left += 44 + 6.4 * len(meaning)
    several = "; the darker, the later of the rank's stages" if found.schedule.per_rank > 1 else ""
    return [*parts, words(left, height - 16, f"numbers are micro-batches{several}", size=12)]


def _box(left: float, top: float, width: float, colour: str, height: float = _ROW) -> str:
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" fill="{colour}" stroke="#777"/>'
