"""docs/from-celery.md: every command in it is run on an app, in its order."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.bridge_worker.projects import ROOT, Project

GUIDE = ROOT / "docs" / "from-celery.md"


@pytest.mark.req("C6")
@pytest.mark.soak
@pytest.mark.databases("sqlite")
def test_the_commands_work(make_project: Callable[..., Project]) -> None:
    project = make_project()
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL) for line in block.splitlines()
    ]
    assert len(commands) == 5
    for command in commands:
        module, *arguments = command.split()
        process = project.start(module, *arguments)
        if "worker" in arguments:
            assert project.value("add", 1, 2) == 3, command
            process.terminate()
        assert process.wait(60) == 0, project.log(process)
    said = [project.log(process) for process in project.workers]
    assert "acked" in said[3]
    assert "succeeded" in said[3]
    assert "proj.add" in said[3]
