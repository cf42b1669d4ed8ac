"""Each folder of code has a short README that names all its files and no others."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = sorted({path.parent for name in ("pdcompiler", "passes", "backends") for path in (ROOT / name).rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_readme_names_the_files_of_its_folder(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.py|\w+/)`", text))
    files = {path.name for path in folder.glob("*.py")} - ({"__init__.py"} - named)
    folders = {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}
    assert named == files | folders
    assert len(text.splitlines()) <= 30


def test_the_tests_readme_names_what_is_there() -> None:
    text = (ROOT / "tests" / "README.md").read_text()
    for name in re.findall(r"^- (.*?):", text, re.MULTILINE):
        assert all((ROOT / "tests" / part.strip("` ")).exists() for part in name.split(",")), name
