"""The planner of branching graphs with one device a stage: the stages whose slowest is fastest, with a proof or a gap.

    StraightProblem --fold--> fewer layers --orders--> a good plan --inseparable--> fewer still --ideals--> all states
        --minimax--> the best plan        (too many states: all orders near the best, and a bound)

Each plan that is found makes all that follows easier: only better ones are sought. Plans with replication, memory in flight and
levels of bandwidth are `planner.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.lattice import Graph, Lattice, chain_lattice, in_new_order, make_graph
from pdcompiler.core.straight import CLOSE, Loads, StraightPlan, StraightProblem, check, judge_straight, least_seconds
from pdcompiler.core.workload import Floats
from pdcompiler.passes.partition.fold import Parts, fold, inseparable
from pdcompiler.passes.partition.ideals import MOST_STATES, ideals
from pdcompiler.passes.partition.minimax import GivenUp, fastest_slowest
from pdcompiler.passes.partition.orders import depth_first_orders, near, order_toward

ORDERS, MORE_ORDERS = 24, 4
"""How many topological orders are searched, and how many once more when layers have become inseparable."""
NEAR_STATES, NEAR_STEPS, NEAR_ROUNDS = 6_000, 5_000_000, 4
"""Of all orders near the best: how many states and candidate stages at most, and how often around the best that was found."""
BOUND_STEPS = 8
"""Of the bisection of the bound, where not all states could be searched."""


def plan_straight(problem: StraightProblem, most_states: int = MOST_STATES, orders: int = ORDERS) -> StraightPlan:
    """Raises CompileError where a device can't hold what must stand on it, or no plan was found with which all can."""
    check(problem)
    binding = problem.sizes is not None and float(problem.sizes.sum()) > problem.most_size
    found = Search(problem, most_states, orders, absorb_sizes=True, bounded=binding).run()
    if binding and (found is None or not found.proven):
        found = Search(problem, most_states, orders, absorb_sizes=False, bounded=True, best=found).run() or found
    if found is None:
        assert problem.sizes is not None
        raise CompileError(
            f"no plan was found that fits: {problem.devices} devices of {problem.most_size:g} bytes for "
            f"{problem.sizes.sum():g} bytes, {problem.sizes.max():g} of them in one layer",
            ways_out=(f"{int(problem.sizes.sum() // problem.most_size) + 2} devices",),
        )
    return found


class Search:
    """absorb_sizes: fold as if layers had no sizes.   bounded: whether the sizes can bind.   best: a plan to beat."""

    def __init__(
        self, problem: StraightProblem, most_states: int, orders: int, absorb_sizes: bool, bounded: bool,
        best: StraightPlan | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.most_states, self.orders, self.best = problem, most_states, orders, best
        self.absorb_sizes, self.bounded = absorb_sizes, bounded
        free = numpy.ones(problem.layers, dtype=bool) if problem.spare is None else problem.spare == 0
        if problem.sizes is not None and not absorb_sizes:
            free &= problem.sizes == 0
        self.weights = numpy.where(free, problem.seconds, numpy.inf)
        self.least = 0.0
        self._use(self._folded(problem.together))

    def run(self) -> StraightPlan | None:
        """The best plan that is found; None where none is."""
        self.least = least_seconds(self.loads, self.devices)
        self._along_orders(self.orders)
        how = self._exactly()
        if how is None:
            self._look_near()
            how = self._exactly() if self._join_inseparable() else None
        if self.best is None:
            return None
        if how is None:
            self._raise_bound()
            how = f"{self.orders} orders and all near the best, of a graph with too many states"
        bound = min(self.least, self.best.seconds)
        return StraightPlan(self.best.stages, self.best.spare, self.best.seconds, bound, how)

    @property
    def _limit(self) -> float:
        return numpy.inf if self.best is None else self.best.seconds

    def _folded(self, together: Sequence[Sequence[int]]) -> Parts:
        return fold(self.problem.layers, self.problem.edges, self.problem.values, together, self.weights)

    def _use(self, parts: Parts) -> None:
        """Search for plans that keep these parts whole from now on."""
        own = self.problem
        self.parts = parts
        self.part = numpy.zeros(own.layers, dtype=numpy.int64)
        for k, layers in enumerate(parts):
            self.part[list(layers)] = k
        part = self.part.tolist()
        edges = ((part[a], part[b]) for a, b in own.edges if part[a] != part[b])
        values = [[part[layer] for layer in members] for members, _ in own.values]
        self.graph = make_graph(len(parts), edges, values, [cost for _, cost in own.values])
        sizes = numpy.zeros(own.layers) if own.sizes is None else own.sizes
        spare = numpy.zeros(0) if own.spare is None else self._sums(own.spare)
        self.loads = Loads(self._sums(own.seconds), self._sums(sizes), own.most_size if self.bounded else numpy.inf, spare)
        self.devices = min(own.devices, len(parts))

    def _sums(self, per_layer: Floats) -> Floats:
        return numpy.bincount(self.part, per_layer, len(self.parts)).astype(numpy.float64)

    def _along_orders(self, count: int) -> None:
        chain = chain_lattice(self.graph.layers)
        for order in depth_first_orders(self.graph, count):
            self._improve(in_new_order(self.graph, order), chain, order)

    def _improve(self, graph: Graph, lattice: Lattice, order: Sequence[int], **options: int) -> bool:
        """Whether a better plan is found in a lattice of the graph's layers numbered by their place in `order`."""
        take = numpy.array(order, dtype=numpy.int64)
        own = self.loads
        loads = Loads(own.seconds[take], own.sizes[take], own.most_size, own.spare[take] if len(own.spare) else own.spare)
        found = fastest_slowest(graph, lattice, loads, self.devices, self._limit, **options)
        if found is None:
            return False
        places = [lattice.between(a, b) for a, b in zip(found.states, found.states[1:], strict=False)]
        stages = tuple(tuple(sorted(i for place in stage for i in self.parts[order[place]])) for stage in places)
        self.best = StraightPlan(stages, found.spare, judge_straight(self.problem, stages, found.spare), 0.0, "")
        return True

    def _joined(self, parts: Parts, limit: float) -> Parts:
        """What every plan below the limit keeps whole."""
        own, together = self.problem, [*self.problem.together, *(part for part in parts if len(part) > 1)]
        while more := inseparable(parts, own.values, own.seconds, limit, own.spare is not None):
            together += more
            parts = self._folded(together)
        return parts

    def _join_inseparable(self) -> bool:
        """Whether a better plan has fewer parts than the present ones."""
        joined = self._joined(self.parts, self._limit) if self.best is not None else self.parts
        if len(joined) == len(self.parts):
            return False
        self._use(joined)
        return True

    def _exactly(self) -> str | None:
        """Find the best plan and prove it; what was searched, or None where that takes too long."""
        while self.least < self._limit * (1 - CLOSE) and self._join_inseparable():
            self._along_orders(MORE_ORDERS)
        if min(least_seconds(self.loads, self.devices), self._limit) >= self._limit * (1 - CLOSE) and self.best is not None:
            self.least = self._limit
            return "a bound that no plan beats was reached"
        lattice = ideals(self.graph, self.most_states)
        if lattice is None:
            return None
        try:
            self._improve(self.graph, lattice, range(self.graph.layers))
            self.least = self._limit
            if self.bounded and self.absorb_sizes:  # such a fold leaves plans out; its best of any size is a bound of all
                loads = self.loads._replace(most_size=numpy.inf)
                any_size = fastest_slowest(self.graph, lattice, loads, self.devices, self._limit)
                self.least = any_size.seconds if any_size else self._limit
        except GivenUp:
            return None
        return f"all {lattice.states:,} states"

    def _look_near(self) -> None:
        for _ in range(NEAR_ROUNDS if self.best is not None else 0):
            assert self.best is not None
            rank = numpy.zeros(self.problem.layers)
            for index, stage in enumerate(self.best.stages):
                rank[list(stage)] = index
            order = order_toward(self.graph, [float(rank[list(part)].mean()) for part in self.parts])
            if not self._improve_near(order):
                return

    def _improve_near(self, order: Sequence[int]) -> bool:
        found: list[tuple[Graph, Lattice]] = []
        for width in range(2, self.graph.layers + 1):
            graph = near(self.graph, order, width)
            lattice = ideals(graph, NEAR_STATES)
            if lattice is None:
                break
            found.append((graph, lattice))
        for graph, lattice in found[-1:-4:-1]:  # the widest that is not too much
            try:
                return self._improve(graph, lattice, order, most_steps=NEAR_STEPS)
            except GivenUp:
                continue
        return False

    def _raise_bound(self) -> None:
        """By the limits under which so much is inseparable that no plan is left."""
        parts = self._folded(self.problem.together)
        low, high = self.least, self._limit
        for _ in range(BOUND_STEPS):
            middle = (low + high) / 2
            joined = self._joined(parts, middle)
            self._use(joined)
            if least_seconds(self.loads, self.devices) >= middle:
                low = middle
            else:
                high = middle
        self.least = low
