"""Python names for the user's names: of parameters, inputs and module paths."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Container


def identifier(name: str, reserved: Container[str] = ()) -> str:
    """"blocks.0.weight" as blocks_0_weight; with one underscore more where that has a meaning of its own."""
    plain = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    has_meaning = plain in reserved or keyword.iskeyword(plain) or hasattr(builtins, plain)
    return f"{plain}_" if has_meaning else plain
