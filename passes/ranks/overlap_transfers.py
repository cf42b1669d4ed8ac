"""Ask for values before they are needed, so that messages travel while the rank computes.

    before (window 2)                       after
    a = recv(channel="0->1")                p0 = start_recv(channel="0->1");  p1 = start_recv(channel="0->1")
    y = f(a)                                a = finish_recv(p0);  y = f(a)
    b = recv(channel="0->1")                p2 = start_recv(channel="0->1")
    z = f(b)                                b = finish_recv(p1);  z = f(b)
    c = recv(channel="0->1")                ...

A receive that is put by for a later program (`stash`) is put by unfinished, and finished where that program takes it back; on a
channel without a window, too, where it is started in its place.

At most `window` receives of a channel are open ahead of their place, so receive buffers do not grow with the number of
microbatches. A receive is started where the one `window` before it stood, or at the beginning: never later than before this
pass, in the same order per channel, so the proof against deadlock stays. It is finished right before its first reader, and a
message of several values is taken apart there: before, the rank would wait for what it does not need yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram


def overlap_transfers(program: RankProgram, window: Mapping[str, int]) -> RankProgram:
    """window: per channel, how many receives may be open; on a channel that is not in it, each is received in its place."""
    graph = program.graph
    channels: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is ops.recv and node.kwargs["channel"] in window:
            channels[str(node.kwargs["channel"])].append(node)
        elif node.target is ops.recv and any(user.target is ops.stash for user in node.users):
            node.target = ops.start_recv
    place = {node: i for i, node in enumerate(graph.nodes)}  # of readers; starts never are
    first = next(node for node in graph.nodes if node.op != "placeholder")
    _finish_restored(graph)
    for channel, receives in channels.items():
        size = window[channel]
        for i, receive in enumerate(receives):
            before = first if i < size else receives[i - size].next
            _start(graph, receive, before)
    for receives in channels.values():
        for receive in receives:
            _finish(receive, place)
    return program


def _start(graph: fx.Graph, receive: fx.Node, before: fx.Node) -> None:
    """Insert the start; the receive, kept for now as a mark of its place, remembers it."""
    with graph.inserting_before(before):
        start = graph.create_node("call_function", ops.start_recv, (), dict(receive.kwargs), name=f"pending_{receive.name}")
    start.meta = dict(receive.meta)
    receive.meta["start"] = start


def _finish(receive: fx.Node, place: dict[fx.Node, int]) -> None:
    """The receive itself becomes the finish, and moves to its first reader."""
    start: Any = receive.meta.pop("start")
    receive.target, receive.args, receive.kwargs = ops.finish_recv, (start,), {}
    if any(user.target is ops.stash for user in receive.users):
        assert len(receive.users) == 1, f"{receive.name} is put by, and read before"
        receive.replace_all_uses_with(start)
        receive.graph.erase_node(receive)
        return
    values = _unpacked(receive)
    readers = [user for value in values for user in value.users if user not in values]
    reader = min(readers, key=lambda user: place.get(user, 0), default=None)
    if reader is not None:
        for value in values:
            reader.prepend(value)


def _unpacked(receive: fx.Node) -> list[fx.Node]:
    """The receive, and where its message is several values, these."""
    unpacks = [user for user in receive.users if user.target is ops.unpack]
    return [receive, *unpacks, *(item for unpack in unpacks for item in unpack.users)]


def _finish_restored(graph: fx.Graph) -> None:
    """What another rank made and an earlier program put by is a receive that has not finished."""
    for node in list(graph.nodes):
        if node.target is ops.restore and node.meta["maker"] is not None:
            with graph.inserting_before(node):
                pending = graph.create_node("call_function", ops.restore, (), dict(node.kwargs), name=f"pending_{node.name}")
            pending.meta = dict(node.meta)
            node.target, node.args, node.kwargs = ops.finish_recv, (pending,), {}
