"""docs/from-celery.md: an app walks from Redis or RabbitMQ to a worker without Celery and back, with the commands of the page. Each of them
is run, and all that was sent on the way is done."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.examples.commands import ROOT, Commands
from tests.waiting import wait_for

PAGE = (ROOT / "docs" / "from-celery.md").read_text(encoding="utf-8")
OLD, NEW = "redis://localhost:6379/0", "dbqueue+sqlite:///proj.db"
FAR = 100_000
"""Seconds. No worker begins such a task during the test."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


class Walk:
    """The app of the page in a folder. Addresses of the page stand for those of this test's servers."""

    def __init__(self, make: Callable[..., Commands], old: str, redis: str, database_url: str) -> None:
        self.commands = make()
        self.rabbitmq = old.startswith("amqp")
        self._addresses = {
            OLD: old, "redis://localhost:6379": redis.removesuffix("/0"), NEW.removeprefix("dbqueue+"): database_url,
            "redis-cli": f"redis-cli -p {urlsplit(redis).port}", "queue.declare celery": "queue.declare celery" + " 1" * self.rabbitmq,
        }  # fmt: skip
        self.left = [line for block in blocks("sh") for line in block.splitlines() if not line.startswith("pip ")]
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.write("proj.py", "proj.py")
        self.write("jobs.py", "jobs.py")
        self.write("move.py", '"""Moves')

    def write(self, file: str, begin: str) -> None:
        (text,) = (block for block in blocks("python") if block.removeprefix("# ").startswith(begin))
        (self.commands.folder / file).write_text(self.here(text))

    def here(self, text: str) -> str:
        for theirs, ours in self._addresses.items():
            text = text.replace(theirs, ours)
        return text

    def change(self, number: int, back: bool = False) -> None:
        """Makes one of the page's changes to the app, or takes it back."""
        one, other = (self.here(line[1:]) for line in blocks("diff")[number].splitlines())
        file = self.commands.folder / "proj.py"
        text = file.read_text()
        assert (other if back else one) in text
        file.write_text(text.replace(other, one) if back else text.replace(one, other))

    def command(self, text: str) -> str:
        """One of the page's."""
        assert text in [line for block in blocks("sh") for line in block.splitlines()], text
        if text in self.left:
            self.left.remove(text)
        return self.here(text)

    def run(self, text: str) -> str:
        return self.commands.run(self.command(text))

    def until(self, text: str, wanted: str) -> None:
        """Runs it until it says so: a worker may not have heard of it yet, or be too late with its answer."""
        command = self.command(text)
        said = ""

        def says() -> bool:
            nonlocal said
            process = self.commands.start(command)
            process.wait(60)
            said = self.commands.log(process)
            return wanted in said

        try:
            wait_for(says, 60)
        except AssertionError:
            pytest.fail(f"{text} does not say {wanted}:\n{said}")

    def serve(self, text: str) -> None:
        self.workers[text] = self.commands.serve(self.command(text))

    def stop(self, text: str) -> None:
        self.commands.stop(self.workers.pop(text))

    def call(self, task: str, args: str, *options: str, broker: str = "") -> str:
        """Returns the task's id."""
        before = f"-b {broker}" if broker else ""
        said = self.commands.run(
            self.here(f"celery -A proj {before} call proj.{task} --args '{args}' {' '.join(options)}")
        )
        return said.split()[-1]

    def check(self, task_id: str) -> None:
        """The task was add(1, 2), and its result arrives."""
        assert self.commands.run(f"celery -A proj result {task_id}").split() == ["3"]


@pytest.mark.req("C1", "C3", "C6", "C8")
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_from_redis_and_back(make_commands: Callable[..., Commands], database_url: str, redis_url: str) -> None:
    every_step_and_its_way_back(Walk(make_commands, redis_url, redis_url, database_url))


@pytest.mark.req("C1", "C3", "C6", "C8")
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.databases("sqlite")
def test_from_rabbitmq_and_back(
    make_commands: Callable[..., Commands], database_url: str, redis_url: str, rabbitmq_url: str
) -> None:
    every_step_and_its_way_back(Walk(make_commands, rabbitmq_url, redis_url, database_url))


def every_step_and_its_way_back(walk: Walk) -> None:
    run, serve, stop, until, call, check = walk.run, walk.serve, walk.stop, walk.until, walk.call, walk.check
    on_old, scheduled = f"celery -A proj -b {OLD}", f"celery -A proj -b {OLD} inspect scheduled"
    queues = "dbqueue queues -A proj"

    # before
    serve("celery -A proj worker -l INFO")
    serve("celery -A proj beat -l INFO")
    check(run('celery -A proj call proj.add --args "[1, 2]"').split()[-1])
    far = call("remind", '["far"]', f"--countdown={FAR}")
    until(scheduled, far)
    stop("celery -A proj beat -l INFO")

    # 1: side by side
    walk.change(0)
    run("dbqueue migrate -A proj")
    serve("celery -A proj worker -n new@%h -l INFO")
    serve(f"{on_old} worker -n old@%h -l INFO")
    stop("celery -A proj worker -l INFO")
    check(call("add", "[1, 2]"))
    check(call("add", "[1, 2]", broker=OLD))
    until(scheduled, far)
    assert "messages:0" in run(f"{on_old} amqp queue.declare celery") or walk.rabbitmq
    until(f"{on_old} inspect active", "empty")
    until(f"{on_old} inspect reserved", "old@")
    held = ["0", "0"] if walk.rabbitmq else ["0", "1"]
    assert [run("redis-cli llen celery").strip(), run("redis-cli hlen unacked").strip()] == held

    # 1: what waits for an ETA
    stop(f"{on_old} worker -n old@%h -l INFO")
    late = call("add", "[1, 2]", "--expires=36000", "--queue=celery", broker=OLD)
    assert "celery: 2 moved" in run(f"python move.py proj {OLD} {NEW}")
    check(late)
    until(queues, "celery      0        1        0")
    serve("celery -A proj beat -S dbqueue -l INFO")
    migrated = call("add", "[1, 2]", broker=OLD)
    run(f"celery -A proj migrate -a -t 5 {OLD} {NEW}")
    check(migrated)

    # 1: and back
    stop("celery -A proj beat -S dbqueue -l INFO")
    stop("celery -A proj worker -n new@%h -l INFO")
    walk.change(0, back=True)
    serve("celery -A proj worker -n old@%h -l INFO")
    serve(f"celery -A proj -b {NEW} worker -n new@%h -l INFO")
    check(call("add", "[1, 2]"))
    check(call("add", "[1, 2]", broker=NEW))
    until("dbqueue queues --url sqlite:///proj.db", "celery      0        1        0")
    stop(f"celery -A proj -b {NEW} worker -n new@%h -l INFO")
    late = call("add", "[1, 2]", "--expires=36000", broker=NEW)
    assert "celery: 2 moved" in run(f"python move.py proj {NEW} {OLD}")
    check(late)
    until(scheduled, far)
    migrated = call("add", "[1, 2]", broker=NEW)
    run(f"celery -A proj migrate -a -t 5 {NEW} {OLD}")
    check(migrated)
    stop("celery -A proj worker -n old@%h -l INFO")

    # 2
    walk.change(0)
    assert "celery: 1 moved" in run(f"python move.py proj {OLD} {NEW}")
    serve("celery -A proj worker -c 2 -l INFO")
    serve("dbqueue worker -A proj -c 2")
    for state in ("acked", "succeeded"):

        def ended(state: str = state) -> bool:
            check(call("add", "[1, 2]"))
            return state in run("dbqueue jobs list -A proj")

        wait_for(ended, 60, f"no row is {state}")
    stop("celery -A proj worker -c 2 -l INFO")
    stop("dbqueue worker -A proj -c 2")

    # 3
    walk.change(1)
    serve("dbqueue worker -A proj")
    serve("dbqueue beat -A proj")
    check(call("add", "[1, 2]"))
    stop("dbqueue beat -A proj")
    stop("dbqueue worker -A proj")
    walk.change(1, back=True)
    serve("celery -A proj worker -l INFO")
    check(call("add", "[1, 2]"))
    stop("celery -A proj worker -l INFO")
    walk.change(1)

    # 4
    serve("dbqueue worker -A proj")
    serve("dbqueue worker -A jobs")
    walk.commands.run("python -c 'import jobs; jobs.add.delay(1, 2)'")
    log = walk.workers["dbqueue worker -A jobs"]
    wait_for(lambda: "jobs.add succeeded" in walk.commands.log(log), 60, "the job did not run")
    check(call("add", "[1, 2]"))
    until("dbqueue queues -A jobs", "celery      0        1        0")
    stop("dbqueue worker -A jobs")
    stop("dbqueue worker -A proj")

    assert walk.left == []


def test_the_page_prints_the_script() -> None:
    assert f"```python\n{(ROOT / 'examples' / 'move.py').read_text(encoding='utf-8')}```" in PAGE


@pytest.mark.parametrize("file", ["from-celery.md", "celery.md", "bridge.md"])
def test_links_lead_somewhere(file: str) -> None:
    """Pages and headings of this repository."""
    page = ROOT / "docs" / file
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor
