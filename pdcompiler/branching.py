"""Plans of a branching graph with one device a stage: the stages whose slowest is fastest, with a proof or a gap.

    StraightProblem --fold--> fewer layers --orders--> a good plan --ideals--> all states --minimax--> the best plan
                                                                \\--too many states: all orders near the best, and a bound

Transfers are charged in seconds to each stage that a value touches without lying on it whole, there need be no order among those
who touch it, and a spare device may take one stage: more than a Workload and a Machine say. Plans with replication, memory in
flight and levels of bandwidth are `planner.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from pdcompiler.core.errors import CompileError
from pdcompiler.core.lattice import Graph, Lattice, chain_lattice, in_new_order, make_graph
from pdcompiler.core.workload import Floats
from pdcompiler.passes.partition.fold import Parts, fold
from pdcompiler.passes.partition.ideals import MOST_STATES, ideals
from pdcompiler.passes.partition.minimax import CLOSE, Loads, fastest_slowest, least_seconds
from pdcompiler.passes.partition.orders import depth_first_orders, near, order_of

ORDERS = 32
NEAR_STATES, NEAR_ROUNDS = 20_000, 6
"""Of all orders near the best: how many states at most, and how often around the best that was found."""


@dataclass(frozen=True)
class StraightProblem:
    """edges: which layer must run before which; only within groups may they have cycles.   values: the layers of each, in any
    order, and what its transfer takes.   seconds: of each layer.   spare: the same on the spare device, or None.   sizes:
    of each layer; no device but the spare one holds more than `most_size`.   together: groups that must not be parted."""

    edges: tuple[tuple[int, int], ...]
    values: tuple[tuple[tuple[int, ...], float], ...]
    seconds: Floats
    devices: int
    spare: Floats | None = None
    sizes: Floats | None = None
    most_size: float = numpy.inf
    together: tuple[tuple[int, ...], ...] = ()

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.seconds)


@dataclass(frozen=True)
class StraightPlan:
    """seconds: of the slowest stage.   bound: no plan takes less.   spare: which stage is on the spare device, or -1.
    how: what was searched, in words."""

    stages: tuple[tuple[int, ...], ...]
    spare: int
    seconds: float
    bound: float
    how: str

    @property
    def gap(self) -> float:
        """How far it may be from the best, relative to the bound."""
        return max(0.0, self.seconds / self.bound - 1) if self.bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no plan is better."""
        return self.gap <= 2 * CLOSE


def plan_straight(problem: StraightProblem, most_states: int = MOST_STATES, orders: int = ORDERS) -> StraightPlan:
    """Raises CompileError where a device can't hold what must stand on it, or no plan was found with which all can."""
    check(problem)
    binding = problem.sizes is not None and float(problem.sizes.sum()) > problem.most_size
    found = _Search(problem, absorb_sizes=True, bounded=binding).run(most_states, orders)
    if found is None or (binding and not found.proven):
        finer = _Search(problem, absorb_sizes=False, bounded=binding).run(most_states, orders, found)
        found = finer or found
    if found is None:
        assert problem.sizes is not None
        raise CompileError(
            f"no plan was found that fits: {problem.devices} devices of {problem.most_size:g} bytes for "
            f"{problem.sizes.sum():g} bytes, {problem.sizes.max():g} of them in one layer",
            ways_out=(f"{int(problem.sizes.sum() // problem.most_size) + 2} devices",),
        )
    return found


def judge_straight(problem: StraightProblem, stages: Sequence[Sequence[int]], spare: int = -1) -> float:
    """Seconds of the slowest stage, from the definitions. Raises CompileError where these are no stages of the problem."""
    where = {layer: index for index, stage in enumerate(stages) for layer in stage}
    if sorted(layer for stage in stages for layer in stage) != list(range(problem.layers)):
        raise CompileError(f"the stages do not hold each of {problem.layers} layers once")
    if len(stages) - (spare >= 0) > problem.devices or (spare >= 0 and problem.spare is None):
        raise CompileError(f"{len(stages)} stages, but {problem.devices} devices")
    for first, second in problem.edges:
        if where[first] > where[second]:
            raise CompileError(f"layer {second} on stage {where[second]} reads layer {first} of the later stage {where[first]}")
    for group in problem.together:
        if len({where[layer] for layer in group}) > 1:
            raise CompileError(f"layers {list(group)} must stand together")
    slowest = 0.0
    for index, stage in enumerate(stages):
        layers, own = set(stage), list(stage)
        if index == spare:
            assert problem.spare is not None
            slowest = max(slowest, float(problem.spare[own].sum()))
            continue
        if problem.sizes is not None and problem.sizes[own].sum() > problem.most_size * (1 + CLOSE):
            raise CompileError(f"stage {index} has {problem.sizes[own].sum():g} bytes, a device {problem.most_size:g}")
        crossing = sum(cost for members, cost in problem.values if layers & set(members) and set(members) - layers)
        slowest = max(slowest, float(problem.seconds[own].sum()) + crossing)
    return slowest


def check(problem: StraightProblem) -> None:
    """Raise CompileError for numbers that are none."""
    arrays = {"seconds": problem.seconds, "spare": problem.spare, "sizes": problem.sizes}
    for name, array in arrays.items():
        if array is not None and (len(array) != problem.layers or not (numpy.isfinite(array) & (array >= 0)).all()):
            raise CompileError(f"{name} must be {problem.layers} numbers of at least 0")
    if problem.devices < 1 or problem.layers < 1:
        raise CompileError(f"{problem.layers} layers on {problem.devices} devices; both must be at least 1")


@dataclass
class _Search:
    """absorb_sizes: fold as if layers had no sizes.   bounded: whether the sizes can bind.   best_parts: the best plan's stages,
    of folded layers."""

    problem: StraightProblem
    absorb_sizes: bool
    bounded: bool
    parts: Parts = field(init=False)
    graph: Graph = field(init=False)
    loads: Loads = field(init=False)
    devices: int = field(init=False)
    best: StraightPlan | None = field(init=False, default=None)
    best_parts: list[list[int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        own = self.problem
        free = numpy.ones(own.layers, dtype=bool) if own.spare is None else own.spare == 0
        if own.sizes is not None and not self.absorb_sizes:
            free &= own.sizes == 0
        weights = numpy.where(free, own.seconds, numpy.inf)
        self.parts = fold(own.layers, own.edges, own.values, own.together, weights)
        part = numpy.zeros(own.layers, dtype=numpy.int64)
        for k, layers in enumerate(self.parts):
            part[list(layers)] = k
        edges = ((int(part[a]), int(part[b])) for a, b in own.edges if part[a] != part[b])
        values = [[int(part[layer]) for layer in members] for members, _ in own.values]
        self.graph = make_graph(len(self.parts), edges, values, [cost for _, cost in own.values])

        def sums(per_layer: Floats | None) -> Floats:
            weights = numpy.zeros(own.layers) if per_layer is None else per_layer
            return numpy.asarray(numpy.bincount(part, weights, len(self.parts)), dtype=numpy.float64)

        most_size = own.most_size if self.bounded else numpy.inf
        spare = numpy.zeros(0) if own.spare is None else sums(own.spare)
        self.loads = Loads(sums(own.seconds), sums(own.sizes), most_size, spare)
        self.devices = min(own.devices, len(self.parts))

    def run(self, most_states: int, orders: int, best: StraightPlan | None = None) -> StraightPlan | None:
        """The best plan that is found, at least as good as `best`."""
        self.best = best
        order: Sequence[int] = range(self.graph.layers)
        chain = chain_lattice(self.graph.layers)
        for other in depth_first_orders(self.graph, orders):
            if self._improve(in_new_order(self.graph, other), chain, other):
                order = other
        bound = min(least_seconds(self.loads, self.devices), self._limit)
        if self.best is not None and self._limit <= bound * (1 + CLOSE):
            return self._proven(bound, "a bound that no plan beats was reached")
        lattice = ideals(self.graph, most_states)
        if lattice is None:
            self._look_near(order)
            return self._proven(bound, f"{orders} orders and all near the best, of a graph with over {most_states:,} states")
        self._improve(self.graph, lattice, range(self.graph.layers))
        bound = self._limit
        if self.bounded and self.absorb_sizes:  # such a fold leaves plans out; its best of any size is a bound of all
            loads = self.loads._replace(most_size=numpy.inf)
            any_size = fastest_slowest(self.graph, lattice, loads, self.devices, bound)
            bound = bound if any_size is None else any_size.seconds
        return self._proven(bound, f"all {lattice.states:,} states")

    @property
    def _limit(self) -> float:
        return numpy.inf if self.best is None else self.best.seconds

    def _proven(self, bound: float, how: str) -> StraightPlan | None:
        if self.best is None:
            return None
        return StraightPlan(self.best.stages, self.best.spare, self.best.seconds, min(bound, self.best.seconds), how)

    def _improve(self, graph: Graph, lattice: Lattice, order: Sequence[int]) -> bool:
        """Whether a better plan is found in a lattice of the graph's layers numbered by their place in `order`."""
        take = numpy.array(order, dtype=numpy.int64)
        own = self.loads
        loads = Loads(own.seconds[take], own.sizes[take], own.most_size, own.spare[take] if len(own.spare) else own.spare)
        found = fastest_slowest(graph, lattice, loads, self.devices, self._limit)
        if found is None:
            return False
        places = [lattice.between(a, b) for a, b in zip(found.states, found.states[1:], strict=False)]
        self.best_parts = [[order[place] for place in stage] for stage in places]
        stages = tuple(tuple(sorted(layer for part in stage for layer in self.parts[part])) for stage in self.best_parts)
        self.best = StraightPlan(stages, found.spare, judge_straight(self.problem, stages, found.spare), 0.0, "")
        return True

    def _look_near(self, order: Sequence[int]) -> None:
        for _ in range(NEAR_ROUNDS):
            widest = None
            for width in range(2, self.graph.layers):
                graph = near(self.graph, order, width)
                lattice = ideals(graph, NEAR_STATES)
                if lattice is None:
                    break
                widest = (graph, lattice)
            if widest is None or not self._improve(*widest, order):
                return
            order = order_of(self.best_parts, order)
