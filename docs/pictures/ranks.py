"""Draws ranks.svg: two nodes with two ranks each, with their numbers and devices.

python docs/pictures/ranks.py --out ranks.svg
"""

from __future__ import annotations

import argparse

from lockstep.tools.drawing import CARD, INK, MARGIN, SERIES, TINT, Drawing

NODES, LOCAL_RANKS = 2, 2
_BOX, _GAP = 92, 8  # px: the width of a rank, and the space around it
_NODE = LOCAL_RANKS * (_BOX + _GAP) + _GAP


def drawing() -> Drawing:
    title = f"world size {NODES * LOCAL_RANKS}: four processes on two nodes"
    sheet = Drawing(title)
    top = sheet.heading([title])
    for node in range(NODES):
        left = MARGIN + node * (_NODE + 2 * _GAP)
        sheet.box(left, top, _NODE, 116, CARD, stroke=INK, rx=6)
        sheet.words(left + _GAP, top + 20, f"node {node}", weight="bold")
        for local_rank in range(LOCAL_RANKS):
            rank = LOCAL_RANKS * node + local_rank
            x = left + _GAP + local_rank * (_BOX + _GAP)
            sheet.box(x, top + 30, _BOX, 78, SERIES[node], tint=TINT, stroke=SERIES[node], rx=5)
            lines = [f"local rank {local_rank}", f"cuda:{local_rank} or CPU"]
            sheet.words(x + _BOX / 2, top + 52, f"rank {rank}", anchor="middle", weight="bold")
            for number, line in enumerate(lines, start=1):
                sheet.words(x + _BOX / 2, top + 52 + 20 * number, line, anchor="middle", size=11.5)
    note = "Rank 0 listens at MASTER_ADDR:MASTER_PORT. All ranks connect to it, and learn the addresses"
    sheet.note(top + 138, f"{note} of the others. Then they exchange tensors directly.", wrap=420)
    sheet.enlarge(680, most=1.5)
    return sheet


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    drawing().save(options.parse_args().out)
