"""The README says what is true: its diagram is the MOVES table, its demo's output is what the demo prints, its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dbqueue import states

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_diagram_is_the_moves_table() -> None:
    assert f"```mermaid\n{states.diagram()}\n```" in README


def shape(output: str) -> list[str]:
    """The lines with their numbers taken out: how many jobs a killed worker held differs from run to run."""
    return [re.sub(r"\d+", "#", line) for line in output.strip().splitlines()]


@pytest.mark.databases("sqlite")
@pytest.mark.req("D5", "D11", "D12")
def test_the_demo_prints_what_the_readme_shows(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.shop.demo"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"```\n(orders read from.*?)\n```", README, re.DOTALL)
    assert shown
    assert shape(done.stdout) == shape(shown[1])
    assert "orders without a receipt (lost)   0\n" in done.stdout
    assert "receipts without an order         0\n" in done.stdout


def test_the_readme_names_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
