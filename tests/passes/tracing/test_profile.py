"""Measured costs: they add up to the measured whole, change nothing of the user's, and go onto other traces of the model."""

import copy
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler.compiler import fingerprint
from pdcompiler.core.batch import read_batch
from pdcompiler.core.cost import CostTable, total_cost
from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import ROWS, cost_of, is_backward
from pdcompiler.core.machine import Device
from pdcompiler.core.profile import Profile, measured_nodes
from pdcompiler.passes.tracing.annotate_costs import annotate_costs
from pdcompiler.passes.tracing.profile import apply_profile, profile_trace
from tests.levels import TwoLayers, trace_of

DEVICE = Device("cpu", 20e9, 8e9, float("inf"), 1e-6)


class Everything(nn.Module):
    """An embedding (its integers must be valid), batch norm (writes buffers), dropout (draws), a buffer that counts."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.dropout = nn.Embedding(50, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.out = nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.steps.add_(1)
        result: Tensor = self.out(self.dropout(self.norm(self.embedding(ids).mean(1))))
        return result


IDS, TARGET = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])


def profile_of(model: nn.Module, *args: Tensor, target: Tensor, rows: int = 4, **options: Any) -> Profile:
    trace = trace_of(model, *args, target=target, loss_fn=F.cross_entropy, rows=7)
    batch = read_batch(model, args, {}, target, None)
    return profile_trace(
        trace, model, batch, rows=rows, fingerprint=fingerprint(model), loss_fn=F.cross_entropy, repetitions=3, **options
    )  # fmt: skip


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_the_operations_add_up_to_the_whole_and_nothing_of_the_users_changes() -> None:
    model = Everything()
    model(IDS).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    versions = [tensor._version for tensor in (*model.parameters(), *model.buffers(), IDS)]
    states, attributes, ids = random_states(), {m: dict(vars(m)) for m in model.modules()}, IDS.clone()
    told: list[tuple[int, int]] = []
    profile = profile_of(model, IDS, target=TARGET, progress=lambda done, of: told.append((done, of)))
    assert random_states() == states
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()) and torch.equal(IDS, ids)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert len(gradients) == len([p for p in model.parameters() if p.grad is not None])
    assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers(), IDS)]
    assert attributes == {m: dict(vars(m)) for m in model.modules()}
    for side, whole in ((False, profile.forward_seconds), (True, profile.backward_seconds)):
        assert whole > 0 and abs(sum(o.seconds for o in profile.operations if o.backward == side) - whole) < 1e-9 * whole
    assert profile.clocked_seconds > 0 and all(o.seconds >= 0 for o in profile.operations)
    assert (profile.rows, profile.dtype, profile.model) == (4, "float32", fingerprint(model))
    assert told == [(done, 5) for done in range(1, 6)]
    kinds = {operation.kind for operation in profile.operations}
    assert {"embedding", "normalization", "elementwise", "product", "view"} <= kinds


def test_more_rows_than_the_batch_has_are_the_same_rows_over_again() -> None:
    profile = profile_of(Everything(), IDS, target=TARGET, rows=11)
    product = next(operation for operation in profile.operations if operation.kind == "product")
    assert profile.rows == 11 and product.flops == 2 * 11 * 6 * 3


def test_numbered_modules_and_an_input_called_clock() -> None:
    class Model(nn.Sequential):
        def forward(self, clock: Tensor) -> Tensor:
            result: Tensor = super().forward(clock)
            return result

    profile = profile_of(Model(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.ones(4, 4), target=TARGET)
    assert {"0", "1", "2"} <= {operation.module for operation in profile.operations}


def two_layers() -> tuple[nn.Module, Profile, Any]:
    model = TwoLayers()
    x, target = torch.ones(4, 4), torch.zeros(4, 3)
    trace = trace_of(model, x, target=target, loss_fn=F.mse_loss, rows=7)
    batch = read_batch(model, (x,), {}, target, None)
    options = {"rows": 4, "fingerprint": fingerprint(model), "loss_fn": F.mse_loss, "repetitions": 2}
    return model, profile_trace(trace, model, batch, **options), trace


def test_measured_seconds_go_onto_a_trace_and_scale_with_the_roofline() -> None:
    model, profile, trace = two_layers()
    bare = {node: cost_of(node) for node in trace.graph.nodes}
    apply_profile(trace, profile=profile, device=DEVICE, fingerprint=fingerprint(model))
    costs = [cost_of(node) for node in trace.graph.nodes]
    whole = total_cost(costs)
    assert whole.notes == () and abs(whole.at(4).seconds / profile.seconds - 1) < 1e-9
    backward = total_cost(cost_of(node) for node in trace.graph.nodes if is_backward(node))
    assert abs(backward.at(4).seconds / profile.backward_seconds - 1) < 1e-9
    assert numpy.isclose(CostTable(costs).seconds_at(9).sum(), whole.at(9).seconds)
    for node in measured_nodes(trace):
        roofline = DEVICE.compute_seconds(bare[node])
        if bare[node].operations:
            expected = float(roofline.subs(ROWS, 9)) / float(roofline.subs(ROWS, 4))
            assert numpy.isclose(cost_of(node).at(9).seconds, expected * cost_of(node).at(4).seconds)
        assert replace(cost_of(node), seconds=None) == bare[node]
    assert DEVICE.compute_seconds(whole) == whole.seconds


def test_what_a_trace_has_besides_takes_what_its_kind_takes_and_is_noted() -> None:
    model, profile, trace = two_layers()
    tanh = next(o for o in profile.operations if o.operator == "tanh.default")
    less = replace(profile, operations=tuple(o for o in profile.operations if o is not tanh))
    apply_profile(trace, profile=less, device=DEVICE, fingerprint=fingerprint(model))
    node = next(node for node in trace.graph.nodes if "tanh" in node.name and not is_backward(node))
    others = [o for o in less.operations if o.kind == "elementwise"]
    rooflines = [o.flops / 20e9 + o.bytes / 8e9 + 1e-6 for o in (*others, tanh)]
    expected = rooflines[-1] * sum(o.seconds for o in others) / sum(rooflines[:-1])
    assert numpy.isclose(cost_of(node).at(4).seconds, expected)
    assert total_cost(map(cost_of, trace.graph.nodes)).notes == ("aten.tanh.default: the model has one that the profile has not",)


def test_a_profile_of_a_training_step_fits_an_evaluation_and_a_single_row() -> None:
    model, profile, _ = two_layers()
    x = torch.ones(1, 4)
    for trace in (
        trace_of(model, x, target=torch.zeros(1, 3), loss_fn=F.mse_loss, rows=1, symbolic=False),
        trace_of(model, x, target=torch.zeros(1, 3), loss_fn=F.mse_loss, rows=7, gradients=False),
    ):
        apply_profile(trace, profile=profile, device=DEVICE, fingerprint=fingerprint(model))
        whole = total_cost(map(cost_of, trace.graph.nodes))
        assert whole.notes == () and 0 < whole.at(1).seconds < profile.seconds


def test_a_profile_of_another_model_is_refused_and_nothing_is_written() -> None:
    model, profile, trace = two_layers()
    other = nn.Linear(3, 3)
    with pytest.raises(CompileError, match="the profile is of another model: its parameters' names and shapes give"):
        apply_profile(trace, profile=profile, device=DEVICE, fingerprint=fingerprint(other))
    with pytest.raises(CompileError, match="the profile was measured in bfloat16, the model is in float32"):
        apply_profile(trace, profile=replace(profile, dtype="bfloat16"), device=DEVICE, fingerprint=fingerprint(model))
    with pytest.raises(CompileError, match="the profile has none of the trace's operations"):
        apply_profile(trace, profile=replace(profile, operations=()), device=DEVICE, fingerprint=fingerprint(model))
    assert all(cost_of(node).seconds is None for node in trace.graph.nodes)


def test_a_model_without_memory_and_rows_that_the_trace_is_not_for_are_refused() -> None:
    with torch.device("meta"):
        model = TwoLayers()
    x, target = torch.ones(4, 4), torch.zeros(4, 3)
    batch = read_batch(model, (x,), {}, target, None)
    real = TwoLayers()
    trace = trace_of(real, x, target=target, loss_fn=F.mse_loss, rows=7)
    with pytest.raises(CompileError, match=r"first\.weight is on the meta device"):
        profile_trace(trace, model, batch, rows=4, fingerprint="", loss_fn=F.mse_loss)
    with pytest.raises(CompileError, match="the trace is not for microbatches of 1 rows"):
        profile_trace(trace, real, batch, rows=1, fingerprint="", loss_fn=F.mse_loss)


def test_annotating_again_forgets_what_was_measured() -> None:
    model, profile, trace = two_layers()
    apply_profile(trace, profile=profile, device=DEVICE, fingerprint=fingerprint(model))
    annotate_costs(trace)
    assert all(cost_of(node).seconds is None for node in trace.graph.nodes)


def test_case_35_an_operator_that_writes_its_input_writes_a_copy() -> None:
    with torch.library._scoped_library("profile_test", "DEF") as library:
        library.define("count(Tensor(a!) x, Tensor y) -> Tensor")
        library.impl("count", lambda x, y: (x.add_(1), y * 1)[1], "CompositeExplicitAutograd")
        library.impl("count", lambda x, y: torch.empty_like(y), "Meta")

        model, x = nn.Linear(4, 4), torch.ones(3, 4)
        trace = trace_of(model, x, rows=7, gradients=False)  # tracing makes such operators functional: this one is put in
        inputs = {trace.inputs[node.name].name: node for node in trace.graph.nodes if node.op == "placeholder"}
        node = next(node for node in trace.graph.nodes if "addmm" in node.name)
        node.target, node.args = torch.ops.profile_test.count.default, (inputs["bias"], inputs["input"])
        before = model.bias.detach().clone()
        profile = profile_trace(trace, model, read_batch(model, (x,), {}, None, None), rows=3, fingerprint="", repetitions=1)
        assert "profile_test.count.default" in [operation.operator for operation in profile.operations]
        assert torch.equal(model.bias, before)
