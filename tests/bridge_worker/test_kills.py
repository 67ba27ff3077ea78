"""Whoever is killed, and whenever: what ends a task is written whole or not at all, so no step is lost and none is there twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import chain, chord
from celery.exceptions import WorkerLostError

from tests.bridge_worker.projects import Project
from tests.proxy import Proxy
from tests.runtimes.kids import alive, descendants
from tests.waiting import wait_for

pytestmark = pytest.mark.req("C6")

Make = Callable[..., Project]
WORDS = 9
"""To a database, from the end of a body: more than there are."""


def children(pid: int) -> list[int]:
    """Processes below this one that run tasks: the last generation."""
    found, below = [], [pid]
    while below:
        parent = below.pop()
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        mine = [int(word) for word in text.split()]
        below += mine
        if not mine and parent != pid:
            found.append(parent)
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """All of it, as a container's end or the machine's does."""
    for pid in children(process.pid):
        with_group(pid)
    with_group(process.pid)
    process.wait(20)


def with_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), signal.SIGKILL)


def test_a_killed_worker_and_a_killed_child(make_project: Make, tmp_path: Path) -> None:
    project = make_project()
    until = tmp_path / "until"
    first = project.worker("--lease", "1", size=1)
    sent = chain(project.s("held", "h", str(until)), project.s("tell", "next")).delay()

    def starts() -> list[str]:
        return [note for note in project.notes if note.startswith("start h")]

    wait_for(lambda: len(starts()) == 1, 30)
    os.kill(int(starts()[0].split()[2]), signal.SIGKILL)
    wait_for(lambda: len(starts()) == 2, 30)
    kill(first)
    project.worker("--lease", "1", size=1)
    wait_for(lambda: len(starts()) == 3, 30)
    until.touch()
    sent.get(timeout=30)
    project.idle()
    assert project.notes.count("told h next") == 1
    (row,) = project.rows(sent.parent.id)
    assert (row.state, row.attempt, row.lapses) == ("succeeded", 3, 2)


@pytest.mark.soak
def test_children_do_not_outlive_a_worker_that_is_killed_alone(make_project: Make, tmp_path: Path) -> None:
    """Nobody would renew the lease of what they run: they end with the task, and with what else it started."""
    project = make_project()
    until = tmp_path / "until"
    worker = project.worker("--lease", "1", "-n", "first@proj")
    sent = chain(project.s("held", "h", str(until)), project.s("tell", "next")).delay()
    wait_for(lambda: any(note.startswith("start h") for note in project.notes), 30)
    family = descendants(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(20)
    wait_for(lambda: not alive(family), 3, "children outlive their parent")
    assert "end h" not in project.notes
    until.touch()
    project.worker("--lease", "1")
    assert sent.get(timeout=30) is None
    project.idle()
    counts = Counter(project.notes)
    assert (counts["end h"], counts["told h next"]) == (1, 1)
    (row,) = project.rows(sent.parent.id)
    assert (row.state, row.attempt, row.lapses) == ("succeeded", 2, 1)
    assert len(project.rows(sent.id)) == 1


@pytest.mark.soak
def test_a_task_that_takes_its_worker_down_three_times_is_told_as_lost(make_project: Make) -> None:
    """However soon it does: nothing is acknowledged before its end."""
    project = make_project()
    sent, name = None, project.folder / "worker"
    for _ in range(3):
        worker = project.worker("--lease", "1", size=1)
        name.write_text(str(worker.pid))
        sent = sent or project.s("takes_down", "t").apply_async(link_error=project.s("told_of_error", "t"))
        worker.wait(30)
    assert sent is not None
    project.worker("--lease", "1", size=1)
    with pytest.raises(WorkerLostError):
        sent.get(timeout=30)
    project.wait_for_note("error of t: WorkerLostError")
    assert project.notes.count("takes down t") == 3
    (row,) = project.ended(sent.id)
    assert (row.state, row.error_kind, row.lapses) == ("dead", "crashed", 3)


def test_killed_at_every_word_of_what_ends_a_retry(make_project: Make) -> None:
    """Before each word, and after the last: there is one next row afterwards, never none and never two."""
    project = make_project(kills=True)
    project.worker(size=3)
    sent = {nth: project.send("mined", nth) for nth in range(WORDS + 1)}
    for nth, result in sent.items():
        assert result.get(timeout=60) == 1, nth
        assert [row.state for row in project.ended(result.id, 2)] == ["acked", "succeeded"], nth
    project.idle()
    notes = Counter(project.notes)
    killed = [nth for nth in sent if notes[f"killed {nth}"]]
    assert killed == list(range(len(killed)))
    assert 4 <= len(killed) < len(sent)  # BEGIN, the row, the next row, COMMIT; and the last of them was reached
    assert {notes[f"mined {nth} 1"] for nth in sent} == {1}
    # After COMMIT it is over; before, it comes again.
    assert [notes[f"mined {nth} 0"] for nth in killed] == [1] + [2] * (len(killed) - 1)


@pytest.mark.databases("postgres")
def test_a_commit_whose_answer_is_lost(make_project: Make, database_url: str) -> None:
    proxy = Proxy(database_url)
    try:
        project = make_project(f"dbqueue+{proxy.url}", client_url=f"dbqueue+{database_url}")
        project.worker(size=1)
        assert project.value("again", "first", 1) == "first after 1 in proj"
        for n, lose in enumerate((proxy.lose_answer, proxy.lose_request) * 2):
            lose(b"COMMIT")
            sent = project.send("again", f"n{n}", 2)
            assert sent.get(timeout=60) == f"n{n} after 2 in proj"
            assert not proxy.armed
            assert [row.state for row in project.ended(sent.id, 3)] == ["acked", "acked", "succeeded"]
            assert [note for note in project.notes if f"try n{n}" in note] == [f"try n{n} {step}" for step in range(3)]
        lost = chord([project.s("add", n, n) for n in range(5)], project.s("total"))
        proxy.lose_answer(b"COMMIT")
        body = lost.delay()
        assert body.get(timeout=60) == 20
        project.idle()
        assert len(project.rows(body.id)) == 1
    finally:
        proxy.close()


# -- long ones ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def storm(make_project: Make) -> Iterator[Project]:
    project = make_project(kills=False)
    yield project
    for worker in project.workers:
        if worker.poll() is None:
            kill(worker)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["worker", "parent", "child"])
def test_a_storm_of_kills(storm: Project, victim: str) -> None:
    """A chain of 10, a chord of 50 and retrying tasks, while somebody is killed again and again."""
    project, chance = storm, random.Random(victim)
    workers = [project.worker("--lease", "1", "-n", f"w{n}@proj") for n in range(2)]
    chains = [
        chain(project.s("again", f"c{c}-0", 0), *[project.s("step", c, n) for n in range(1, 10)]).delay()
        for c in range(5)
    ]
    chords = [chord([project.s("part", c, n) for n in range(50)], project.s("body", c)).delay() for c in range(3)]
    retries = [project.send("again", f"r{n}", 3, {"countdown": 0.1}) for n in range(20)]
    results = [*chains, *chords, *retries]
    ends = time.monotonic() + 45
    kills = 0
    while time.monotonic() < ends and not all(result.ready() for result in results):
        n = chance.randrange(2)
        if victim != "child":
            if victim == "worker":
                kill(workers[n])
            else:  # alone: its children end by themselves
                workers[n].kill()
                workers[n].wait(20)
            workers[n] = project.worker("--lease", "1", "-n", f"w{n}-{kills}@proj")
        elif found := children(workers[n].pid):
            with_group(chance.choice(found))
            wait_for(lambda: len(children(workers[n].pid)) >= 2, 30)  # noqa: B023
        kills += 1
    assert kills >= 3
    for result in results:
        result.get(timeout=120)
    project.idle()
    check_storm(project, [body.id for body in chords])


def check_storm(project: Project, bodies: list[str]) -> None:
    notes = Counter(project.notes)
    for c in range(5):
        assert all(notes[f"step {c} {n}"] for n in range(1, 10))
    for c, body in enumerate(bodies):
        assert all(notes[f"part {c} {n}"] for n in range(50))
        assert len(project.rows(body)) == 1
        assert notes[f"body {c} {sum(range(50))}"] >= 1
    assert all(notes[f"try r{n} {step}"] for n in range(20) for step in range(4))
    states = Counter(row.state for row in project.queue.jobs(limit=1_000) if row.target.endswith("again"))
    assert set(states) <= {"acked", "succeeded"}
    assert states["acked"] == 20 * 3


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_both_workers_on_the_same_rows(make_project: Make) -> None:
    """`celery worker` and `dbqueue worker`, one of each killed again and again."""
    project = make_project(task_acks_late=True, task_reject_on_worker_lost=True, broker_transport_options={"lease": 1})
    ours, celerys = project.worker("--lease", "1"), project.celery_worker()
    chains = [
        chain(project.s("again", f"c{c}-0", 0), *[project.s("step", c, n) for n in range(1, 10)]).delay()
        for c in range(10)
    ]
    singles = [project.send("step", "x", "s", n) for n in range(200)]
    ends, kills = time.monotonic() + 30, 0
    while time.monotonic() < ends and not all(result.ready() for result in [*chains, *singles]):
        kill(ours)
        ours = project.worker("--lease", "1", "-n", f"o{kills}@proj")
        kill(celerys)
        celerys = project.celery_worker()
        kills += 1
    assert kills >= 1
    for result in [*chains, *singles]:
        result.get(timeout=120)
    project.idle()
    notes = Counter(project.notes)
    assert all(notes[f"step s {n}"] for n in range(200))
    assert all(notes[f"step {c} {n}"] for c in range(10) for n in range(1, 10))
