"""The laws of the house, read from the sources: who may import whom, and what no file may do.

        pdcompiler/      the face: compiler, pipeline, testing, cli and __init__ see both sides
           |       |
        passes/  backends/      see core, never each other and never a sibling
           |       |
        pdcompiler/core/        sees torch, sympy, networkx, numpy, numba, scipy and itself

A rule takes one Source and yields (line, what is wrong). Each rule has a test over the repository, and the tables at
the end show it what it must catch and what it must let pass.
"""

import ast
import configparser
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE_FOLDERS = ("pdcompiler", "passes", "backends")
ALL_FOLDERS = (*CODE_FOLDERS, "tests", "benchmarks", "examples", "docs")

LONGEST_FILE = 300
CORE_LIBRARIES = {"torch", "sympy", "networkx", "numpy", "numba", "scipy"}
FACE = (
    "__init__", "branching", "break_even", "cli", "commands/costs", "compiler", "entry", "given_partition", "given_schedule",
    "pipeline", "plan_partition", "planner", "planning_trace", "ranking", "recording", "runner", "search", "schedule_choice",
    "simulation", "stream", "stream_memory", "testing", "verification",
)  # fmt: skip
SEES_BOTH_SIDES = {f"pdcompiler/{name}.py" for name in FACE}
READS_ENVIRONMENT = {"backends/distributed.py", "pdcompiler/compiler.py", "pdcompiler/pipeline.py"}
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
# For users' tests, so these need the test extra:
HELPS_TESTS = {f"pdcompiler/{kind}strategies.py" for kind in ("", "asynchronous_", "schedule_", "schedule_problem_", "workload_")}
HELPS_TESTS |= {"pdcompiler/testing.py"}
TOUCHES_PRIVATE_TORCH = {"passes/tracing/trace.py"}
PRIVATE_TORCH = (
    "torch._dynamo",
    "torch._functorch",
    "torch._subclasses",
    "torch.fx.experimental",
    "torch.utils._sympy",
)

Finding = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def module(self) -> str:
        """The name it is imported by: passes/ranks/free_early.py is pdcompiler.passes.ranks.free_early."""
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"pdcompiler.{name}" if name.split(".")[0] in ("passes", "backends") else name

    @cached_property
    def imports(self) -> list[Finding]:
        """Every imported name, in full: `from ..core import ir` gives pdcompiler.core.ir."""
        found: list[Finding] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                found += [(node.lineno, f"{self._origin(node)}.{alias.name}") for alias in node.names]
        return found

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
        above = package[: len(package) - (node.level - 1)]
        return ".".join([*above, node.module] if node.module else above)


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def root_of(name: str) -> str:
    return name.split(".")[0]


def is_step_or_meaning(source: Source) -> bool:
    return inside(source.module, "pdcompiler.passes", "pdcompiler.backends")


@cache
def declared_libraries() -> frozenset[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].split()
    return frozenset(re.split(r"[<>=!~\[]", line)[0].replace("-", "_") for line in lines)


# The rules


def core_imports_only_core(source: Source) -> Iterator[Finding]:
    if not inside(source.module, "pdcompiler.core"):
        return
    for line, name in source.imports:
        if root_of(name) not in CORE_LIBRARIES | sys.stdlib_module_names and not inside(name, "pdcompiler.core"):
            yield line, f"core imports {name}; it may import {', '.join(sorted(CORE_LIBRARIES))} and pdcompiler.core"


def passes_and_backends_import_only_core(source: Source) -> Iterator[Finding]:
    if not is_step_or_meaning(source):
        return
    for line, name in source.imports:
        if root_of(name) == "pdcompiler" and not inside(name, "pdcompiler.core"):
            yield line, f"imports {name}; passes and backends import pdcompiler.core, never each other nor a sibling"


def few_see_passes_and_backends(source: Source) -> Iterator[Finding]:
    if is_step_or_meaning(source) or source.path in SEES_BOTH_SIDES:
        return
    for line, name in source.imports:
        if inside(name, "pdcompiler.passes", "pdcompiler.backends"):
            yield line, f"imports {name}; only {', '.join(sorted(SEES_BOTH_SIDES))} may"


def nobody_imports_a_folder_by_its_bare_name(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if root_of(name) in ("passes", "backends"):
            yield line, f"imports {name}, a second copy of the same file; write pdcompiler.{name}"


def only_declared_libraries(source: Source) -> Iterator[Finding]:
    allowed = declared_libraries() | sys.stdlib_module_names | {"pdcompiler"}
    if source.path in HELPS_TESTS:
        allowed |= {"hypothesis", "pytest"}
    for line, name in source.imports:
        if root_of(name) not in allowed and root_of(name) not in ("passes", "backends"):
            yield line, f"imports {name}, which install_requires in setup.cfg does not name"


def private_torch_in_one_file(source: Source) -> Iterator[Finding]:
    if source.path in TOUCHES_PRIVATE_TORCH:
        return
    imported = [(line, name) for line, name in source.imports if inside(name, *PRIVATE_TORCH)]
    attributes = [(node.lineno, ast.unparse(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    spelled = [(line, name) for line, name in attributes if name in PRIVATE_TORCH]
    for line, name in imported + spelled:
        yield line, f"uses {name}; only {', '.join(TOUCHES_PRIVATE_TORCH)} touches it"


def environment_only_from_the_launcher(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if name in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.*"):
            yield line, f"imports {name}; write os.environ, where this rule sees it"
    allowed = _launcher_reads(source.tree) if source.path in READS_ENVIRONMENT else set()
    for node in ast.walk(source.tree):
        if _touches_environment(node) and node not in allowed:
            who, what = ", ".join(sorted(READS_ENVIRONMENT)), ", ".join(sorted(LAUNCHER_VARIABLES))
            yield node.lineno, f"{ast.unparse(node)}: only {who} read the environment, and only {what}, by name"


def _touches_environment(node: ast.AST) -> bool:
    names = ("os.environ", "os.environb", "os.getenv", "os.putenv")
    return isinstance(node, ast.Attribute) and ast.unparse(node) in names


def _launcher_reads(tree: ast.Module) -> set[ast.AST]:
    """The `os.environ` and `os.getenv` nodes that stand in a read of one launcher variable."""
    reads: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=place, slice=ast.Constant(value=key), ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Attribute(value=place, attr="get"), args=[ast.Constant(value=key), *_]):
                pass
            case ast.Call(func=ast.Attribute(attr="getenv") as place, args=[ast.Constant(value=key), *_]):
                pass
            case ast.Compare(left=ast.Constant(value=key), ops=[ast.In() | ast.NotIn()], comparators=[place]):
                pass
            case _:
                continue
        if key in LAUNCHER_VARIABLES:
            reads.add(place)
    return reads


def starts_with_a_docstring(source: Source) -> Iterator[Finding]:
    if not ast.get_docstring(source.tree):
        yield 1, "has no docstring: say why this module exists and what it is not"


def fits_on_a_few_screens(source: Source) -> Iterator[Finding]:
    length = len(source.text.splitlines())
    if length > LONGEST_FILE:
        yield LONGEST_FILE + 1, f"has {length} lines, more than {LONGEST_FILE}: it holds two ideas"


Rule = Callable[[Source], Iterable[Finding]]


# The repository


@cache
def sources(folders: tuple[str, ...] = CODE_FOLDERS) -> tuple[Source, ...]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths)


def assert_kept(rule: Rule, among: Iterable[Source] | None = None) -> None:
    findings = [f"{s.path}:{line}: {what}" for s in among or sources() for line, what in rule(s)]
    assert not findings, "\n".join(["", *findings])


def test_the_sources_are_found() -> None:
    assert {"pdcompiler/core/__init__.py", "passes/__init__.py", "backends/__init__.py"} <= {s.path for s in sources()}


def test_core_imports_only_core() -> None:
    assert_kept(core_imports_only_core)


def test_passes_and_backends_import_only_core() -> None:
    assert_kept(passes_and_backends_import_only_core)


def test_few_see_passes_and_backends() -> None:
    assert_kept(few_see_passes_and_backends)


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    assert_kept(nobody_imports_a_folder_by_its_bare_name, sources(ALL_FOLDERS))


def test_only_declared_libraries() -> None:
    assert_kept(only_declared_libraries)


def test_private_torch_in_one_file() -> None:
    assert_kept(private_torch_in_one_file)


def test_environment_only_from_the_launcher() -> None:
    assert_kept(environment_only_from_the_launcher)


def test_every_module_starts_with_a_docstring() -> None:
    assert_kept(starts_with_a_docstring)


def test_no_file_is_long() -> None:
    assert_kept(fits_on_a_few_screens)


def test_every_folder_of_code_is_packaged() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = set(config["options"]["packages"].split())
    folders = {Path(s.path).parent.as_posix() for s in sources()}
    assert {Source(f"{folder}/__init__.py", "").module for folder in folders} == named, "compare packages in setup.cfg"
    assert not [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()], "lacks an __init__.py"


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_nothing_in_pdcompiler_shadows_a_folder(name: str) -> None:
    assert not [path for path in (f"pdcompiler/{name}", f"pdcompiler/{name}.py") if (ROOT / path).exists()]


# The rules themselves

MUST_CATCH: list[tuple[Rule, str, str]] = [
    (core_imports_only_core, "pdcompiler/core/ir.py", "import rich"),
    (core_imports_only_core, "pdcompiler/core/ir.py", "from pdcompiler import compiler"),
    (core_imports_only_core, "pdcompiler/core/ir.py", "from .. import compiler"),
    (core_imports_only_core, "pdcompiler/core/ir.py", "def f():\n    from pdcompiler.passes import ranks"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from pdcompiler.passes.ranks.b import c"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from . import b"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from .b import c"),
    (passes_and_backends_import_only_core, "passes/ranks/__init__.py", "from .b import c"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from pdcompiler.backends import codegen"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from pdcompiler import Machine"),
    (passes_and_backends_import_only_core, "backends/simulator.py", "import pdcompiler.backends.reference"),
    (passes_and_backends_import_only_core, "backends/simulator.py", "import pdcompiler"),
    (few_see_passes_and_backends, "pdcompiler/checkpoint.py", "from pdcompiler.backends import distributed"),
    (few_see_passes_and_backends, "pdcompiler/core/ir.py", "from ..passes import ranks"),
    (nobody_imports_a_folder_by_its_bare_name, "tests/test_a.py", "import passes.ranks"),
    (nobody_imports_a_folder_by_its_bare_name, "tests/test_a.py", "from passes import ranks"),
    (nobody_imports_a_folder_by_its_bare_name, "pdcompiler/compiler.py", "import backends"),
    (only_declared_libraries, "passes/tracing/trace.py", "import transformers"),
    (only_declared_libraries, "pdcompiler/pipeline.py", "import hypothesis"),
    (private_torch_in_one_file, "passes/stages/cut_stages.py", "from torch._functorch import aot_autograd"),
    (private_torch_in_one_file, "passes/stages/cut_stages.py", "from torch.fx import experimental"),
    (private_torch_in_one_file, "pdcompiler/core/ir.py", "import torch\nx = torch._subclasses.FakeTensor"),
    (environment_only_from_the_launcher, "pdcompiler/core/ir.py", "import os\nx = os.environ['RANK']"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nx = os.environ['DEBUG']"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nos.environ['RANK'] = '0'"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nf(os.environ)"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nx = os.getenv(name)"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "from os import environ"),
    (starts_with_a_docstring, "passes/ranks/a.py", "import torch"),
    (starts_with_a_docstring, "passes/ranks/a.py", ""),
    (fits_on_a_few_screens, "passes/ranks/a.py", "x = 1\n" * (LONGEST_FILE + 1)),
]

MUST_PASS: list[tuple[Rule, str, str]] = [
    (core_imports_only_core, "pdcompiler/core/ir.py", "import sys, torch.fx\nfrom . import ops\nfrom .cost import C"),
    (core_imports_only_core, "pdcompiler/compiler.py", "import rich"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from pdcompiler.core import ir\nimport networkx"),
    (passes_and_backends_import_only_core, "passes/ranks/a.py", "from ...core.ir import Program"),
    (few_see_passes_and_backends, "pdcompiler/compiler.py", "from pdcompiler.passes.ranks import free_early"),
    (nobody_imports_a_folder_by_its_bare_name, "tests/test_a.py", "from pdcompiler.passes import ranks"),
    (only_declared_libraries, "pdcompiler/cli.py", "import json, torch, typer\nfrom pdcompiler import core"),
    (only_declared_libraries, "pdcompiler/testing.py", "import hypothesis"),
    (private_torch_in_one_file, "passes/tracing/trace.py", "from torch._functorch import aot_autograd"),
    (private_torch_in_one_file, "passes/stages/cut_stages.py", "import torch.fx\nfrom torch.utils import _pytree"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nx = os.environ['RANK']"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nx = os.environ.get('RANK', '0')"),
    (environment_only_from_the_launcher, "pdcompiler/pipeline.py", "import os\nx = 'WORLD_SIZE' in os.environ"),
    (environment_only_from_the_launcher, "backends/distributed.py", "import os\nx = os.getenv('LOCAL_RANK')"),
    (starts_with_a_docstring, "passes/ranks/a.py", '"""Why."""'),
    (fits_on_a_few_screens, "passes/ranks/a.py", "x = 1\n" * LONGEST_FILE),
]


@pytest.mark.parametrize(("rule", "path", "text"), MUST_CATCH)
def test_a_rule_catches(rule: Rule, path: str, text: str) -> None:
    [(line, what)] = rule(Source(path, text))
    assert line == len(text.splitlines() or [""]) and what


@pytest.mark.parametrize(("rule", "path", "text"), MUST_PASS)
def test_a_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Source(path, text)))


def test_a_finding_names_file_and_line() -> None:
    with pytest.raises(AssertionError, match=r"passes/ranks/a\.py:1: imports pdcompiler\.passes\.ranks\.b\.c; "):
        assert_kept(passes_and_backends_import_only_core, [Source("passes/ranks/a.py", "from .b import c")])
