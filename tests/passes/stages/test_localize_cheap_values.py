"""What is cheaper to make than to send or save is made where it is read; activations are not touched."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pdcompiler.core.ir import Trace, is_backward, stage_of
from pdcompiler.core.machine import CORE, Machine
from pdcompiler.passes.stages.assign_stages import assign_stages
from pdcompiler.passes.stages.localize_cheap_values import localize_cheap_values
from pdcompiler.testing import assert_shows
from tests.levels import Scale, total, trace_and_partition

SLOW_PRODUCTS = Machine.flat(device=replace(CORE, flops_per_second=1.0))


def localized(model: nn.Module, *args: Tensor, machine: Machine | None = None, gradients: bool = False) -> Trace:
    trace, partition = trace_and_partition(model, ["b"], *args, loss_fn=total if gradients else None, gradients=gradients)
    return localize_cheap_values(assign_stages(trace, partition), machine or Machine(), 5)


class Masked(nn.Module):
    """A mask of the batch alone, read on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(4) < lengths.unsqueeze(1)
        return self.b(self.a(x) * mask) * mask


def test_a_mask_is_made_on_each_stage_that_reads_it() -> None:
    assert_shows(localized(Masked(), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), """
        a_weight = input
        b_weight = input
        x = input
        lengths = input
        rows = input
        arange_1 = arange(4, device=cpu, pin_memory=False)  # stage 0
        arange_2 = arange(4, device=cpu, pin_memory=False)  # stage 1
        unsqueeze_1 = unsqueeze(lengths, 1)  # stage 0
        unsqueeze_2 = unsqueeze(lengths, 1)  # stage 1
        lt_1 = lt(arange_1, unsqueeze_1)  # stage 0
        lt_2 = lt(arange_2, unsqueeze_2)  # stage 1
        a_mul = mul(x, a_weight)  # stage 0
        mul = mul(a_mul, lt_1)  # stage 0
        b_mul = mul(mul, b_weight)  # stage 1
        mul_1 = mul(b_mul, lt_2)  # stage 1
        return mul_1
    """)


class Product(nn.Module):
    """A table of the batch alone that needs a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(), Scale()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        table = positions @ positions.T
        return self.b(self.a(x) + table.sum()) + table.sum()


def stages_of(trace: Trace, word: str) -> list[tuple[int, bool]]:
    return [(stage_of(node), is_backward(node)) for node in trace.graph.nodes if word in node.name]


def test_a_product_is_made_twice_only_where_that_is_cheaper_than_a_message() -> None:
    args = (torch.zeros(2, 4), torch.zeros(3, 3))
    assert stages_of(localized(Product(), *args), "mm") == [(0, False), (1, False)]
    assert stages_of(localized(Product(), *args, machine=SLOW_PRODUCTS), "mm") == [(0, False)]


def test_views_of_weights_and_integers_are_made_once_for_each_function() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x))).reshape(x.shape[0] * 4)

    assert_shows(localized(Layers(), torch.zeros(2, 4), gradients=True), """
        a_weight = input
        b_weight = input
        x = input
        loss_weight = input
        rows = input
        a_t_1 = t(a_weight)  # stage 0
        a_mm = mm(x, a_t_1)  # stage 0
        tanh = tanh(a_mm)  # stage 0
        b_t_1 = t(b_weight)  # stage 1
        b_mm = mm(tanh, b_t_1)  # stage 1
        mul_1 = mul(4, rows)  # stage 1
        mul_2 = mul(4, rows)  # stage 1
        view = reshape(b_mm, [mul_1])  # stage 1
        loss = sum(view)  # stage 1
        d_expand = expand(loss_weight, [mul_2])  # stage 1
        d_view = reshape(d_expand, [rows, 4])  # stage 1
        d_b_t = t(d_view)  # stage 1
        d_b_mm = mm(d_b_t, tanh)  # stage 1
        d_b_mm_1 = mm(d_view, b_weight)  # stage 1
        d_tanh_backward = tanh_backward(d_b_mm_1, tanh)  # stage 0
        d_a_t = t(d_tanh_backward)  # stage 0
        d_a_mm = mm(d_a_t, x)  # stage 0
        return loss, view, d_a_mm, d_b_mm
    """)


def test_random_values_and_written_buffers_are_never_made_twice() -> None:
    class Noisy(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scale(), Scale()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            self.count += 1
            steps = self.count * 2
            return self.b(self.a(x) * noise + steps) * noise + steps

    trace = localized(Noisy(), torch.zeros(2, 4))
    assert stages_of(trace, "rand") == [(0, False)]
    assert len(stages_of(trace, "mul")) == 5  # two of Scale, two of noise, one of the buffer
