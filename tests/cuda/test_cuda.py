"""On a GPU everything runs as on the CPU: all ranks in one process on one device, and NCCL messages where there are two."""

import pytest
import torch
from torch import nn

import pdcompiler
from pdcompiler.testing import assert_close_by_tensor, plain_step, split_rows
from tests.models import ZOO

pytestmark = pytest.mark.cuda


def on_gpu(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "mlp"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_ranks_on_one_gpu_equal_plain_pytorch(name: str, schedule: str) -> None:
    example = ZOO[name]()
    model = example.model.cuda()
    args, kwargs = tuple(map(on_gpu, example.args)), {key: on_gpu(value) for key, value in example.kwargs.items()}
    target = on_gpu(example.target)
    expected = plain_step(
        model, args, kwargs, target=target, loss_fn=example.loss_fn, rows_of_microbatches=split_rows(8, 4)
    )
    pipe = pdcompiler.compile(model, 3, loss_fn=example.loss_fn, schedule=schedule, microbatches=4)
    result = pipe.step(*args, target=target, **kwargs)
    assert result.loss is not None
    assert_close_by_tensor(result.loss, expected.loss, 1e-10, "loss")
    for key, parameter in pipe.named_parameters():
        assert_close_by_tensor(parameter.grad, expected.gradients[key], 1e-10, key)


def test_rank_programs_on_cuda_post_no_receive_early() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).cuda()
    x, y = torch.randn(8, 4, device="cuda"), torch.randn(8, 2, device="cuda")
    pipe = pdcompiler.compile(model, 2, example_args=(x,), example_target=y, loss_fn=nn.functional.mse_loss)
    assert not any(node.target is pdcompiler.core.ops.start_recv for module in pipe.ranks for node in module.graph.nodes)
