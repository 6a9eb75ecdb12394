"""What the docs say works."""

import re
from pathlib import Path

import numpy as np

from tests.test_cli import DIGITS, call
from tests.test_runs import Net

DOCS = Path(__file__).parents[1] / "docs"


def test_the_worked_example_runs_from_the_command_line(tmp_path: Path) -> None:
    file = DOCS / "examples/fedmedian.py"
    assert len(file.read_text().splitlines()) < 50
    call("compare", "fedavg", f"{file}:FedMedian", *DIGITS, "--rounds", "2", "--out", tmp_path, "--corrupt", "0.1")
    assert "Step size" in call("methods", f"{file}:FedMedian").stdout


def test_the_snippets_of_the_python_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S)
    assert len(blocks) == 3
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 255, (600, 8, 8), np.uint8), draw.integers(0, 10, 600)
    names: dict[str, object] = {
        "texts": [f"word{n % 7} good" for n in range(80)],
        "labels": y[:80],
        "dataset": list(zip(x, y, strict=True)),
    }
    names |= {"x": x, "y": y, "x_test": x, "y_test": y, "hospital": y % 4, "MyNet": Net}
    names |= {f"{part}{n}": array[:40] for n in range(3) for part, array in (("x", x), ("y", y))}
    exec(blocks[0].replace("fashion-mini", "digits").replace("rounds=10", "rounds=1"), names)
    exec(blocks[1].replace("FedAvg()", "FedAvg(rounds=1)"), names)
    exec(blocks[2].replace("parties=50", "parties=10"), names)
