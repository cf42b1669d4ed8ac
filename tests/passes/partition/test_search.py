"""The cuts are the best ones: a planted optimum is found, and brute force over all legal cuts finds nothing faster."""

from itertools import combinations, pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.machine import Machine
from pdcompiler.core.partition import Problem
from pdcompiler.passes.partition.search import search_cuts

FREE_LINKS = Machine.flat(latency_seconds=1e-12)
SLOW_LINKS = Machine.flat(latency_seconds=0.1, bytes_per_second=1.0)


def problem(
    seconds: list[float], sent: list[float] | None = None, forbidden: tuple[int, ...] = (), machine: Machine = FREE_LINKS
) -> Problem:
    legal = numpy.array([place not in (0, *forbidden) for place in range(len(seconds))])
    graph = fx.Graph()
    nodes = [graph.placeholder(f"operation_{place}") for place in range(len(seconds))]
    bytes_sent = numpy.array(sent or [0.0] * len(seconds))
    messages, starts = numpy.ones(len(seconds)), numpy.ones(len(seconds), dtype=bool)
    return Problem(nodes, numpy.array(seconds), bytes_sent, messages, legal, starts, machine)


def slowest(one: Problem, cuts: tuple[int, ...]) -> float:
    """The time of the slowest stage: its operations, and one message each way over each of its borders."""
    bounds = [0, *cuts, len(one.seconds)]

    def message(place: int) -> float:
        return 2 * float(one.sent[place]) / one.machine.link_bytes_per_second if place in cuts else 0.0

    return max(float(one.seconds[start:stop].sum()) + message(start) + message(stop) for start, stop in pairwise(bounds))


def test_a_planted_optimum_is_found() -> None:
    """3 + 5 on the first stage would be 8, so the heavy operation goes with what follows, or with what comes before: 8 or 9."""
    assert search_cuts(problem([1, 1, 1, 5, 1, 1, 1, 1]), 2) == [4]


def test_the_parts_are_equal_where_they_can_be() -> None:
    assert search_cuts(problem([2, 2, 2, 2, 2, 2]), 3) == [2, 4]
    assert search_cuts(problem([1, 1, 1, 1, 1, 5]), 2) == [5]
    assert search_cuts(problem([3, 1]), 1) == []


def test_an_illegal_cut_is_not_made() -> None:
    assert search_cuts(problem([1, 1, 1, 5, 1, 1, 1, 1], forbidden=(4,)), 2) == [3]


def test_among_equal_cuts_the_one_that_sends_less() -> None:
    assert search_cuts(problem([1, 1, 0, 1, 1], sent=[0, 9, 9, 3, 9], machine=SLOW_LINKS), 2) == [3]


def test_a_message_may_be_dearer_than_an_uneven_cut() -> None:
    assert search_cuts(problem([1, 1, 1, 1], sent=[0, 9, 9, 0], machine=SLOW_LINKS), 2) == [3]


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(CompileError, match=r"the model can be cut in at most 3"):
        search_cuts(problem([1, 1, 1, 1], forbidden=(2,)), 4)


@given(st.data())
def test_as_good_as_brute_force(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 10))
    seconds = data.draw(st.lists(st.floats(0, 9), min_size=count, max_size=count))
    sent = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    forbidden = tuple(data.draw(st.sets(st.integers(1, max(count - 1, 1)), max_size=3)))
    machine = data.draw(st.sampled_from((FREE_LINKS, SLOW_LINKS, Machine.flat(latency_seconds=1.0, bytes_per_second=9.0))))
    one = problem(seconds, [float(size) for size in sent], forbidden, machine)
    stages = data.draw(st.integers(1, 4))
    places = [place for place in range(1, count) if place not in forbidden]
    if len(places) < stages - 1:
        with pytest.raises(CompileError):
            search_cuts(one, stages)
        return
    cuts = search_cuts(one, stages)
    assert len(cuts) == stages - 1 and set(cuts) <= set(places) and cuts == sorted(set(cuts))
    best = min(slowest(one, candidate) for candidate in combinations(places, stages - 1))
    assert slowest(one, tuple(cuts)) <= best * (1 + 1e-6) + 1e-12
