"""Hosts on one computer: network namespaces, joined by a link whose speed tc limits.

    namespace 0    10.213.77.1  <-- veth, each way at most so many bytes per second -->  10.213.77.2    namespace 1
    core 0, rank 0                                                                       core 1, rank 1

All traffic stays on these two addresses, inside the namespaces, which are gone when `run_on_hosts` ends, however it ends. Needs
Linux, iproute2 and the right to make namespaces. Not here: what the ranks do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HOSTS = 2
ADDRESSES, PREFIX, PORT = ("10.213.77.1", "10.213.77.2"), 30, 29511
LINK = "pdc-link"
"""The interface's name, inside each namespace."""
MTU = 9000
BURST, QUEUE = 131_072, "50ms"
"""Bytes that may pass at once, and how long others may wait: as of a switch."""


def why_not() -> str | None:
    """Why hosts cannot be made here, if they cannot."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    try:
        with namespaces() as names:
            limit(1e6, names[0])
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def namespaces() -> Iterator[list[str]]:
    """Two, with a link between them; removed at the end, and their link with them."""
    names = [f"pdcompiler-{os.getpid()}-{host}" for host in range(HOSTS)]
    made = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        one, other = names
        _run("ip", "link", "add", LINK, "netns", one, "type", "veth", "peer", "name", LINK, "netns", other)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/{PREFIX}", "dev", LINK)
            _run("ip", "-n", name, "link", "set", LINK, "mtu", str(MTU), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def limit(bytes_per_second: float, namespace: str | None = None) -> None:
    """What this host (or one in a namespace) may send."""
    inside = () if namespace is None else ("-n", namespace)
    rate = f"{round(8 * bytes_per_second)}bit"
    _run("tc", *inside, "qdisc", "replace", "dev", LINK, "root", "tbf", "rate", rate, "burst", str(BURST), "latency", QUEUE)


def unlimit() -> None:
    """Let this host send as fast as it can."""
    subprocess.run(["tc", "qdisc", "delete", "dev", LINK, "root"], capture_output=True, check=False)


def sent_bytes() -> int:
    """What this host has sent since it was made, headers included."""
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


def run_on_hosts(script: str, arguments: Sequence[str]) -> int:
    """Run a script as one rank on each host, with one thread; the first exit code that is not 0."""
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        with namespaces() as names:
            ranks = [_start(rank, name, script, arguments) for rank, name in enumerate(names)]
            try:
                return _wait(ranks)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)


def _leave(number: int, _: Any) -> None:
    """As Ctrl-C does: by an exception, so that what was made is removed."""
    sys.exit(128 + number)


def _start(rank: int, namespace: str, script: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(HOSTS), "LOCAL_RANK": "0", "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, script, *arguments], env=environment)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all are done, or one has failed."""
    while True:
        codes = [process.poll() for process in ranks]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
