"""Writes into index.html what it takes from the code: the rounds of each all-reduce algorithm and
what they cost, for 2 to 16 ranks. Nothing of it is computed a second time in the page.

    python docs/explore/schedules.py
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.runs import Settings
from lockstep.schedules.algorithms import schedule
from lockstep.schedules.network import Network
from lockstep.schedules.schedule import Schedule
from lockstep.tools.plan.carriers import cost
from lockstep.tools.plan.communication import WIDTH, messages
from lockstep.tools.plan.networks import NETWORKS, TCP
from lockstep.tools.plan.profile import GradientBucket
from lockstep.tools.plan.work import BACKWARD

PAGE = Path(__file__).with_name("index.html")
ALGORITHMS = ("ring", "tree", "halving_doubling", "central")
RANKS = range(2, 17)
_DATA = re.compile(r'(<script type="application/json" id="schedules">\n).*?(</script>)', re.DOTALL)
_FLAT = Network.flat(1.0, 1.0)


def of_schedule(found: Schedule) -> dict[str, Any]:
    """A round is [adds, repeat, shift, load, transfers]; `load`: cells of the rank that has most to
    send or to receive; a transfer is [src, dst, cell, count].
    """
    costs = cost(_FLAT, "all_reduce", found.name, found.world)
    rounds = []
    for each in found.rounds:
        once = replace(found, rounds=(replace(each, repeat=1),))
        load = Network.flat(0.0, 1.0).time(once, found.cells)
        columns = (each.src, each.dst, each.cell, each.count)
        transfers = [
            list(row) for row in zip(*(column.tolist() for column in columns), strict=True)
        ]
        rounds.append([each.reduce, each.repeat, each.shift, load, transfers])
    return {
        "cells": found.cells,
        "rounds": rounds,
        "messages": costs.latency,
        "load": costs.per_byte,
        "sends": costs.sends,
    }


def data() -> dict[str, Any]:
    """All that the page takes from the code."""
    bucket = GradientBucket(ready=1.0, elements=1)
    return {
        "payload": TCP,
        "backward": BACKWARD,
        "width": WIDTH,
        "networks": {
            name: [1e6 * link.latency, round(8 * link.bandwidth / TCP / 1e9, 9)]
            for name, link in NETWORKS.items()
            if name != "free"
        },
        "late": {
            name: messages(Settings(task="page", reduce=name), bucket, WIDTH)[0].late  # type: ignore[arg-type]  # four of its choices
            for name in ALGORITHMS
        },
        "schedules": {
            name: {str(world): of_schedule(schedule("all_reduce", name, world)) for world in RANKS}
            for name in ALGORITHMS
        },
    }


def filled(page: str) -> str:
    """The page with today's data."""
    text = json.dumps(data(), separators=(",", ":"))
    text = text.replace('},"', '},\n"')  # one schedule a line
    found, count = _DATA.subn(lambda place: f"{place[1]}{text}\n{place[2]}", page)
    assert count == 1, "index.html has one place for the data"
    return found


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
