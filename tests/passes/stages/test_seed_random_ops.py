"""Every operation that draws gets the seed and its own place; what draws nothing is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdcompiler.core.errors import CompileError
from pdcompiler.core.ir import Trace
from pdcompiler.passes.stages.seed_random_ops import seed_random_ops
from tests.levels import TwoLayers, staged_of, total, trace_of


class Drops(nn.Module):
    """One dropout twice, and one of its own."""

    def __init__(self, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.first, self.drop, self.second, self.own = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4), own

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.drop(self.first(self.drop(x))), 0.2, self.training)
        noise = torch.randn(4, generator=self.own) if self.own is not None else 0.0
        result: Tensor = self.second(hidden + noise)
        return result


def drawn(trace: Trace) -> list[str]:
    return [line.split(" = ")[1] for line in str(trace).splitlines() if "native_dropout(" in line or "seeded(" in line]


def test_each_draw_has_a_place() -> None:
    trace = trace_of(Drops(), torch.zeros(2, 4), loss_fn=total)
    assert drawn(trace)[0].startswith("native_dropout(x, 0.1, True)")
    assert [line.split(", ")[:3] for line in drawn(seed_random_ops(trace))] == [
        ["seeded(native_dropout", "seed", "'drop#0/0'"],
        ["seeded(native_dropout", "seed", "'drop#1/0'"],
        ["seeded(native_dropout", "seed", "'#0/0'"],
    ]
    assert trace.inputs["seed"].kind == "seed"


def test_stages_take_the_seed_where_they_draw() -> None:
    first, second = staged_of(Drops(), ["second"], torch.zeros(2, 4), loss_fn=total).stages
    assert "seed" in first.forward.takes and "seed" not in second.forward.takes
    assert first.backward is not None and "seed" not in first.backward.takes


@pytest.mark.parametrize("model", [TwoLayers(), Drops().eval()])
def test_a_model_that_draws_nothing_has_no_seed(model: nn.Module) -> None:
    trace = trace_of(model, torch.zeros(2, 4), loss_fn=total)
    assert "seed" not in seed_random_ops(trace).inputs


def test_attention_draws_only_where_it_drops() -> None:
    def attend(p: float) -> nn.Module:
        class Attention(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, dropout_p=p)

        return nn.Sequential(nn.Linear(4, 4), Attention())

    for p in (0.0, 0.5):
        trace = seed_random_ops(trace_of(attend(p), torch.zeros(2, 3, 4), loss_fn=total))
        assert ("seed" in trace.inputs) == (p > 0)


def test_a_generator_of_the_users_is_refused() -> None:
    with pytest.raises(CompileError, match=r"takes a Generator that the model holds\n.*test_seed_random_ops\.py:\d+\n.*seed="):
        seed_random_ops(trace_of(Drops(torch.Generator()), torch.zeros(2, 4), loss_fn=total))
