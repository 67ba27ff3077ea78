"""``dbqueue worker -A`` is asked and steered by Celery's remote control (C6)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.canvas import chord
from celery.exceptions import ChordError, SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from dbqueue import DBQueue
from tests.bridge_worker.projects import NAME, Project
from tests.bridge_worker.steered import NODE, Node, monitored, start
from tests.servers import Server
from tests.transport.conftest import broker_url, make_shop, queue
from tests.transport.shops import Shop, need_package
from tests.transport.test_clients import Flower, answers
from tests.transport.test_revoke import stamped
from tests.waiting import wait_for

__all__ = ["broker_url", "make_shop", "queue"]  # fixtures

pytestmark = [pytest.mark.timeout(180), pytest.mark.req("C6")]

MakeShop = Callable[..., Shop]


def ends(queue: DBQueue, task_id: str) -> list[tuple[str, str | None]]:
    return [(record.state, record.error_kind) for record in queue.jobs() if record.task_id == task_id]


def test_it_answers_as_a_celery_worker_does(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    shop = make_shop(backend=broker_url, listen_url=broker_url.removeprefix("dbqueue+"))
    process = start(shop, "-Q", "shop,other")
    node = Node(shop)
    shop.app.add.delay(1, 1).get(timeout=30)
    running = shop.app.slow.delay("long", 600)
    shop.wait_for_note("start long")
    later = shop.app.add.apply_async((2, 2), countdown=3_600)

    assert node("ping") == {"ok": "pong"}
    (active,) = node("active")
    assert {name: active[name] for name in ("id", "name", "args", "kwargs", "hostname")} == {
        "id": running.id, "name": "shop.slow", "args": ["long", 600], "kwargs": {}, "hostname": NODE,
    }  # fmt: skip
    assert active["delivery_info"]["routing_key"] == "shop"
    assert active["time_start"] > 1_700_000_000
    told = node("query_task", ids=[running.id, later.id])
    assert {task_id: state for task_id, (state, _) in told.items()} == {running.id: "active"}
    assert node("reserved") == node("scheduled") == node("revoked") == []
    assert {"shop.add", "shop.slow"} <= set(node("registered"))
    assert {found["name"] for found in node("active_queues")} == {"shop", "other"}
    stats = node("stats")
    assert stats["pid"] == process.pid
    assert stats["total"] == {"shop.add": 1, "shop.slow": 1}
    assert stats["pool"]["max-concurrency"] == 1
    assert stats["pool"]["processes"] == [active["worker_pid"]]
    assert stats["broker"]["transport"] == "dbqueue"
    assert stats["rusage"]["maxrss"] > 0
    assert node("conf")["task_default_queue"] == "shop"
    assert "dbqueue" in node("report")["ok"]
    assert node("clock")["clock"] > 0
    hello = node("hello", from_node="other@shop", revoked=["a"])
    assert hello["revoked"] == ["a"]
    assert node("revoked") == ["a"]
    password = queue.database.url.password
    if password:
        assert all(password not in str(node(command)) for command in ("stats", "report", "conf"))

    for command, arguments in [
        ("rate_limit", {"task_name": "shop.add", "rate_limit": "1/m"}), ("pool_grow", {"n": 1_000}), ("pool_shrink", {"n": 1}),
        ("pool_grow", {"n": 0}), ("pool_shrink", {"n": -1}), ("pool_grow", {"n": "1"}),
        ("autoscale", {"max": 3, "min": 1}), ("pool_restart", {}), ("election", {"id": "a", "topic": "b"}), ("nonsense", {}),
    ]:  # fmt: skip
        assert list(node(command, **arguments)) == ["error"], command
    assert node("ping") == {"ok": "pong"}
    os.kill(process.pid, signal.SIGKILL)


def test_it_is_steered_as_a_celery_worker_is(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    shop = make_shop(backend=broker_url)
    process = start(shop)
    node, control, add, slow = Node(shop), shop.app.app.control, shop.app.add, shop.app.slow

    # Queues come and go.
    assert node("add_consumer", queue="more") == {"ok": "add consumer more"}
    assert node("cancel_consumer", queue="shop") == {"ok": "no longer consuming from shop"}
    assert list(node("add_consumer", queue="dbqueue.outbox.mine")) == ["error"]
    assert [found["name"] for found in node("active_queues")] == ["more"]
    alone, by_stamp, kept = add.delay(1, 1), stamped(add.si(2, 2), "a").delay(), add.delay(3, 3)
    assert add.apply_async((4, 4), queue="more").get(timeout=30) == 8
    # What this worker alone was told: the database knows nothing of it.
    node("revoke", task_id=[alone.id])
    node("revoke_by_stamped_headers", headers={"mark": ["a"]})
    assert node("add_consumer", queue="shop") == {"ok": "add consumer shop"}
    assert kept.get(timeout=30) == 6
    for result in (alone, by_stamp):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        assert ends(queue, result.id) == [("cancelled", "revoked")]

    # A task is terminated; its chord hears of it, and the worker goes on.
    assert list(node("revoke", task_id=["unknown"], terminate=True)) == ["ok"]
    part = uuid4().hex
    body = chord([slow.si("part", 600).set(task_id=part)])(shop.app.total.s())
    shop.wait_for_note("start part")
    (child,) = node("stats")["pool"]["processes"]
    assert list(node("revoke", task_id=[part], terminate=True, signal="SIGUSR1")) == ["error"]
    assert [task["id"] for task in node("active")] == [part]
    control.terminate(part)
    with pytest.raises((ChordError, TaskRevokedError)):
        body.get(timeout=30)
    with pytest.raises(TaskRevokedError, match="terminated"):
        slow.AsyncResult(part).get(timeout=30)
    assert ends(queue, part) == [("cancelled", "revoked")]
    assert add.delay(5, 5).get(timeout=30) == 10
    assert node("stats")["pool"]["processes"] != [child]
    assert "end part" not in shop.notes

    # Limits of later tasks.
    assert node("time_limit", task_name="shop.slow", soft=0.2, hard=None) == {"ok": "time limits set successfully"}
    with pytest.raises(SoftTimeLimitExceeded):
        slow.delay("soft", 600).get(timeout=30)
    node("time_limit", task_name="shop.slow", soft=None, hard=0.2)
    with pytest.raises(TimeLimitExceeded, match=r"0\.2"):
        slow.delay("hard", 600).get(timeout=30)

    # It ends cleanly: what runs may end.
    node("time_limit", task_name="shop.slow", soft=None, hard=None)
    slow.delay("last", 0.5)
    shop.wait_for_note("start last")
    control.shutdown(destination=[NODE])
    log = shop.ended(process)
    assert "stops (remote control)" in log
    assert shop.notes[-1] == "end last"
    assert control.ping(timeout=0.5) == []


def test_its_slots_become_more_and_fewer(make_project: Callable[..., Project], tmp_path: Path) -> None:
    """What runs may end; idle children leave at once."""
    project = make_project()
    project.worker(size=1)

    def ask(command: str, **arguments: Any) -> Any:
        (answer,) = project.app.control.broadcast(command, arguments=arguments, reply=True, timeout=20, limit=1)
        return answer[NAME]

    def children() -> set[int]:
        return set(ask("stats")["pool"]["processes"])

    def hold(*names: str) -> None:
        for name in names:
            project.send("held", name, str(tmp_path / name))

    def begun() -> set[str]:
        return {note.split()[1] for note in project.notes if note.startswith("start ")}

    def end(*names: str) -> None:
        for name in names:
            (tmp_path / name).touch()
            project.wait_for_note(f"end {name}")

    hold("a", "b", "c")
    wait_for(lambda: begun() == {"a"}, 30)
    assert ask("pool_grow", n=2) == {"ok": "pool will grow"}
    wait_for(lambda: begun() == {"a", "b", "c"}, 30, "the new slots take nothing")
    assert ask("stats")["pool"]["max-concurrency"] == 3
    assert ask("pool_shrink", n=2) == {"ok": "pool will shrink"}
    hold("d")
    end("a", "b")
    wait_for(lambda: len(children()) == 1, 30, "children that are too many do not leave")
    assert begun() == {"a", "b", "c"}
    # None of those that work is told to leave before its job has ended: they may be wanted again.
    ask("pool_grow", n=1)
    wait_for(lambda: "d" in begun(), 30)
    two = children()
    ask("pool_shrink", n=1)
    ask("pool_grow", n=1)
    end("c", "d")
    project.idle()
    assert children() == two
    ask("pool_shrink", n=1)
    wait_for(lambda: len(children()) == 1, 30)
    assert children() < two
    assert project.value("add", 1, 1) == 2
    (last,) = children()
    project.stop(project.workers[0])
    ended = [note for note in project.notes if note.startswith("signal worker_process_shutdown")]
    assert len(ended) == len(set(ended)) == 4
    assert ended[-1] == f"signal worker_process_shutdown {last} 0"


@pytest.mark.soak
@pytest.mark.req("C1", "C11")
def test_flower_and_a_celery_worker_beside_it(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    """Flower sees both kinds and revokes a task of each; a worker that looks for others at its start finds ours, and no errors."""
    need_package("flower")
    shop = make_shop(backend=broker_url)
    ours = start(shop, "-E", "-Q", "ours")
    theirs = shop.celery("worker", "-n", "w1@shop", "-c", "1", "-E", "-l", "INFO", "-Q", "theirs")
    wait_for(lambda: "w1@shop ready" in shop.log(theirs), 60, "the other worker did not become ready")
    assert "sync with 1 nodes" in shop.log(theirs)
    assert "sync complete" in shop.log(theirs)
    flower = Flower(shop)
    wait_for(lambda: set(flower.ask("/api/workers?refresh=1") or {}) == {NODE, "w1@shop"}, 60, "Flower sees not both")
    assert flower.worker()["stats"]["pool"]["max-concurrency"] == 1

    tasks = {name: shop.app.slow.apply_async((name, 600), queue=name) for name in ("ours", "theirs")}
    done = shop.app.add.apply_async((1, 1), queue="ours")  # behind it
    for name, task in tasks.items():
        shop.wait_for_note(f"start {name}")
        wait_for(lambda task=task: flower.states().get(task.id) == "STARTED", 30, "Flower does not see the tasks")  # type: ignore[misc]
        flower.ask(f"/api/task/revoke/{task.id}", {"terminate": "true", "signal": "SIGKILL"})
    wait_for(lambda: {flower.states().get(task.id) for task in tasks.values()} == {"REVOKED"}, 30, "not revoked")
    assert done.get(timeout=30) == 2
    wait_for(lambda: flower.states().get(done.id) == "SUCCESS", 30, "Flower does not see the task")
    assert flower.ask(f"/api/task/info/{done.id}")["worker"] == NODE
    for task in tasks.values():
        with pytest.raises(TaskRevokedError):
            task.get(timeout=30)

    assert "2 nodes online" in shop.ended(shop.celery("status", "-t", "5"))
    stats, queues = answers(shop, "inspect stats", "inspect active_queues")
    assert stats[NODE]["total"] == {"shop.slow": 1, "shop.add": 1}
    assert [found["name"] for found in queues[NODE]] == ["ours"]
    (refused,) = answers(shop, "control rate_limit shop.add 77/m")
    assert list(refused[0][NODE]) == ["error"]
    flower.ask(f"/api/worker/pool/grow/{NODE}", {"n": "1"})
    flower.ask(f"/api/worker/pool/shrink/{NODE}", {"n": "1"})
    flower.ask(f"/api/worker/pool/grow/{NODE}", {"n": "1"})
    assert Node(shop)("stats")["pool"]["max-concurrency"] == 2
    flower.ask(f"/api/worker/queue/add-consumer/{NODE}", {"queue": "third"})
    assert {found["name"] for found in Node(shop)("active_queues")} == {"ours", "third"}
    flower.ask(f"/api/worker/shutdown/{NODE}", {})
    shop.ended(ours)
    wait_for(lambda: flower.ask("/api/workers?status=1").get(NODE) is False, 30, "Flower does not see that it has gone")
    for process in (theirs, flower.process):
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert "Traceback" not in shop.log(process), shop.log(process)
    assert " ERROR" not in shop.log(theirs), shop.log(theirs)


@pytest.mark.soak
def test_two_of_the_same_name_are_told(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    command = ("-m", "dbqueue", "worker", "-A", "shop", "-c", "1", "-n", NODE)
    first = shop.python(*command)
    wait_for(lambda: shop.app.app.control.ping([NODE], timeout=1), 60)
    second = shop.python(*command)
    wait_for(lambda: "already using this process mailbox" in shop.log(second), 60, shop.log(second))
    assert "already using" not in shop.log(first)
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
        shop.ended(process)
    third = start(shop)  # both have left the mailbox
    assert "already using" not in shop.log(third)


@pytest.mark.soak
def test_without_a_name_it_is_dbqueue_at_the_host(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    shop.python("-W", "ignore", "-m", "dbqueue", "worker", "-A", "shop", "-c", "1")
    name = f"dbqueue@{socket.gethostname()}"
    wait_for(lambda: shop.app.app.control.ping([name], timeout=1), 60, "it has another name")


@pytest.mark.soak
def test_workers_of_one_command_have_names_of_their_own(make_shop: MakeShop, queue: DBQueue) -> None:
    shop = make_shop()
    both = shop.python("-m", "dbqueue", "worker", "-A", "shop", "-c", "1", "-n", "w@shop", "--processes", "2")
    ping = shop.app.app.control.ping
    wait_for(lambda: {name for answer in ping(timeout=1) for name in answer} == {"w@shop", "w-2@shop"}, 60)
    assert "already using" not in shop.log(both)
    both.send_signal(signal.SIGTERM)
    shop.ended(both)


@pytest.mark.soak
def test_tasks_in_threads_are_seen_and_cannot_be_killed(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    shop = make_shop(backend=broker_url)
    process = start(shop, "-P", "threads", "-E", size=2)
    node = Node(shop)
    running = shop.app.slow.delay("long", 3)
    shop.wait_for_note("start long")
    (active,) = node("active")
    assert (active["id"], active["worker_pid"]) == (running.id, process.pid)
    assert list(node("revoke", task_id=[running.id], terminate=True)) == ["error"]
    assert node("stats")["pool"]["processes"] == [process.pid]
    assert shop.app.add.delay(1, 1).get(timeout=30) == 2
    running.get(timeout=30)
    assert node("active") == []
    assert node("pool_grow", n=1) == {"ok": "pool will grow"}
    names = ["t1", "t2", "t3"]
    slow = [shop.app.slow.delay(name, 3) for name in names]
    for name in names:
        shop.wait_for_note(f"start {name}")
    assert not any(f"end {name}" in shop.notes for name in names)
    assert node("pool_shrink", n=2) == {"ok": "pool will shrink"}
    for result in slow:
        result.get(timeout=30)
    assert shop.app.add.delay(2, 2).get(timeout=30) == 4
    assert node("stats")["pool"]["max-concurrency"] == 1


@pytest.mark.soak
def test_remote_control_can_be_switched_off(make_shop: MakeShop, queue: DBQueue, broker_url: str) -> None:
    shop = make_shop(backend=broker_url, more="app.conf.worker_enable_remote_control = False")
    shop.python("-W", "ignore", "-m", "dbqueue", "worker", "-A", "shop", "-c", "1")
    assert shop.app.add.delay(1, 1).get(timeout=60) == 2
    assert shop.app.app.control.ping(timeout=2) == []


@pytest.mark.soak
@pytest.mark.databases("postgres")
def test_it_is_heard_again_after_the_server_was_away(
    make_shop: MakeShop, queue: DBQueue, broker_url: str, postgres: Server
) -> None:
    shop = make_shop(backend=broker_url)
    process = start(shop, "-E")
    postgres.stop("immediate")
    wait_for(lambda: "remote control is interrupted" in shop.log(process) or "trying again" in shop.log(process), 60)
    postgres.start()
    wait_for(lambda: shop.app.app.control.ping([NODE], timeout=1), 60, "it does not answer any more")
    with monitored(shop) as monitor:
        done = shop.app.add.delay(1, 1)
        monitor.wait_for("task-succeeded", 60, uuid=done.id)
    assert process.poll() is None
