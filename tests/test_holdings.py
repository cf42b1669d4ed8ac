"""What a process holds of a model, over the compilations of several steps."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pdcompiler


def test_a_model_on_the_meta_device_is_filled_once_and_keeps_what_it_learned() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    filled: list[str] = []

    def fill(name: str, tensor: Tensor) -> None:
        filled.append(name)
        tensor.fill_(1)

    pipe = pdcompiler.compile(model, 2, loss_fn=F.mse_loss, microbatches=2, init=fill)
    batch, target = torch.randn(4, 3), torch.randn(4, 2)
    pipe.step(batch, target=target)
    parameters = list(pipe.parameters())
    torch.optim.SGD(parameters, lr=0.1).step()
    learned = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe.eval_step(batch[:3])
    assert all(one is other for one, other in zip(parameters, pipe.parameters(), strict=True))
    assert all(torch.equal(value, learned[name]) for name, value in pipe.state_dict().items())
    assert sorted(filled) == sorted({name for name, _ in (*model.named_parameters(), *model.named_buffers())})
    assert not torch.equal(learned["0.weight"], torch.ones(4, 3))
