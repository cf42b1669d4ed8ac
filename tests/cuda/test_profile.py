"""Measured costs on a GPU: by its own clock, with its random state as before, counted as on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdcompiler.core.batch import read_batch
from pdcompiler.passes.tracing.fit import fit
from pdcompiler.passes.tracing.profile import profile_trace
from tests.levels import trace_of

pytestmark = pytest.mark.cuda


def test_the_operations_add_up_to_the_whole_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.Tanh(), nn.Linear(128, 10)).cuda()
    x, target = torch.randn(8, 64, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    trace = trace_of(model, x, target=target, loss_fn=F.cross_entropy, rows=11)
    batch = read_batch(model, (x,), {}, target, None)
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    profile = profile_trace(trace, model, batch, rows=8, fingerprint="", loss_fn=F.cross_entropy, repetitions=3)
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(torch.cuda.get_rng_state(), states[1])
    for backward, whole in ((False, profile.forward_seconds), (True, profile.backward_seconds)):
        measured = sum(operation.seconds for operation in profile.operations if operation.backward == backward)
        assert whole > 0 and abs(measured - whole) < 1e-9 * whole
    assert profile.device == torch.cuda.get_device_name()
    products = [operation for operation in profile.operations if operation.kind == "product" and not operation.backward]
    assert sum(operation.flops for operation in products) == 2 * 8 * (64 * 128 + 128 * 10)
    assert fit([profile]).device(1e9).name == profile.device
