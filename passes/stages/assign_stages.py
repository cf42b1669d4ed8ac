"""Give every operation of a trace its stage, by the partition's words.

Forward, in graph order, four rules:
1. views, getitems and integers follow what they read;
2. an operation that reads a parameter stands on its owner (a parameter with several owners: the one of its module call, else
   the lowest that is not before its other inputs);
3. the other operations of a module call that has a stage, or that lies in one that has, stand there;
4. the rest takes the lowest legal stage, the highest of its inputs.

Operations that may not be parted stand on the highest of their stages: rule 4 alone could leave some on a lower one.

Backward: the stage of the forward operation that caused it (seq_nr), or of a later value that it reads; then lowered to the
lowest stage among the backward operations that feed it, since the sums that autograd makes of several gradients carry a wrong
seq_nr, and to an owner of the parameter that it reads (a custom Function may save one that its forward does not read).

No assignment can be wrong, since what crosses stages is dataflow, as long as no edge runs the wrong way; that is checked.
"""

from __future__ import annotations

from torch import fx

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace, is_backward, is_integer, module_of, stage_of, where
from pdcompiler.core.partition import Partition
from pdcompiler.core.values import Origins, inseparable, is_view


def assign_stages(trace: Trace, partition: Partition) -> Trace:
    """Write `stage` to the metadata of every operation. Raises CompileError where the partition is not for this model."""
    forward = _Forward(trace, partition)
    forward.assign()
    _assign_backward(trace, forward)
    check_edges(trace)
    return trace


class _Forward:
    """The four rules, in one walk."""

    def __init__(self, trace: Trace, partition: Partition) -> None:
        self.trace = trace
        self.owners = partition.owners()
        self.partition = partition
        self.last = len(partition.stages) - 1
        origins = Origins(trace)
        self.views = origins.weight_values - origins.parameter_values
        self.floors: dict[fx.Node, int] = {}

    def assign(self) -> None:
        groups = [group for _, group in inseparable(self.trace)]
        self._walk()
        while any([self._raise(group) for group in groups]):
            self._walk()
        self._settle_views()

    def _walk(self) -> None:
        for node in self.trace.graph.nodes:
            if node.op == "call_function" and not is_backward(node):
                node.meta["stage"] = self._stage(node)

    def _raise(self, group: list[fx.Node]) -> bool:
        """Let operations that may not be parted stand no lower than the highest of them; whether that moves one."""
        highest = max(map(stage_of, group), default=0)
        low = [node for node in group if stage_of(node) < highest]
        self.floors |= dict.fromkeys(low, highest)
        return bool(low)

    def _stage(self, node: fx.Node) -> int:
        lowest = max((stage_of(i) for i in node.all_input_nodes if i.op == "call_function" and i not in self.views), default=0)
        lowest = max(lowest, self.floors.get(node, 0))
        owners = self.owners_read(node)
        call = self.partition.stage_of(module_of(node))
        if (is_view(node) or is_integer(node)) and not owners:
            return lowest
        if owners:
            return self._owner(node, owners, call, lowest)
        return lowest if call is None else max(call, lowest)

    def _owner(self, node: fx.Node, owners: set[int], call: int | None, lowest: int) -> int:
        possible = [stage for stage in owners if stage >= lowest]
        wanted = call if call is not None and call in owners else min(possible, default=max(owners))
        if wanted < lowest and not is_view(node):
            raise CompileError(
                f"the partition puts a parameter on stage {wanted}, but it is read with a value of stage {lowest}",
                where=where(node), ways_out=("begin the stages elsewhere", "let pdcompiler choose the partition"),
            )
        return wanted

    def owners_read(self, node: fx.Node) -> set[int]:
        """The stages that own what a node reads of parameters, through views of them."""
        sets = [self._owners_of(i) for i in node.all_input_nodes]
        sets = [found for found in sets if found]
        if len(sets) < 2:
            return sets[0] if sets else set()
        common = set.intersection(*sets)
        return common or {max(max(found) for found in sets)}

    def _owners_of(self, value: fx.Node) -> set[int]:
        meaning = self.trace.inputs.get(value.name) if value.op == "placeholder" else None
        if meaning is not None and meaning.kind == "parameter":
            name = self.trace.canonical[meaning.name]
            if name not in self.owners:
                raise CompileError(f"the partition has no stage for parameter {name}: it is for another model")
            return set(self.owners[name])
        if value in self.views:
            return self.owners_read(value)
        return set()

    def _settle_views(self) -> None:
        """A view of a parameter stands where it is read (it is made again on each such stage, see localize_cheap_values)."""
        for node in reversed(self.trace.graph.nodes):
            if node in self.views:
                readers = [stage_of(user) for user in node.users if "stage" in user.meta and not is_backward(user)]
                if readers:
                    node.meta["stage"] = min(readers)


def _assign_backward(trace: Trace, forward: _Forward) -> None:
    of_sequence = _stages_of_sequences(trace, forward.views)
    for node in trace.graph.nodes:
        if node.op == "call_function" and is_backward(node):
            feeding = [stage_of(i) for i in node.all_input_nodes if i.op == "call_function" and is_backward(i)]
            stage = min([of_sequence.get(node.meta.get("seq_nr", -1), forward.last), *feeding])
            owners = forward.owners_read(node)
            node.meta["stage"] = stage if not owners else max((o for o in owners if o <= stage), default=min(owners))


def _stages_of_sequences(trace: Trace, views: set[fx.Node]) -> dict[int, int]:
    """Per seq_nr the stage of the first forward operation that has it, or of the last forward value that its backward reads.

    The others that have it need not be its doing: an operation without gradient has the number of the one before it.
    """
    stages: dict[int, int] = {}
    for node in trace.graph.nodes:
        number = node.meta.get("seq_nr", -1)
        if node.op == "call_function" and not is_backward(node):
            stages.setdefault(number, stage_of(node))
        elif node.op == "call_function":
            read = [i for i in node.all_input_nodes if i.op == "call_function" and not is_backward(i) and i not in views]
            if number in stages:
                stages[number] = max([stages[number], *map(stage_of, read)])
    return stages


def check_edges(trace: Trace) -> None:
    """Forward values go to later stages or stay, gradients to earlier ones; a backward reads forwards of its own and earlier.

    Views of weights are exempt: they are made again where they are read.
    """
    origins = Origins(trace)
    views = origins.weight_values - origins.parameter_values
    for node in trace.graph.nodes:
        for source in node.all_input_nodes:
            if "stage" not in node.meta or "stage" not in source.meta or source in views:
                continue
            ahead = stage_of(source) < stage_of(node) if is_backward(source) else stage_of(source) > stage_of(node)
            if ahead:
                raise CompileError(
                    f"stage {stage_of(node)} would need a value of stage {stage_of(source)}, against the order of the pipeline",
                    where=where(node), ways_out=("begin the stages elsewhere", "let pdcompiler choose the partition"),
                )
