"""Costs add up, and are evaluated for any number of rows without another look at the graph."""

import math

import numpy
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from pdcompiler.core.cost import FIELDS, Cost, CostTable, total_cost
from pdcompiler.core.value_type import ROWS

LINEAR = Cost(flops=96 * ROWS, bytes_read=24 * ROWS + 192, bytes_written=32 * ROWS, saved_bytes=32 * ROWS, operations=1)
UNEVEN = Cost(flops=FloorDiv(ROWS, 2) + sympy.Max(ROWS, 3), operations=1, notes=("uneven",))


def test_costs_add_field_by_field() -> None:
    both = Cost(1, 2, 3, 4, 5, 6, 1) + Cost(10 * ROWS, 20, 30, 40, 50, 60, 1)
    assert both == Cost(10 * ROWS + 1, 22, 33, 44, 55, 66, 2)
    assert both.bytes == 55
    assert total_cost([]) == Cost()


def test_a_cost_has_numbers_at_any_number_of_rows() -> None:
    assert LINEAR.at(4) == Cost(384, 288, 128, 0, 128, 0, 1)
    assert LINEAR.at(5).bytes == 312 + 160
    assert [UNEVEN.at(rows).flops for rows in (1, 2, 7)] == [3, 4, 10]


def test_a_size_that_depends_on_data_counts_as_the_rows() -> None:
    found = sympy.Symbol("u0", integer=True)
    assert Cost(flops=3 * found).at(7).flops == 21
    assert CostTable([Cost(flops=found * ROWS)]).at(7)[0, 0] == 49


def test_measured_seconds_add_where_all_that_costs_anything_was_measured() -> None:
    measured = Cost(flops=10, operations=1, seconds=0.5 * ROWS)
    assert (measured + measured + Cost()).seconds == 1.0 * ROWS
    assert (measured + LINEAR).seconds is None
    assert (Cost() + Cost(output_bytes=4)).seconds is None
    assert measured.at(4).seconds == 2.0 and LINEAR.at(4).seconds is None


def test_notes_are_kept_once() -> None:
    assert (UNEVEN + LINEAR + UNEVEN).notes == ("uneven",)


def test_a_table_has_a_row_for_each_cost() -> None:
    table = CostTable([LINEAR, Cost(), UNEVEN, LINEAR])
    assert table.at(4).tolist() == [[getattr(cost.at(4), name) for name in FIELDS] for cost in (LINEAR, Cost(), UNEVEN, LINEAR)]
    assert math.isnan(table.seconds_at(4)[0])
    assert CostTable([Cost(seconds=2 * ROWS)]).seconds_at(3).tolist() == [6.0]
    assert CostTable([]).at(3).shape == (0, len(FIELDS))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8), st.integers(1, 40), st.data())
def test_law_the_parts_of_any_split_add_up_to_the_whole(numbers: list[tuple[int, int]], rows: int, data: st.DataObject) -> None:
    costs = [Cost(flops=a * ROWS**2 + b, bytes_read=b * ROWS, operations=1) for a, b in numbers]
    cut = data.draw(st.integers(0, len(costs)))
    assert total_cost(costs[:cut]) + total_cost(costs[cut:]) == total_cost(costs)
    whole = total_cost(costs).at(rows)
    assert numpy.array_equal(CostTable(costs).at(rows).sum(0), [getattr(whole, name) for name in FIELDS])
