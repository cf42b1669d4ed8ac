"""How long does it take to compile a model as large as Llama-3-8B for 8 ranks, and in how much memory?

Hugging Face's Llama with 32 layers of width 4,096 on the meta device (no memory for weights), 8 microbatches of one row of
2,048 tokens. What is timed: `pdcompiler.compile` with an example batch, that is all 8 rank programs.

    python benchmarks/compile_time.py [--layers 32] [--profile] [--check]

With --check it exits 1 above 60 s or 2 GiB; --profile shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pdcompiler

RANKS, MICROBATCHES, LENGTH = 8, 8, 2048
SECONDS, GIB = 60.0, 2.0


def llama(layers: int) -> LlamaForCausalLM:
    """The shape of Llama-3-8B, without memory for its weights."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def compile_all(model: LlamaForCausalLM) -> pdcompiler.Pipeline:
    """All rank programs. Only the shapes of the batch matter."""
    ids = torch.zeros(MICROBATCHES, LENGTH, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return pdcompiler.compile(model, RANKS, example_kwargs=batch, microbatches=MICROBATCHES, device="cpu")


def peak_gib() -> float:
    """The largest amount of memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def main(layers: int, profile: bool, check: bool) -> int:
    """Compile once and say how it went."""
    torch.set_num_threads(1)
    model = llama(layers)
    before, profiler = peak_gib(), cProfile.Profile()
    if profile:
        profiler.enable()
    start = time.perf_counter()
    pipe = compile_all(model)
    seconds = time.perf_counter() - start
    profiler.disable()
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(50)
    nodes = sum(len(program.graph.nodes) for program in pipe.ranks)
    operations = sum(len(f.module.graph.nodes) for s in pipe.stages for f in (s.forward, s.backward) if f is not None)
    print(pipe.partition)
    print(f"\n{layers} layers, {model.num_parameters() / 1e9:.2f} billion parameters, {RANKS} ranks, {MICROBATCHES} microbatches")
    print(f"stages of {operations:,} nodes in all, rank programs of {nodes:,}")
    missed = seconds > SECONDS or peak_gib() > GIB
    bars = f"(bars {SECONDS:.0f} s and {GIB:.0f} GiB) {'MISSED' if missed else 'met'}"
    print(f"{seconds:.1f} s, peak memory {peak_gib():.2f} GiB, of which {before:.2f} GiB before compiling  {bars}")
    return int(check and missed)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    sys.exit(main(given.layers, given.profile, given.check))
