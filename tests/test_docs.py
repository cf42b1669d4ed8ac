"""What README.md and docs/ say is true: their Python runs, what they show is printed, the cases that they list have tests.

Every ```python block runs, in order, in one namespace per file; one that begins with "# models.py" is that file, too. In a ```sh
block stand commands of `pdcompiler`; one before "|| true" must fail. A ```text block right behind one of these is exactly what it
prints.
After a change that is meant, `python tests/test_docs.py` writes these blocks, and the tests' names in docs/cases.md, anew.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pdcompiler.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CASES_PAGE = ROOT / "docs" / "cases.md"
BLOCK = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n(?:\n?```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)
CASE_ROW = re.compile(r"^\| (?P<case>\d+[a-c]?) \| (?P<what>.*) \| (?P<tests>.*) \|$", re.MULTILINE)
CASE_TEST = re.compile(r"^def (test_case_(\d+[a-c]?)_\w+)", re.MULTILINE)
FILE = re.compile(r"# (\w+)\.py\n")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

MUST_SHOW = "1 2 3 4 5 6 7 7b 7c 8 9 10 11 12 12b 13 14 15 15b 15c 16 17 18 19 20 21 22 23 24 25 27 28 29 30 31 32 33 34 35 36 37"
"""The cases that have tests; 24b and 24c have theirs beside 24, and 26 comes with checkpoints."""


def printed(page: Path) -> list[tuple[re.Match[str], str]]:
    """Run a page's Python and commands, in this folder; each block with what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks, files = [], set[str]()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] == "sh":
                blocks.append((block, "".join(map(command, block["code"].replace("\\\n", "").splitlines()))))
                continue
            if named := FILE.match(block["code"]):
                Path(f"{named[1]}.py").write_text(block["code"])
                files.add(named[1])
            line = page.read_text()[: block.start("code")].count("\n")
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * line + block["code"], str(page), "exec"), names)
            blocks.append((block, out.getvalue()))
    for name in files:  # the next page has its own
        sys.modules.pop(name, None)
    return blocks


def command(line: str) -> str:
    """What a command prints."""
    may_fail = line.endswith(" || true")
    name, *arguments = shlex.split(line.removesuffix(" || true"))
    assert name == "pdcompiler", line
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == int(may_fail), done.output
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, out in printed(page):
        if block["shown"] is not None:
            assert block["shown"].splitlines() == out.strip("\n").splitlines(), "see this file's docstring to renew what is shown"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_runs_and_shows_a_program() -> None:
    blocks = list(BLOCK.finditer((ROOT / "README.md").read_text()))
    assert any(block["shown"] and "class Rank0" in block["shown"] for block in blocks)


# Cases


def names_by_case() -> dict[str, list[str]]:
    """The names of the tests of each case."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, case in CASE_TEST.findall(path.read_text()):
            found.setdefault(case, []).append(name)
    return found


def cell(names: list[str]) -> str:
    """The last column of the table of cases."""
    return "<br>".join(f"`{name}`" for name in sorted(names)) or "none yet"


@pytest.mark.parametrize("case", MUST_SHOW.split())
def test_a_promised_case_has_a_test(case: str) -> None:
    assert names_by_case().get(case), f"no test_case_{case}_... in tests/"


def test_the_table_of_cases_names_the_tests_that_there_are() -> None:
    rows = {row["case"]: row["tests"] for row in CASE_ROW.finditer(CASES_PAGE.read_text())}
    assert set(MUST_SHOW.split()) <= set(rows)
    expected = {case: cell(names_by_case().get(case, [])) for case in rows}
    assert rows == expected, "see this file's docstring to renew the table"
    assert set(names_by_case()) <= set(rows)


# Examples


def example(name: str) -> ModuleType:
    """An example's module, not yet run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_language_model_trains_like_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("language_model")
    module.STEPS, module.ROWS, module.LENGTH = 2, 4, 16
    with torch.random.fork_rng(devices=[]):
        module.main()
    out, err = capsys.readouterr()
    assert err == ""
    assert "2 steps on 4 ranks" in out.splitlines()[-1]
    steps = [line.split() for line in out.splitlines() if re.match(r" +\d+  ", line)]
    assert [step[0] for step in steps] == ["0", "1"]
    assert all(step[1][:6] == step[2][:6] for step in steps), steps
    assert "def forward(self, labels, loss_weights)" in out and "lm_head" in out


def test_the_examples_are_these() -> None:
    assert [path.name for path in (ROOT / "examples").glob("*.py")] == ["language_model.py"], "give a new example a test"


def renew() -> None:
    """Write what the pages show, and the tests that the table names, as they are now."""
    for page in PAGES:
        text = page.read_text()
        for block, out in reversed(printed(page)):
            if block["shown"] is not None:
                text = text[: block.start("shown")] + out.strip("\n") + "\n" + text[block.end("shown") :]
        page.write_text(text)
    rows = CASE_ROW.sub(
        lambda row: f"| {row['case']} | {row['what']} | {cell(names_by_case().get(row['case'], []))} |", CASES_PAGE.read_text()
    )
    CASES_PAGE.write_text(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        renew()
