from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.examples.scenarios", "tests.examples.lab", "tests.examples.commands")

from tests.brokers import rabbitmq_url as rabbitmq_url  # noqa: E402
from tests.brokers import redis_url as redis_url  # noqa: E402
from tests.examples.commands import Commands  # noqa: E402


@pytest.fixture
def make_commands(tmp_path: Path) -> Iterator[Callable[..., Commands]]:
    """A function that makes a folder to run commands in, with these variables in their environment."""
    made: list[Commands] = []

    def make(**environment: str) -> Commands:
        folder = tmp_path / f"folder{len(made)}"
        folder.mkdir()
        made.append(Commands(folder, **environment))
        return made[-1]

    yield make
    for commands in made:
        commands.close()
