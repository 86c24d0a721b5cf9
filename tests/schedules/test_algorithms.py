"""What the algorithms are known for: messages, what each rank sends, the order of addition."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import pytest

from lockstep.schedules.algorithms import (
    ALGORITHMS,
    SMALL_ALL_REDUCE,
    algorithms_of,
    choose_algorithm,
    schedule,
)
from lockstep.schedules.prove import prove
from tests.collectives.numbers import KINDS
from tests.refused import refused


def balanced(ranks: range) -> str:
    """The balanced tree over neighbours: ((0+1)+(2+3))."""
    if len(ranks) == 1:
        return str(ranks[0])
    half = len(ranks) // 2
    return f"({balanced(ranks[:half])}+{balanced(ranks[half:])})"


def one_by_one(ranks: range) -> str:
    text = str(ranks[0])
    for rank in ranks[1:]:
        text = f"({text}+{rank})"
    return text


@pytest.mark.parametrize("world", [*range(1, 18), 32, 64])
def test_what_each_all_reduce_sends(world: int) -> None:
    """The closed formulas of test_network.py count the rounds."""
    log, core = ceil(log2(world)), 2 ** int(log2(world))
    ring, central, tree, doubling, direct = (
        prove(schedule("all_reduce", name, world))
        for name in ("ring", "central", "tree", "recursive_doubling", "direct")
    )
    for spread in (ring, direct):
        assert spread.messages == 2 * world * (world - 1)
        assert set(spread.cells_sent_by) == {2 * (world - 1)}
    assert central.messages == tree.messages == 2 * (world - 1)
    assert central.cells_sent_by == (world - 1, *[1] * (world - 1))
    assert central.orders == {0: one_by_one(range(world))}
    assert max(tree.cells_sent_by) == max(1, log) * (world > 1)
    assert doubling.messages == core * log2(core) + 2 * (world - core)
    if world == core:
        halving = schedule("all_reduce", "halving_doubling", world)
        shares = [sent / halving.cells for sent in prove(halving).cells_sent_by]
        assert shares == [2 * (world - 1) / world] * world


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", ["tree", "recursive_doubling", "halving_doubling"])
def test_powers_of_two_are_added_along_the_balanced_tree(name: str, world: int) -> None:
    orders = prove(schedule("all_reduce", name, world)).orders.values()
    assert set(orders) == {balanced(range(world))}


def test_other_orders_of_addition() -> None:
    """A ring adds each cell in another order; hierarchical adds each node along its tree."""
    assert prove(schedule("all_reduce", "ring", 4)).orders == {
        0: "(((0+1)+2)+3)",
        1: "(0+((1+2)+3))",
        2: "((0+(2+3))+1)",
        3: "(((0+3)+1)+2)",
    }
    for ranks_per_node in (1, 2, 4):
        world = 2 * ranks_per_node
        built = schedule("all_reduce", "hierarchical", world, ranks_per_node=ranks_per_node)
        assert set(prove(built).orders.values()) == {balanced(range(world))}


@pytest.mark.parametrize("world", [1, 2, 5, 8, 12, 13])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 8])
def test_only_the_first_rank_of_a_node_crosses_the_network(world: int, ranks_per_node: int) -> None:
    built = schedule("all_reduce", "hierarchical", world, ranks_per_node=ranks_per_node)
    leaders = set(range(0, world, ranks_per_node))
    for transfers in built.transfers():
        for each in transfers:
            if each.src // ranks_per_node != each.dst // ranks_per_node:
                assert {each.src, each.dst} <= leaders
                assert len(each.cells) == 1


def test_a_central_reduce_adds_to_the_root_in_order_of_rank() -> None:
    """As the proof writes it: of two terms the one with the lesser first rank stands first."""
    texts = [prove(schedule("reduce", "central", 3, root=root)).orders[0] for root in range(3)]
    assert texts == ["((0+1)+2)", "((0+1)+2)", "((0+2)+1)"]


def test_every_name_is_known_to_the_type() -> None:
    names = {name for kind in KINDS for name in algorithms_of(kind)}
    assert names | {"auto", "native", "shared_memory"} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("arguments", "more", "code", "values"),
    [
        (("all_reduce", "rong", 4), {}, "unknown-algorithm", {"algorithm": "rong"}),
        (("scatter", "ring", 4), {}, "unknown-algorithm", {"choices": ["central", "tree"]}),
        (("reduce_all", "ring", 4), {}, "unknown-choice", {"name": "kind", "value": "reduce_all"}),
        (("reduce", "tree", 4), {"root": 4}, "root-outside-group", {"root": 4, "size": 4}),
        (("reduce", "tree", 4), {"root": -1}, "root-outside-group", {"root": -1, "size": 4}),
        (("all_reduce", "hierarchical", 4), {}, "wrong-value", {"name": "ranks_per_node"}),
        (("all_reduce", "hierarchical", 4), {"ranks_per_node": 0}, "wrong-value", {"value": 0}),
        (("all_reduce", "ring", 0), {}, "wrong-value", {"name": "world", "value": 0}),
    ],
)
def test_what_cannot_be_built_is_said(
    arguments: tuple[Any, ...], more: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        schedule(*arguments, **more)


def test_auto_takes_recursive_doubling_for_a_small_all_reduce_only() -> None:
    small, large = SMALL_ALL_REDUCE, SMALL_ALL_REDUCE + 1
    assert choose_algorithm("all_reduce", small, 2) == "recursive_doubling"
    assert choose_algorithm("all_reduce", large, 2) == "native"
    assert choose_algorithm("all_reduce", small, 1) == "native"  # nobody to talk to
    others = [kind for kind in KINDS if kind != "all_reduce"]
    assert {choose_algorithm(kind, 1, 4) for kind in others} == {"native"}
