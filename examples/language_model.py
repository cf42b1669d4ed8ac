"""Train a small GPT-2 on 4 ranks, beside plain PyTorch, on text that every Python brings along: its library's sources.

    make demo                                                                        (installs everything first)
    torchrun --standalone --nproc-per-node 4 examples/language_model.py              four processes
    python examples/language_model.py                                                the same ranks, in this process
"""

import copy
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import pdcompiler

RANKS, MICROBATCHES, STEPS, ROWS, LENGTH = 4, 4, 50, 16, 64
TOLERANCE = 1e-5
RANK = int(os.environ.get("RANK", 0))
console = Console(quiet=RANK != 0, highlight=False)


def gpt2() -> GPT2LMHeadModel:
    """Bytes are the vocabulary; the embedding is also the head."""
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=6, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers finds it by the class's name, and warns about GPT-2's
    return model


def read_text() -> Tensor:
    """The sources of Python's own library, file after file, as bytes."""
    folder = Path(os.__file__).parent
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def batch_of(text: Tensor, step: int) -> Tensor:
    """ROWS pieces of the text, drawn by the step's number: every rank draws the same."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
    return torch.stack([text[start : start + LENGTH] for start in starts]).long()


def show(pipe: pdcompiler.Pipeline) -> None:
    """The partition as a table, and what the last rank runs."""
    whole = sum(stage.seconds for stage in pipe.partition.stages)
    table = Table("rank", "modules", "parameters", "estimated share", title="Partition", title_justify="left")
    for rank, stage in enumerate(pipe.partition.stages):
        table.add_row(str(rank), pipe.partition.modules(rank), f"{stage.parameter_bytes // 4:,}", f"{stage.seconds / whole:.0%}")
    console.print(table)
    console.print(f"\nThe program of rank {RANKS - 1}, {MICROBATCHES} microbatches in the order of {pipe.schedule.name}:")
    code = pipe.ranks[-1].code.strip()
    console.print(Syntax(code, "python", theme="ansi_dark").highlight(code), soft_wrap=True)


def train(pipe: pdcompiler.Pipeline, plain: nn.Module, text: Tensor) -> float:
    """Take the steps on both, rank 0 those of plain PyTorch; returns tokens per second. Raises where losses differ."""
    # A larger eps: Adam makes whole steps of gradients that are zero but for rounding, and no two sums round alike.
    ours, theirs = (torch.optim.AdamW(list(each.parameters()), lr=1e-3, eps=1e-6) for each in (pipe, plain))
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[speed]}"))
    seconds = 0.0
    console.print(f"\n{'step':>4}  {'pipeline':>10}  {'plain PyTorch':>13}  {'difference':>10}")
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=STEPS, speed="")
        for step in range(STEPS):
            ids = batch_of(text, step)
            start = time.perf_counter()
            ours.zero_grad()
            loss = pipe.step(input_ids=ids, labels=ids).loss.item()
            ours.step()
            seconds += time.perf_counter() - start
            if RANK == 0:
                expected = plain_step(plain, theirs, ids)
                difference = abs(loss - expected) / expected
                console.print(f"{step:>4}  {loss:>10.6f}  {expected:>13.6f}  {difference:>10.1e}")
                if not difference <= TOLERANCE:
                    sys.exit(f"step {step}: the pipeline's loss is {loss}, plain PyTorch's {expected}")
            speed = ROWS * LENGTH * (step + 1) / seconds
            progress.update(bar, advance=1, speed=f"{speed:,.0f} tokens/s")
    return speed


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> float:
    """One step of plain PyTorch on the whole batch."""
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Compile, show, train, and say how it went."""
    torch.set_num_threads(1)
    model, text = gpt2(), read_text()
    plain = copy.deepcopy(model)
    ids, start = batch_of(text, 0), time.perf_counter()
    pipe = pdcompiler.compile(model, RANKS, example_kwargs={"input_ids": ids, "labels": ids}, microbatches=MICROBATCHES)
    seconds = time.perf_counter() - start
    console.print(f"GPT-2, {plain.num_parameters():,} parameters, compiled for {RANKS} ranks in {seconds:.1f} s\n")
    show(pipe)
    speed = train(pipe, plain, text)
    console.print(f"\n{STEPS} steps on {RANKS} ranks, {speed:,.0f} tokens/s; each loss is plain PyTorch's within {TOLERANCE}.")
    pipe.close()


if __name__ == "__main__":
    main()
