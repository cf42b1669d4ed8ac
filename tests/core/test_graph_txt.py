"""PipeDream's graph.txt: the same bytes again, layers as a Workload and back, and what is wrong with a text by its line."""

from pathlib import Path

import numpy
import pytest

from pdcompiler.core.errors import CompileError
from pdcompiler.core.graph_txt import Graph, GraphNode
from pdcompiler.core.workload import Value, Workload

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "pipedream_profiles"
FILES = [path for path in sorted(PROFILES.glob("*.txt")) if path.name != "LICENSE.txt"]
TEXT = (
    "node3 -- LSTM(8, 4, num_layers=1) -- forward_compute_time=3.190, backward_compute_time=5.348,"
    " activation_size=[64.0; 8.0], parameter_size=768.000 -- stage_id=1\n"
    "node1 -- Input0 -- forward_compute_time=470.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000\n"
    "node2 -- Linear -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=128.000,"
    " parameter_size=96.000 -- stage_id=0\n"
    "node4 -- Add -- forward_compute_time=0.500, backward_compute_time=0.000, activation_size=128.000, parameter_size=0.000\n"
    "\tnode1 -- node2\n"
    "\tnode2 -- node3\n"
    "\tnode3 -- node4\n"
    "\tnode2 -- node4"
)


def test_a_text_is_read_and_written_as_it_was() -> None:
    graph = Graph.parse(TEXT)
    assert graph.nodes[0] == GraphNode("node3", "LSTM(8, 4, num_layers=1)", 3.19, 5.348, (64.0, 8.0), 768.0, 1, "list", 1)
    assert graph.edges == (("node1", "node2"), ("node2", "node3"), ("node3", "node4"), ("node2", "node4"))
    assert str(graph) == TEXT


def test_layers_stand_in_order_the_data_costs_no_time_and_what_a_layer_makes_is_one_value() -> None:
    workload = Graph.parse(TEXT).to_workload()
    assert workload.names == ("node1 Input0", "node2 Linear", "node3 LSTM(8, 4, num_layers=1)", "node4 Add")
    assert numpy.allclose(workload.forward, [[0, 1e-3, 3.19e-3, 0.5e-3]]) and workload.forward.shape == (1, 4)
    assert numpy.allclose(workload.backward, [[0, 2e-3, 5.348e-3, 0]])
    assert workload.parameters.tolist() == [0, 96, 768, 0]
    assert workload.saved.tolist() == [0, 128, 72, 128]
    assert workload.values == (Value(0, (1,), 0.0), Value(1, (2, 3), 128.0), Value(2, (3,), 72.0))


def test_a_workload_becomes_a_graph() -> None:
    costs = numpy.array([[1e-3, 2.5e-7]])
    zeros, sizes = numpy.zeros(2), numpy.array([8.0, 16.0])
    values = (Value(0, (1,), 24.0), Value(0, (1,), 4.0))
    workload = Workload(("layers.0", "loss -- mean"), costs, 2 * costs, sizes, sizes, zeros, values)
    assert str(Graph.from_workload(workload, stages=(0, 1))).split("\n") == [
        "node1 -- layers.0 -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=[24.0; 4.0],"
        " parameter_size=8.000 -- stage_id=0",
        "node2 -- loss - mean -- forward_compute_time=0.00025, backward_compute_time=0.0005, activation_size=16.000,"
        " parameter_size=16.000 -- stage_id=1",
        "\tnode1 -- node2",
    ]


NODE = "node{} -- Add -- forward_compute_time=1, backward_compute_time=1, activation_size=1, parameter_size=1\n"
TWO = NODE.format(1) + NODE.format(2)
WRONG: dict[str, tuple[str, int, str]] = {
    "no nodes": ("\n", 0, "graph.txt has no nodes"),
    "not a node": ("vgg16\n", 1, "1 parts between ` -- `"),
    "a number that is missing": (NODE.format(1).replace("activation_size=1, ", ""), 1, "node1 lacks activation_size"),
    "no numbers at all": ("node1 -- Add -- \n", 1, "node1 lacks forward_compute_time, backward_compute_time, activation_size"),
    "a word for a number": (TWO.replace("parameter_size=1", "parameter_size=?"), 1, "parameter_size is '?', expected a number"),
    "an empty number": (NODE.format(1).replace("size=1,", "size=,"), 1, "node1: activation_size is '', expected a number"),
    "a negative number": (NODE.format(1).replace("forward_compute_time=1", "forward_compute_time=-1"), 1, "is -1, expected"),
    "not a number": (NODE.format(1).replace("size=1,", "size=[1.0; nan],"), 1, "activation_size is nan, expected a number"),
    "a node twice": (TWO + NODE.format(1), 3, "node1 stands in line 1 already"),
    "an edge from nowhere": (TWO + "\tnode7 -- node1\n", 3, "the edge from node7 to node1: there is no node node7"),
    "an edge to nowhere": (TWO + "\tnode1 -- node9\n", 3, "there is no node node9"),
    "an edge twice": (TWO + 2 * "\tnode1 -- node2\n", 4, "the edge from node1 to node2 stands in line 3 already"),
    "half an edge": (TWO + "\tnode1\n", 3, "an edge is a tab, then a node, ` -- `, and a node"),
    "a cycle": (TWO + "\tnode1 -- node2\n\tnode2 -- node1\n", 0, "the edges make a cycle: node"),
    "a loop": (TWO + "\tnode1 -- node1\n", 3, "the edges make a cycle: node1 -> node1"),
    "a stage that is no number": (NODE.format(1)[:-1] + " -- stage_id=first\n", 1, "the last part is 'stage_id=first'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_its_line(case: str) -> None:
    text, line, message = WRONG[case]
    with pytest.raises(CompileError) as error:
        Graph.parse(text)
    assert message in str(error.value)
    assert not line or f"at: graph.txt, line {line}" in str(error.value)


def test_a_cycle_is_told_by_the_line_of_one_of_its_edges() -> None:
    three = TWO + NODE.format(3)
    with pytest.raises(CompileError, match=r"line [456]") as error:
        Graph.parse(three + "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node1\n")
    assert str(error.value).count("->") == 3


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="can't be read: No such file"):
        Graph.load(tmp_path / "graph.txt")
    Graph.parse(TEXT).save(tmp_path / "graph.txt")
    assert Graph.load(tmp_path / "graph.txt") == Graph.parse(TEXT)


needs_profiles = pytest.mark.skipif(not FILES, reason=f"PipeDream's profiles are not in {PROFILES}")


@needs_profiles
def test_all_of_pipedreams_profiles_are_written_as_they_were_read() -> None:
    assert len(FILES) >= 12
    for path in FILES:
        assert str(Graph.load(path)) == path.read_text(), path.name


@needs_profiles
def test_all_of_pipedreams_profiles_become_workloads_and_graphs_again() -> None:
    for path in FILES:
        graph = Graph.load(path)
        workload = graph.to_workload()
        again = Graph.from_workload(workload).to_workload()
        assert (again.names, again.values, again.layers) == (workload.names, workload.values, len(graph.nodes)), path.name
        assert numpy.allclose(again.seconds, workload.seconds, rtol=1e-12)
        assert (again.parameters == workload.parameters).all() and (again.saved == workload.saved).all()


@needs_profiles
@pytest.mark.parametrize("known", [("vgg16", 251.9, 438.6, 553.4), ("gnmt", 33.5, 55.9, 775.1)], ids=lambda known: known[0])
def test_the_sums_of_known_profiles(known: tuple[str, float, float, float]) -> None:
    name, forward_ms, backward_ms, megabytes = known
    graph = Graph.load(PROFILES / f"{name}.txt")
    workload = graph.to_workload()
    data_ms = sum(node.forward_ms for node in graph.nodes if node.is_input)
    assert round(workload.forward.sum() * 1e3 + data_ms, 1) == forward_ms
    assert round(workload.backward.sum() * 1e3, 1) == backward_ms
    assert round(workload.parameters.sum() / 1e6, 1) == megabytes
