"""The planner against other planners' published answers, in their own cost models (`benchmarks/quality_*.py`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdcompiler.core.plan import Plan, PlannedStage

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"there is no {DATA}")


@pytest.fixture
def suite(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a suite, by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(f"quality_{request.param}")


def answers(name: str) -> Any:
    return json.loads((DATA / name).read_text()) if DATA.exists() else {}


QUICK_PIPER = ("bert32 k=8 memGB=8 N=1920", "bert32 k=32 memGB=2 N=1920", "bert32 k=2048 memGB=8 N=1920")


def piper_cases() -> Iterator[Any]:
    for name, answer in answers("known_answers.json").get("piper", {}).items():
        yield pytest.param(name, answer, id=name, marks=() if name in QUICK_PIPER else pytest.mark.full)


@pytest.mark.parametrize("suite", ["piper"], indirect=True)
@pytest.mark.parametrize(("name", "answer"), list(piper_cases()))
def test_pipers_optimum_is_found_and_proven(suite: Any, name: str, answer: dict[str, Any]) -> None:
    problem = suite.read(DATA / "piper" / "bert32a100.json")
    case = suite.case_of(name, answer)
    found, bound = suite.solve(problem, case)
    if answer["seconds_per_sample"] is None:
        assert found is None
        return
    seconds, stages = found
    assert seconds == suite.judge(problem, case, stages) == pytest.approx(answer["seconds_per_sample"], rel=1e-6)
    assert bound == pytest.approx(seconds, rel=1e-8)


def runs(valid: bool = True, flat: bool = False) -> list[dict[str, Any]]:
    found = answers("pipedream_reference.json").get("runs", [])
    return [run for run in found if bool(run["partition_valid"]) == valid and (not flat or len(run["machines_per_level"]) == 1)]


def pipedream_runs() -> Iterator[Any]:
    for run in runs():
        marks = () if run["model"] in ("vgg16", "alexnet", "gnmt") else pytest.mark.full
        yield pytest.param(run, id=f"{run['tag']} {run['model']}", marks=marks)


@pytest.mark.parametrize("suite", ["pipedream"], indirect=True)
@pytest.mark.parametrize("run", list(pipedream_runs()))
def test_never_worse_than_pipedreams_plan_in_its_own_cost_model(suite: Any, run: dict[str, Any]) -> None:
    workload, case = suite.profile(DATA, run["model"]), suite.case_of(run)
    (seconds, plan), bound = suite.solve(workload, case)
    assert seconds == suite.judge(workload, case, plan) <= run["pipeline_ms"] / 1e3 * (1 + 1e-9)
    assert bound == pytest.approx(seconds, rel=1e-8)


@pytest.mark.parametrize("suite", ["pipedream"], indirect=True)
def test_plans_on_two_levels_beat_those_made_level_by_level(suite: Any) -> None:
    for tag, most in (("A_4x4", 54.795e-3), ("B_2x8", 45.525e-3)):
        run = next(run for run in runs() if run["tag"] == tag and run["model"] == "vgg16")
        (seconds, _), _ = suite.solve(suite.profile(DATA, "vgg16"), suite.case_of(run))
        assert seconds < most < run["pipeline_ms"] / 1e3  # the middle: one level, all at the slow link


@pytest.mark.parametrize("suite", ["pipedream"], indirect=True)
def test_pipedreams_own_plans_are_judged_as_it_judges_them(suite: Any) -> None:
    checked = 0
    for run in runs(flat=True):
        workload = suite.profile(DATA, run["model"])
        seconds = suite.judge(workload, suite.case_of(run), its_plan(run, workload))
        assert seconds * 1e3 == pytest.approx(run["pipeline_ms"], rel=1e-9), (run["tag"], run["model"])
        checked += 1
    assert checked > 60


def its_plan(run: dict[str, Any], workload: Any) -> Plan:
    """The last nodes of each of its stages, with all that they need and no earlier stage has."""
    number = {name.split()[0]: layer for layer, name in enumerate(workload.names)}
    before: list[set[int]] = [set() for _ in workload.names]
    for producer, consumer in workload.edges():  # in the order of producers
        before[consumer] |= {producer}
    for layer in range(workload.layers):
        before[layer] |= set[int]().union(*(before[other] for other in before[layer]))
    done, stages = set[int](), []
    for stage in run["stages"]:
        ends = {number[node] for node in stage["boundary_antichain"]}
        own = ends.union(*(before[end] for end in ends)) - done
        done |= own
        stages.append(PlannedStage(tuple(sorted(own)), stage["replicas"]))
    left = set(range(workload.layers)) - done
    stages[-1] = PlannedStage(tuple(sorted({*stages[-1].layers, *left})), stages[-1].replicas)
    return Plan(tuple(stages))


@pytest.mark.full
@pytest.mark.parametrize("suite", ["pipedream"], indirect=True)
@pytest.mark.parametrize("tag", ["readme_1x4", "A_4x4"])
@pytest.mark.parametrize("model", ["gnmt_large", "inception_v3", "nasnetamobile", "nasnetalarge"])
def test_graphs_with_too_many_states_have_a_plan_and_a_bound(suite: Any, model: str, tag: str) -> None:
    run = next(run for run in runs() if run["tag"] == tag)
    workload, case = suite.profile(DATA, model), suite.case_of(run)
    (seconds, plan), bound = suite.solve(workload, case)
    assert suite.judge(workload, case, plan) == seconds and bound <= seconds <= 1.25 * bound
    assert model != "gnmt_large" or seconds <= bound * (1 + 1e-8)
