"""Ready machines, by name: `Machine.load("h100-servers")`. Each figure's source stands beside it.

Peaks and bandwidths are the vendors' data sheets'; PipeDream's clusters are those of its paper. What no sheet says is an
assumption of ours, and marked: how much of a peak training reaches, and latencies. `Machine.measure` and a profile's `fit`
give better ones for a machine at hand. Not here: what a Machine is (`machine.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from pdcompiler.core.machine import Device, Level, Machine

# Assumptions.
REACHED = 0.5  # of a peak of operations, in the large matrix products of training
REACHED_MEMORY = 0.8  # of a memory's peak bandwidth
LAUNCH_SECONDS = 4e-6  # the least that a kernel takes
INSIDE_SECONDS = 10e-6  # a small NCCL message inside a server
INFINIBAND_SECONDS = 20e-6
ETHERNET_SECONDS = 50e-6


def gpu(name: str, peak_flops: float, peak_bytes: float, memory_bytes: float) -> Device:
    """A GPU by its data sheet's peaks."""
    return Device(name, REACHED * peak_flops, REACHED_MEMORY * peak_bytes, memory_bytes, LAUNCH_SECONDS)


# NVIDIA's data sheets: single precision for V100 and TITAN X, dense bf16 for H100 (1,979 TFLOP/s are with sparsity).
V100_PCIE = gpu("V100 PCIe 16 GB", 14e12, 900e9, 16e9)
V100_SXM2 = gpu("V100 SXM2 16 GB", 15.7e12, 900e9, 16e9)
TITAN_X = gpu("TITAN X 12 GB", 6.6e12, 336.5e9, 12e9)  # the paper does not say which; this is the one of 2015
H100 = gpu("H100 SXM 80 GB", 989e12, 3.35e12, 80e9)


def laptop() -> Machine:
    """Any number of ranks on the cores of a laptop, talking through its loopback device. No memory limit is known."""
    return Machine()


def pipedream_a(servers: int = 4) -> Machine:
    """PipeDream's cluster A: Azure NC24 v3, 4 V100 each, 10 Gbit/s between servers. (12 GB/s over PCIe is our choice.)"""
    return _gpu_servers("pipedream-a", V100_PCIE, Level("PCIe", 4, 12e9, INSIDE_SECONDS), servers, 1.25e9, ETHERNET_SECONDS)


def pipedream_b(servers: int = 2) -> Machine:
    """PipeDream's cluster B: AWS p3.16xlarge, 8 V100 each, 25 Gbit/s between servers. (25 GB/s over NVLink is one link's.)"""
    return _gpu_servers("pipedream-b", V100_SXM2, Level("NVLink", 8, 25e9, INSIDE_SECONDS), servers, 3.125e9, ETHERNET_SECONDS)


def pipedream_c(servers: int = 4) -> Machine:
    """PipeDream's cluster C: one Titan X each, 40 Gbit/s between servers."""
    return Machine("pipedream-c", (Level("network", servers, 5e9, ETHERNET_SECONDS),), ((TITAN_X, None),), overlap=True)


def h100_servers(servers: int | None = None) -> Machine:
    """8 H100 each: NVLink 900 GB/s both ways, so 450 GB/s one way; a port of 400 Gbit/s InfiniBand per GPU, 50 GB/s."""
    return _gpu_servers("h100-servers", H100, Level("NVLink", 8, 450e9, INSIDE_SECONDS), servers, 50e9, INFINIBAND_SECONDS)


def _gpu_servers(
    name: str, device: Device, inside: Level, servers: int | None, bytes_per_second: float, latency_seconds: float
) -> Machine:
    return Machine(name, (inside, Level("network", servers, bytes_per_second, latency_seconds)), ((device, None),), overlap=True)


READY: dict[str, Callable[[], Machine]] = {
    "laptop": laptop,
    "pipedream-a": pipedream_a,
    "pipedream-b": pipedream_b,
    "pipedream-c": pipedream_c,
    "h100-servers": h100_servers,
}
