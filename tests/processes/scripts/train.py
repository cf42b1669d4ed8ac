"""What a user writes: a model, `compile`, an optimizer, a loop. Nothing opens or closes a process group."""

import torch
from torch import nn
from torch.nn import functional as F

import pdcompiler

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
rows, classes = torch.randn(12, 8), torch.randint(3, (12,))

pipe = pdcompiler.compile(model, world_size=2, example_args=(rows,), example_target=classes, loss_fn=F.cross_entropy)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
for _ in range(20):
    loss = pipe.step(rows, target=classes).loss
    optimizer.step()
    pipe.zero_grad()
outputs = pipe.eval_step(rows).outputs
right = (outputs.argmax(1) == classes).sum()
print(f"rank {pipe.rank}: loss {loss:.6f}, {right} of 12 right\n", end="", flush=True)  # in one write: two ranks print at once
