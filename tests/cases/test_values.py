"""Cases 17 to 20 and 22: values that cross stages, values that come in and go out, buffers that several stages read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler import Pipeline
from tests.cases.against_loop import SCHEDULES, AgainstLoop, drawn, drawn_integers, seeded
from tests.models import unet

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def messages(pipe: Pipeline) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Every value that the newest step sends: channel, element type and shape, packed ones one by one."""
    found = []
    for module in pipe.ranks:
        for node in module.graph.nodes:
            if getattr(node.target, "__name__", "") == "send":
                value = node.args[0]
                packed = getattr(value.target, "__name__", "") == "pack"
                for sent in value.args[0] if packed else [value]:
                    found.append((str(node.kwargs["channel"]), sent.meta["type"].dtype, sent.meta["type"].shape))
    return found


class Four(nn.Module):
    """Four Linear layers a, b, c, d of one width; subclasses say how values go between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


STAGES_OF_FOUR = {2: ["c"], 3: ["b", "d"], 4: ["b", "c", "d"]}


class FanOut(Four):
    """One activation used by two later stages, and a skip over two stages."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        third = torch.tanh(self.c(first + second))
        result: Tensor = self.d(third * first)
        return result


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_17_one_activation_used_by_two_later_stages(schedule: str, world_size: int) -> None:
    """A peer sends a stage's output to the next stage only, or adds one of its gradients."""
    checked = AgainstLoop(seeded(FanOut), world_size, schedule, loss_fn=F.mse_loss, partition=STAGES_OF_FOUR[world_size])
    checked.step(drawn(7, 4), target=drawn(7, 4, seed=1))
    checked.evaluate(drawn(7, 4))
    checked.pipe.step(drawn(8, 4), target=drawn(8, 4, seed=1))
    to_later = [channel for channel, _, _ in messages(checked.pipe) if channel[0] < channel[-1]]
    expected = {2: ["0->1"] * 2, 3: ["0->1", "1->2"], 4: ["0->1", "0->2", "1->2", "2->3"]}[world_size]
    assert sorted(to_later) == sorted(expected * 4)


@each_schedule
@pytest.mark.parametrize("partition", [["bottom"], ["down2", "widen2"], ["down2", "bottom", "up2"]])
def test_case_17_unet_whose_skips_cross(schedule: str, partition: list[str]) -> None:
    """Two skips, the outer around the inner: one-forward-one-backward keeps several microbatches of both open."""
    example = unet()
    checked = AgainstLoop(example.model, len(partition) + 1, schedule, loss_fn=F.mse_loss, partition=partition)
    checked.step(*example.args, target=example.target)


class LateInputs(Four):
    """The second input is first read in the third layer, the third (a float mask) in the last."""

    def forward(self, x: Tensor, ids: Tensor, late: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        hidden = torch.tanh(self.c(hidden + (ids.unsqueeze(1) == torch.arange(4))))
        result: Tensor = self.d(hidden * late)
        return result


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_18_inputs_first_used_in_later_stages(schedule: str, world_size: int) -> None:
    """Labels and decoder ids: a peer hands all inputs to the first stage. Here each rank cuts its own, none is sent."""
    checked = AgainstLoop(seeded(LateInputs), world_size, schedule, loss_fn=F.mse_loss, partition=STAGES_OF_FOUR[world_size])
    checked.step(drawn(7, 4), drawn_integers(4, 7), drawn(7, 4, seed=2), target=drawn(7, 4, seed=1))
    checked.pipe.step(drawn(8, 4), drawn_integers(4, 8), drawn(8, 4, seed=2), target=drawn(8, 4, seed=1))
    sent = [value for value in messages(checked.pipe) if value[2] != ()]  # besides the loss
    assert {value[1:] for value in sent} == {(torch.float64, (2, 4))} and len(sent) == 2 * 4 * (world_size - 1)
    inputs = [[node for node in rank.graph.nodes if node.op == "placeholder"] for rank in checked.pipe.ranks]
    read = [[str(node.target) for node in nodes if node.users] for nodes in inputs]
    assert "x" in read[0] and not {"late", "target"} & set(read[0]) and "target" in read[-1] and "x" not in read[-1]


@dataclass
class Hidden:
    """What the layers below hand to each other."""

    value: Tensor
    extra: Any = None
    depth: int = 0


class Reader(nn.Module):
    """The layer after the boundary: `read` takes apart what crosses it."""

    def __init__(self, read: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.table, self.read = nn.Linear(4, 4), nn.Embedding(4, 4), read

    def forward(self, crossing: Any) -> Tensor:
        return torch.tanh(self.read(self, crossing))


class Crossing(Four):
    """`between` makes of b's result what c is given."""

    def __init__(self, between: Callable[[Tensor], Any], read: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.between, self.c = between, Reader(read)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.d(self.c(self.between(torch.tanh(self.b(torch.tanh(self.a(x)))))))
        return result


CROSSINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Any], Tensor]]] = {
    "transposed, not contiguous": (lambda h: h.transpose(1, 2), lambda m, v: m.linear(v.exp().transpose(1, 2))),
    "expanded": (lambda h: h.mean(1, keepdim=True).expand(-1, 3, -1), lambda m, v: m.linear(v)),
    "every second column": (lambda h: (h.repeat(1, 1, 2)[..., ::2], h[:, :1]), lambda m, v: m.linear(v[0] + v[1])),
    "two views of one tensor": (lambda h: h.split(2, -1), lambda m, v: m.linear(torch.cat([v[1], v[0]], -1))),
    "bool mask of activations": (lambda h: (h, h > 0), lambda m, v: m.linear(v[0].masked_fill(v[1], 0.5))),
    "int64 into an Embedding": (lambda h: (h, h.argmax(-1)), lambda m, v: m.linear(v[0] + m.table(v[1]))),
    "None": (lambda h: (None, h, None), lambda m, v: m.linear(v[1] if v[0] is None else v[0])),
    "nested tuples and dicts": (
        lambda h: ({"deep": (h, [h * 2])}, h.sum(-1)), lambda m, v: m.linear(v[0]["deep"][1][0]) + v[1].unsqueeze(-1),
    ),
    "dataclass": (lambda h: Hidden(h, {"twice": h * 2}, 3), lambda m, v: m.linear(v.value * v.depth) + v.extra["twice"]),
    "0-d tensor": (lambda h: (h, h.mean()), lambda m, v: m.linear(v[0] * v[1])),
    "0-d without gradient": (lambda h: (h, h.detach().abs().max()), lambda m, v: m.linear(v[0] / v[1])),
    "complex": (lambda h: torch.fft.rfft(h, dim=-1), lambda m, v: m.linear(torch.fft.irfft(v * 2, n=4, dim=-1))),
}  # fmt: skip
CROSSES = {
    "bool mask of activations": (torch.bool, (2, 3, 4)),
    "int64 into an Embedding": (torch.int64, (2, 3)), "0-d tensor": (torch.float64, ()), "complex": (torch.complex128, (2, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("crossing", CROSSINGS)
def test_case_19_what_may_cross_a_boundary(crossing: str) -> None:
    """Peers send views as if contiguous, refuse bools and integers, shift positions at None, and know tensors only."""
    between, read = CROSSINGS[crossing]
    checked = AgainstLoop(seeded(lambda: Crossing(between, read)), 3, loss_fn=F.mse_loss, partition=["c", "d"])
    checked.step(drawn(5, 3, 4), target=drawn(5, 3, 4, seed=1))
    checked.evaluate(drawn(1, 3, 4))
    checked.pipe.step(drawn(5, 3, 4), target=drawn(5, 3, 4, seed=1))
    forward = [value for channel, *value in messages(checked.pipe) if channel == "0->1"]
    assert list(CROSSES.get(crossing, forward[0])) in forward, forward


class Arguments(Four):
    """A user's forward: numbers, flags and None beside tensors; a dict comes out."""

    def forward(
        self, x: Tensor, scale: float = 2.0, flag: bool = True, mask: Tensor | None = None, pos: Tensor | None = None
    ) -> dict[str, Any]:
        hidden = torch.tanh(self.b(torch.tanh(self.a(x if pos is None else x + pos)) * scale))
        if mask is not None:
            hidden = hidden * mask
        hidden = self.c(hidden) if flag else hidden
        return {"logits": self.d(hidden), "norm": hidden.pow(2).mean(), "scale": scale, "parts": (hidden, None)}


def dict_loss(outputs: dict[str, Any], target: dict[str, Any]) -> Tensor:
    """Checks that the structures are those of the model and of the user, not flat lists."""
    assert list(outputs) == ["logits", "norm", "scale", "parts"] and outputs["parts"][1] is None, outputs
    assert isinstance(target, dict) and target["name"] == "regression", target
    errors = F.mse_loss(outputs["logits"], target["y"], reduction="none")
    return (errors * target["weight"]).mean() + outputs["norm"] * target["factor"]


@pytest.mark.parametrize(("schedule", "world_size"), [("gpipe", 4), ("1f1b", 2)])
def test_case_20_numbers_flags_none_and_dicts(schedule: str, world_size: int) -> None:
    """Peers take positional tensors only; each other value of scale, flag or mask is another program, never the old one."""
    checked = AgainstLoop(seeded(Arguments), world_size, schedule, loss_fn=dict_loss)
    target = {"y": drawn(7, 4, seed=1), "weight": drawn(7, 1, seed=2).abs(), "name": "regression", "factor": 0.5}
    x, pos, mask = drawn(7, 4), drawn(4, seed=3), drawn(7, 4, seed=4)
    for arguments in [{"pos": pos}, {"scale": 3.0, "pos": pos}, {"flag": False, "mask": mask, "pos": pos}, {"pos": pos}, {}]:
        outputs = checked.step(x, target=target, **arguments).outputs
        assert outputs["scale"] == arguments.get("scale", 2.0) and outputs["norm"].shape == ()
    checked.evaluate(x, 3.0, mask=mask)


@each_schedule
def test_case_20_loss_function_receives_what_the_model_returns(schedule: str) -> None:
    """A dataclass of the user's, with a nested list: the loss reads its fields, and the outputs are one of it."""

    class Returns(Four):
        def forward(self, x: Tensor) -> Hidden:
            first = torch.tanh(self.a(x))
            return Hidden(self.d(self.c(first)), [first, {"b": self.b(first)}], 7)

    def loss_fn(outputs: Hidden, target: tuple[Tensor, Tensor]) -> Tensor:
        assert type(outputs) is Hidden and outputs.depth == 7 and isinstance(target, tuple)
        return F.mse_loss(outputs.value, target[0]) + F.l1_loss(outputs.extra[1]["b"], target[1])

    checked = AgainstLoop(seeded(Returns), 2, schedule, loss_fn=loss_fn, partition=["c"])
    result = checked.step(drawn(7, 4), target=(drawn(7, 4, seed=1), drawn(7, 4, seed=2)))
    assert type(result.outputs) is Hidden and isinstance(result.outputs.extra[1], dict)


class Rotary(Four):
    """One rotary table, read in three stages; a persistent buffer beside it, read in two."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("table", angles.cos(), persistent=False)
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table[: x.shape[1]]
        hidden = torch.tanh(self.a(x)) * table
        hidden = torch.tanh(self.b(hidden) + self.shift)
        hidden = torch.tanh(self.c(hidden)) * self.table[: x.shape[1]]
        result: Tensor = self.d(hidden * table) + self.shift
        return result


@each_schedule
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_22_buffer_used_by_three_stages(schedule: str, world_size: int) -> None:
    """A peer leaves the table on one stage, loses a non-persistent buffer at run time, or puts it into the state dict."""
    model = seeded(Rotary)
    checked = AgainstLoop(model, world_size, schedule, loss_fn=F.mse_loss, partition=STAGES_OF_FOUR[world_size])
    checked.step(drawn(7, 5, 4), target=drawn(7, 5, 4, seed=1))
    checked.evaluate(drawn(3, 8, 4))
    assert "table" in dict(checked.pipe.named_buffers()) and "table" not in checked.pipe.state_dict()
    assert list(checked.pipe.state_dict()) == list(model.state_dict())
    before = checked.pipe.eval_step(drawn(2, 3, 4)).outputs
    with torch.no_grad():
        model.table.mul_(2)  # a buffer is read when a step runs, it is no constant of the program
    assert not torch.allclose(checked.pipe.eval_step(drawn(2, 3, 4)).outputs, before)
    checked.evaluate(drawn(2, 3, 4))
