"""A rank's program as a readable, runnable GraphModule.

    fx's own text                                             ours
    weights = pdcompiler_core_ops_weights(stage = 1, ...)     weights = weights(stage = 1, ...)
    stage1_forward_0 = self.stage1_forward(weights, h_0)      loss_0, saved_0 = self.stage1_forward(weights, h_0)
    loss_0 = stage1_forward_0[0]
    saved_0 = stage1_forward_0[1]

The words of the vocabulary are bound to a backend's meanings when the module is made, so running it costs no look-up; without a
backend they are the words themselves, which refuse to run. This is the one file that touches fx's private code generation
(CodeGen._gen_python_code).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen, PythonCode

from pdcompiler.core import ops
from pdcompiler.core.ir import RankProgram
from pdcompiler.core.random_ops import seeded

SEEDED = f"{seeded.__module__}.{seeded.__name__}".replace(".", "_")
PREFIX = ops.__name__.replace(".", "_") + "_"
CALL = re.compile(r"^(\s*)(\w+) = (self\.(\w+)\(.*?\))(;.*)?$")
ITEM = re.compile(r"^\s*(\w+) = (\w+)\[(\d+)\](;.*)?$")
EFFECT = re.compile(r"^(\s*)(\w+) = ((?:send|write_buffers|stash|update)\(.*\))(;.*)?$")
WORD = re.compile(r"\w+")
KEYWORD = re.compile(r"([(,] ?\w+) = ")


def generate(program: RankProgram, meaning: Mapping[Any, Callable[..., Any]] | None = None) -> fx.GraphModule:
    """The GraphModule of a rank's program; `meaning` says what each word of the vocabulary does."""
    functions = {name: module for name, module in program.root.named_children() if isinstance(module, fx.GraphModule)}
    arity = {name: len(module.graph.output_node().args[0]) for name, module in functions.items()}  # type: ignore[arg-type]
    program.graph.set_codegen(ProgramCode(meaning or {}, arity))
    for function in functions.values():
        function.graph.set_codegen(PlainCode())
    return fx.GraphModule(program.root, program.graph, f"Rank{program.rank}")


class PlainCode(CodeGen):
    """Prints without fx's remarks on stack traces, and the short name of what draws."""

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **options: Any) -> PythonCode:
        namespace.create_name(seeded.__name__, None)
        code = super()._gen_python_code(nodes, root_module, namespace, **{**options, "verbose": False})
        code.src = code.src.replace(SEEDED, seeded.__name__)
        code.globals = {name: value for name, value in code.globals.items() if name != SEEDED} | {seeded.__name__: seeded}
        return code


class ProgramCode(PlainCode):
    """Prints short names, and takes a stage function's results apart where it is called."""

    def __init__(self, meaning: Mapping[Any, Callable[..., Any]], arity: Mapping[str, int]) -> None:
        super().__init__()
        self.words = {word.__name__: meaning.get(word, word) for word in ops.VOCABULARY.values()}
        self.arity = arity

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **options: Any) -> PythonCode:
        for word in self.words:
            namespace.create_name(word, None)  # no value may take a word's name
        code = super()._gen_python_code(nodes, root_module, namespace, **options)
        lines = [_effect(KEYWORD.sub(r"\1=", line)) for line in code.src.replace(PREFIX, "").split("\n")]
        code.src = "\n".join(self._unpack(lines))
        code.globals = {name: value for name, value in code.globals.items() if not name.startswith(PREFIX)} | self.words
        return code

    def _unpack(self, lines: list[str]) -> list[str]:
        """Merge a call with the lines that take its results apart, where these are all that read it."""
        result: list[str] = []
        latest = {word: number for number, line in enumerate(lines) for word in WORD.findall(line)}
        at = 0
        while at < len(lines):
            call = CALL.match(lines[at])
            result.append(lines[at])
            at += 1
            if call is None or call[4] not in self.arity:
                continue
            items, end = dict[int, str](), at
            while end < len(lines) and (item := ITEM.match(lines[end])) and item[2] == call[2]:
                items[int(item[3])] = item[1]
                end += 1
            if latest[call[2]] >= end:
                continue
            left = ", ".join(items.get(i, "_") for i in range(self.arity[call[4]]))
            freed = call[5] or ""
            if len(items) < self.arity[call[4]]:  # what nobody reads would be held by its name
                freed = f"{freed.removesuffix('None')}_ = None" if freed else ";  _ = None"
            result[-1] = f"{call[1]}{f'({left},)' if self.arity[call[4]] == 1 else left} = {call[3]}{freed}"
            at = end
        return result


def _effect(line: str) -> str:
    """A word that gives nothing is a statement."""
    found = EFFECT.match(line)
    if found is None:
        return line
    freed = (found[4] or "").replace(f" {found[2]} =", "")
    return f"{found[1]}{found[3]}{'' if freed.strip() in ('; None', ';  None', ';') else freed}"
