"""What the benchmark on a limited link stands on: hosts that leave nothing behind, and the paper's ratios as derived."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import hosts

    return hosts


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_are_removed_when_something_fails(hosts: Any) -> None:
    if reason := hosts.why_not():
        pytest.skip(f"no hosts can be made here: {reason}")
    with pytest.raises(RuntimeError, match="on purpose"), hosts.namespaces() as names:
        hosts.limit(1e6, names[0])
        assert all(name in namespaces() for name in names)
        raise RuntimeError("on purpose")
    assert not any(name in namespaces() for name in names)


def test_without_iproute2_there_is_a_reason(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert hosts.why_not() == "ip and tc of iproute2 not found"


def test_the_ratios_are_those_of_the_papers_profiles(hosts: Any) -> None:
    import cluster_a

    from pdcompiler.core.machine import Machine

    for name, deployment in cluster_a.DEPLOYMENTS.items():
        if deployment.profile is None:
            continue
        if not (cluster_a.DATA / f"{deployment.profile}.txt").exists():
            pytest.skip(f"there is no {cluster_a.DATA}")
        machine = Machine.load("pipedream-a").take(4 * deployment.servers)
        derived = cluster_a.derived_ratio(machine, cluster_a.workload(deployment))
        assert derived == pytest.approx(cluster_a.RATIOS[name], abs=0.005), name
