"""The README's script and the demo, as a user starts them: under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT_DEMO = "import language_model as demo; demo.STEPS, demo.ROWS, demo.LENGTH = 2, 4, 16; demo.main()"

LOSS = re.compile(r"loss \d\.\d{3}")  # not whole lines: two ranks may write into one

pytestmark = pytest.mark.processes


def torchrun(ranks: int, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end; the output of all ranks together."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(launch, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def first_script_of_the_readme() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readmes_script_gives_the_same_losses_on_two_ranks_as_in_one_process(tmp_path: Path) -> None:
    script = first_script_of_the_readme()
    (tmp_path / "train.py").write_text(script)
    ran = torchrun(2, "train.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    losses = LOSS.findall(alone.stdout)
    assert len(losses) == 3 and len(set(losses)) == 3
    assert sorted(LOSS.findall(ran.stdout)) == sorted(2 * losses), "each rank prints the same losses"


@pytest.mark.full
def test_the_demo_prints_on_one_rank_only(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); {SHORT_DEMO}")
    ran = torchrun(4, "short.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("2 steps on 4 ranks") == 1
    assert ran.stdout.count("The program of rank 3") == 1
