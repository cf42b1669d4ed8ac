"""The stages whose slowest is fastest: small graphs that one can check by hand. (`tests/test_branching.py` tries all plans.)"""

from __future__ import annotations

import numpy
import pytest

from pdcompiler.core.lattice import Graph, Lattice, chain_lattice, make_graph
from pdcompiler.core.straight import Loads, least_seconds
from pdcompiler.passes.partition.ideals import ideals
from pdcompiler.passes.partition.minimax import GivenUp, Stages, fastest_slowest


def chain(costs: list[float]) -> Graph:
    edges = [(k, k + 1) for k in range(len(costs))]
    return make_graph(len(costs) + 1, edges, edges, costs)


def stages_of(found: Stages | None, lattice: Lattice) -> list[tuple[int, ...]]:
    assert found is not None
    return [lattice.between(a, b) for a, b in zip(found.states, found.states[1:], strict=False)]


def test_a_chain_is_cut_where_little_crosses() -> None:
    graph, lattice, loads = chain([9.0, 1.0, 9.0]), chain_lattice(4), Loads.of(numpy.array([1.0, 2.0, 3.0, 4.0]))
    found = fastest_slowest(graph, lattice, loads, devices=2)
    assert found is not None and found.seconds == 8.0
    assert stages_of(found, lattice) == [(0, 1), (2, 3)]


def test_one_stage_where_a_cut_costs_more() -> None:
    lattice = chain_lattice(2)
    found = fastest_slowest(chain([9.0]), lattice, Loads.of(numpy.ones(2)), devices=2)
    assert found == Stages(2.0, (0, 2), -1)


def test_branches_side_by_side() -> None:
    graph = make_graph(4, [(0, 1), (2, 3)], [(0, 1), (2, 3)], [5.0, 5.0])
    lattice = ideals(graph)
    assert lattice is not None
    found = fastest_slowest(graph, lattice, Loads.of(numpy.array([1.0, 2.0, 2.0, 1.0])), devices=2)
    assert found is not None and found.seconds == 3.0
    assert sorted(stages_of(found, lattice)) == [(0, 1), (2, 3)]


def test_a_value_is_charged_once_to_each_stage_that_it_touches() -> None:
    edges = [(0, k) for k in (1, 2, 3)]
    graph, lattice = make_graph(4, edges, [(0, 1, 2, 3)], [1.0]), chain_lattice(4)
    found = fastest_slowest(graph, lattice, Loads.of(numpy.full(4, 5.0)), devices=2)
    assert found is not None and found.seconds == 11.0


def test_the_spare_device_takes_any_one_stage() -> None:
    lattice, seconds = chain_lattice(3), numpy.array([4.0, 5.0, 3.0])
    loads = Loads.of(seconds, spare=numpy.array([50.0, 3.0, 50.0]))
    found = fastest_slowest(chain([1.0, 1.0]), lattice, loads, devices=2)
    assert found == Stages(5.0, (0, 1, 2, 3), 1)
    assert fastest_slowest(chain([1.0, 1.0]), lattice, Loads.of(seconds), devices=2) == Stages(9.0, (0, 1, 3), -1)


def test_sizes_move_a_cut() -> None:
    lattice, graph = chain_lattice(4), chain([0.0, 0.0, 0.0])
    loads = Loads.of(numpy.array([1.0, 1.0, 1.0, 1.0]), numpy.array([3.0, 1.0, 1.0, 1.0]), 3.0)
    assert stages_of(fastest_slowest(graph, lattice, loads, devices=2), lattice) == [(0,), (1, 2, 3)]
    assert fastest_slowest(graph, lattice, loads._replace(most_size=2.0), devices=2) is None


@pytest.mark.parametrize(("limit", "found"), [(8.0, False), (8.1, True), (0.0, False)])
def test_only_plans_below_the_limit_are_sought(limit: float, found: bool) -> None:
    loads = Loads.of(numpy.array([1.0, 2.0, 3.0, 4.0]))
    assert (fastest_slowest(chain([9.0, 1.0, 9.0]), chain_lattice(4), loads, 2, limit) is not None) == found


def test_a_search_gives_up_after_so_many_steps() -> None:
    graph, lattice, loads = chain([1.0] * 9), chain_lattice(10), Loads.of(numpy.ones(10))
    assert fastest_slowest(graph, lattice, loads, devices=3, most_steps=10 * 11 // 2) is not None
    with pytest.raises(GivenUp):
        fastest_slowest(graph, lattice, loads, devices=3, most_steps=5)


def test_what_no_plan_beats() -> None:
    seconds = numpy.array([6.0, 2.0, 2.0, 2.0])
    assert least_seconds(Loads.of(seconds), devices=3) == 6.0
    assert least_seconds(Loads.of(seconds), devices=1) == 12.0
    spare = numpy.array([6.0, 20.0, 20.0, 20.0])
    assert least_seconds(Loads.of(seconds, spare=spare), devices=1) == pytest.approx(6.0)
