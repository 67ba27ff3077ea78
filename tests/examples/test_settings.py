"""What Celery's settings do on dbqueue: a test for each row of the table in docs/celery.md that no other test proves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import celery
import kombu
import pytest
from celery import Celery
from celery.utils.nodenames import worker_direct

import dbqueue
from dbqueue import DBQueue
from dbqueue.celery_backend import options as results_options
from dbqueue.kombu_transport import options
from tests.examples import configured
from tests.servers import Server
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "celery.md"
TASK = "tests.examples.configured"

pytestmark = [pytest.mark.req("C1"), pytest.mark.timeout(180)]


class Configured:
    """A Celery app with the given settings, its workers, and what its tasks noted."""

    def __init__(self, url: str, folder: Path, settings: dict[str, Any]) -> None:
        self.queue, self.folder = DBQueue(url), folder
        self.queue.migrate()
        self.notes_file = folder / "notes"
        self.notes_file.touch()
        broker = f"dbqueue+{url}"
        self.app: Celery = configured.make(broker, self.notes_file, **settings)
        given = {"broker": broker, "notes": str(self.notes_file), "settings": settings}
        self.environment = {**os.environ, "CONFIGURED": json.dumps(given), "PYTHONPATH": str(ROOT)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def send(self, task: str, *arguments: Any, **options: Any) -> Any:
        return self.app.tasks[f"{TASK}.{task}"].apply_async(arguments, **options)

    def worker(self, *arguments: str, size: int = 1, wait: bool = True, **environment: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"log{len(self.processes)}"
        name = f"w{len(self.processes)}@shop"
        command = [sys.executable, "-m", "celery", "-A", TASK, "worker", "-c", str(size), "-n", name, "-l", "INFO"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--without-mingle", *arguments],
                cwd=ROOT, env=self.environment | environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        if wait:
            self.wait_for_log(process, " ready.")
        return process

    def send_control(self, command: str) -> list[Any]:
        """The answers of all workers."""
        size = len(self.processes)
        answers = self.app.control.broadcast(command, reply=True, limit=size, timeout=20)
        return [answer for one in answers for answer in one.values()]

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"log{self.processes.index(process)}").read_text(errors="replace")

    def wait_for_log(self, process: subprocess.Popen[bytes], text: str, seconds: float = 60) -> None:
        def said() -> bool:
            log = self.log(process)
            assert process.poll() is None or text in log, log
            return text in log

        wait_for(said, seconds, f"the worker does not say {text!r}")

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines()

    def wait_for_note(self, start: str, times: int = 1) -> str:
        def found() -> list[str]:
            return [note for note in self.notes if note.startswith(start)]

        wait_for(lambda: len(found()) >= times, 60, f"{start!r} was not noted {times} times")
        return found()[-1]

    def wait_for_counts(self, **counts: int) -> None:
        wait_for(lambda: self.queue.counts("celery") == counts, 60, f"{self.queue.counts('celery')}, not {counts}")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.app.close()
        self.queue.close()


Make = Callable[..., Configured]


@pytest.fixture
def make(database_url: str, tmp_path: Path) -> Iterator[Make]:
    made: list[Configured] = []

    def configure(**settings: Any) -> Configured:
        folder = tmp_path / f"app{len(made)}"
        folder.mkdir()
        made.append(Configured(database_url, folder, settings))
        return made[-1]

    yield configure
    for one in made:
        one.close()


# -- acknowledging -----------------------------------------------------------------------------------------------------


@pytest.mark.req("C4")
def test_an_early_ack_is_lost_with_its_worker(make: Make) -> None:
    shop = make(broker_transport_options={"lease": 1})
    worker = shop.worker()
    shop.send("slow", "a", 600)
    shop.wait_for_note("start a")
    shop.wait_for_counts(acked=1)
    os.killpg(worker.pid, signal.SIGKILL)


@pytest.mark.req("C4")
@pytest.mark.parametrize("requeued", [False, True], ids=["acked", "requeued"])
def test_a_killed_childs_late_task(make: Make, requeued: bool) -> None:
    """Celery acknowledges it as failed, or with reject_on_worker_lost puts it back, and then it comes at once."""
    shop = make(task_acks_late=True, task_reject_on_worker_lost=requeued, broker_transport_options={"lease": 600})
    shop.worker()
    shop.send("slow", "a", 5 if requeued else 600)
    os.kill(int(shop.wait_for_note("start a").split()[-1]), signal.SIGKILL)
    if requeued:
        shop.wait_for_note("start a", 2)
        shop.wait_for_note("end a")
    shop.wait_for_counts(acked=1)
    (record,) = shop.queue.jobs(queue="celery")
    assert (record.attempt, record.lapses) == (2 if requeued else 1, 0)


def test_a_failure_that_is_not_acked_is_kept_as_dead(make: Make) -> None:
    shop = make(task_acks_late=True, task_acks_on_failure_or_timeout=False)
    shop.worker()
    shop.send("fail", "a")
    shop.wait_for_counts(dead=1)
    assert shop.notes == ["fail a"]


def test_a_task_that_was_done_is_not_repeated(make: Make, tmp_path: Path) -> None:
    """Its worker died between the result and the ack; the redelivered message says so, and Celery looks at the result."""
    results = tmp_path / "results"
    results.mkdir()
    shop = make(
        task_acks_late=True, worker_deduplicate_successful_tasks=True, result_backend=f"file://{results}", task_ignore_result=False,
    )  # fmt: skip
    done, other = shop.send("add", "done"), shop.send("add", "other")
    with shop.app.connection_for_read() as connection:
        channel = connection.channel()
        for _ in range(2):
            channel.basic_reject(channel.basic_get("celery").delivery_tag, requeue=True)
    shop.app.backend.store_result(done.id, None, "SUCCESS")
    shop.worker()
    shop.wait_for_counts(acked=2)
    assert shop.notes == ["add other"], other.id


# -- prefetching -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disable", [False, True], ids=["", "disable_prefetch"])
def test_prefetch_is_concurrency_times_multiplier(make: Make, disable: bool) -> None:
    """worker_disable_prefetch is for Redis only; Celery says that it ignores it."""
    shop = make(task_acks_late=True, worker_prefetch_multiplier=3, worker_disable_prefetch=disable)
    for n in range(8):
        shop.send("slow", n, 600)
    worker = shop.worker()
    shop.wait_for_note("start")
    shop.wait_for_counts(running=3, pending=5)
    assert ("Ignoring disable_prefetch" in shop.log(worker)) is disable


@pytest.mark.req("C3")
def test_eta_tasks_in_a_worker_are_limited(make: Make) -> None:
    shop = make(worker_eta_task_limit=2, worker_prefetch_multiplier=1, broker_transport_options={"eta_lead": 60})
    for n in range(5):
        shop.send("add", n, countdown=600 if n == 4 else 30)
    shop.worker()
    shop.wait_for_counts(running=2, pending=3)


@pytest.mark.req("C3")
def test_priorities_decide_among_waiting_tasks(make: Make) -> None:
    shop = make(task_acks_late=True, worker_prefetch_multiplier=1, task_default_priority=3, task_queue_max_priority=9)
    for name, given in {
        "low": {"priority": 0},
        "high": {"priority": 9},
        "default": {},
        "four": {"priority": 4},
    }.items():
        shop.send("add", name, **given)
    shop.worker()
    shop.wait_for_counts(acked=4)
    assert shop.notes == ["add high", "add four", "add default", "add low"]


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("C4")
@pytest.mark.skipif(celery.VERSION < (5, 5), reason="before 5.5 Celery acknowledged what a cold shutdown interrupts")
@pytest.mark.parametrize("soft", [0, 1], ids=["cold", "soft"])
def test_a_quick_shutdown_gives_its_tasks_back_at_once(make: Make, soft: int) -> None:
    """The lease here is longer than the test."""
    shop = make(task_acks_late=True, worker_soft_shutdown_timeout=soft, broker_transport_options={"lease": 600})
    worker = shop.worker()
    shop.send("slow", "a", 600)
    shop.send("add", "b")
    # The task may run before the worker's main process has heard so, and then Celery has nothing to cancel and waits for it.
    wait_for(lambda: shop.send_control("active")[0], 60, "the worker knows of no active task")
    worker.send_signal(signal.SIGQUIT)
    worker.wait(60)
    shop.wait_for_counts(pending=2)


# -- connections -------------------------------------------------------------------------------------------------------


def test_what_has_no_meaning_here_changes_nothing(make: Make) -> None:
    """Settings of RabbitMQ and Redis that an app brings along, all at once: its tasks run, and a far ETA waits in the database."""
    shop = make(
        broker_heartbeat=10, broker_heartbeat_checkrate=2, broker_login_method="PLAIN", worker_detect_quorum_queues=True,
        broker_native_delayed_delivery_queue_type="quorum", task_default_queue_type="quorum", task_create_missing_queue_type="quorum",
        broker_transport_options={
            "visibility_timeout": 3600, "priority_steps": [0, 3, 6, 9], "fanout_prefix": True, "confirm_publish": True,
            "socket_keepalive": True, "global_keyprefix": "shop",
        },
    )  # fmt: skip
    worker = shop.worker()
    shop.send("add", "now")
    shop.send("add", "later", countdown=3600)
    shop.wait_for_note("add now")
    shop.wait_for_counts(acked=1, pending=1)
    assert not re.search("Traceback|ERROR|has no effect", shop.log(worker))
    with shop.app.connection_for_read() as connection:
        assert connection.get_heartbeat_interval() == 0


@pytest.mark.parametrize("limit", [None, 0, 1, 10])
def test_any_pool_limit_publishes_from_many_threads(make: Make, limit: int | None) -> None:
    shop = make(broker_pool_limit=limit)
    threads = [threading.Thread(target=shop.send, args=("add", n)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shop.queue.counts("celery") == {"pending": 20}


def test_urls_for_reading_and_writing(make: Make, database_url: str) -> None:
    url = f"dbqueue+{database_url}"
    shop = make(broker_url=None, broker_read_url=url, broker_write_url=url)
    shop.send("add", "a")
    with shop.app.connection_for_read() as connection:
        message = connection.channel().basic_get("celery", no_ack=True)
    assert message.headers["task"] == f"{TASK}.add"


def test_a_broker_in_pieces_is_refused(make: Make) -> None:
    shop = make(broker_url=None, broker_transport="dbqueue", broker_host="db", broker_user="shop", broker_vhost="shop")
    with pytest.raises(dbqueue.ConfigError, match="must name the database"):
        shop.send("add", "a")


@pytest.mark.databases("postgres")
def test_a_server_that_does_not_answer_is_given_up(make: Make, database_url: str) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        host = re.sub(r"@[^/]+/", f"@127.0.0.1:{deaf.getsockname()[1]}/", database_url)
        assert host != database_url
        app = Celery("shop", broker=f"dbqueue+{host}", set_as_current=False)
        app.conf.broker_connection_timeout = 2
        began = time.monotonic()
        with app.connection_for_write() as connection, pytest.raises(kombu.exceptions.OperationalError):
            connection.ensure_connection(max_retries=1, interval_start=0)
        assert time.monotonic() - began < 20
        app.close()


@pytest.mark.databases("postgres")
def test_a_worker_waits_for_a_database_that_is_down(make: Make, postgres: Server) -> None:
    shop = make(broker_connection_retry_on_startup=True, broker_connection_max_retries=None)
    postgres.stop()
    worker = shop.worker(wait=False)
    shop.wait_for_log(worker, "Trying again")
    postgres.start()
    shop.wait_for_log(worker, " ready.")
    shop.send("add", "a")
    shop.wait_for_note("add a")


@pytest.mark.databases("postgres")
def test_publishing_is_tried_again_on_a_lost_connection(make: Make, postgres: Server, database_url: str) -> None:
    shop = make()
    shop.send("add", "a")
    shop.queue.close()  # its own pooled connection is not what this is about
    postgres.restart()
    shop.send("add", "b")
    with closing(DBQueue(database_url)) as queue:
        assert queue.counts("celery") == {"pending": 2}


@pytest.mark.req("C4")
@pytest.mark.databases("postgres")
@pytest.mark.parametrize("cancel", [False, True], ids=["runs on", "cancelled"])
def test_an_outage_longer_than_the_lease(make: Make, postgres: Server, cancel: bool) -> None:
    """Celery is told that its connection was lost. What it has not begun comes again; what runs runs on, unless it is to be
    cancelled then."""
    shop = make(
        task_acks_late=True, worker_cancel_long_running_tasks_on_connection_loss=cancel, worker_prefetch_multiplier=2,
        broker_connection_retry_on_startup=True, broker_transport_options={"lease": 1},
    )  # fmt: skip
    worker = shop.worker()
    shop.send("slow", "a", 6)
    shop.send("add", "b")
    shop.wait_for_note("start a")
    shop.wait_for_counts(running=2)
    postgres.stop()
    shop.wait_for_log(worker, "Connection to broker lost")
    postgres.start()
    shop.wait_for_note("end a")
    shop.wait_for_note("add b")
    shop.wait_for_counts(acked=2)
    log = shop.log(worker)
    assert ("Terminating it instead" in log) is cancel, log
    assert "Skipping prefetch count reduction" in log
    if cancel:
        assert [note.split()[0] for note in shop.notes if " a" in note] == ["start", "start", "end"]


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_transient_task_is_as_durable_as_others(make: Make) -> None:
    shop = make(task_default_delivery_mode=1)
    shop.send("add", "a")
    assert shop.queue.counts("celery") == {"pending": 1}
    shop.worker()
    shop.wait_for_note("add a")


@pytest.mark.req("C5")
def test_eager_tasks_touch_no_broker(make: Make, database_url: str) -> None:
    import sqlalchemy
    from sqlalchemy.orm import Session

    shop = make(task_always_eager=True)
    engine = sqlalchemy.create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, dbqueue.using(session):
        shop.send("add", "a")
    engine.dispose()
    assert (shop.notes, shop.queue.counts()) == (["add a"], {})


def test_one_worker_and_all_workers_can_be_addressed(make: Make) -> None:
    shop = make(worker_direct=True, broadcast="everyone")
    workers = [shop.worker() for _ in range(2)]
    shop.send("add", "all", queue="everyone")
    shop.wait_for_note("add all", 2)
    for _ in range(3):
        shop.send("add", "second", queue=worker_direct("w1@shop"))
    shop.wait_for_note("add second", 3)
    assert [shop.log(worker).count("received") for worker in workers] == [1, 4]


# -- the page ----------------------------------------------------------------------------------------------------------


# What Celery does with a result before or after its backend has it.
NOT_OURS = {
    "result_cache_max",
    "result_chord_join_timeout",
    "result_chord_retry_interval",
    "result_chord_max_ttl",
    "result_chord_expires",
}


def settings_table() -> list[list[str]]:
    page = DOCUMENT.read_text(encoding="utf-8")
    section = re.search(r"^## Celery's settings\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_names_tests_that_exist() -> None:
    rows = settings_table()
    assert len(rows) > 20
    for setting, _, proofs in rows:
        names = re.findall(r"`([^`]+)`", proofs)
        assert names, f"no test is named for {setting}"
        for name in names:
            file, _, test = name.partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"def {test}\(", text), f"{name} of {setting} does not exist"


def test_every_option_has_a_row() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    section = re.search(r"^## Options\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("| `")]
    told = {name for line in lines for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])}
    assert told == set(options._OWN)


def test_every_option_of_results_is_told() -> None:
    section = re.search(r"^## Results\n(.*?)(?=^## )", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert section is not None
    assert set(re.findall(r"`([a-z_]+)`", section[1])) >= results_options._OWN


def test_every_setting_of_the_broker_has_a_row() -> None:
    from celery.app.defaults import DEFAULTS

    told = {name for row in settings_table() for name in re.findall(r"`([a-z_]+)`", row[0])}
    of_all_results = {name for name in DEFAULTS if name.startswith("result_")} - NOT_OURS
    wanted = of_all_results | {name for name in DEFAULTS if name.startswith(("beat_", "broker_"))} | {
        "task_acks_late", "task_acks_on_failure_or_timeout", "task_reject_on_worker_lost", "worker_deduplicate_successful_tasks",
        "worker_disable_prefetch", "worker_prefetch_multiplier", "worker_eta_task_limit", "worker_detect_quorum_queues",
        "worker_cancel_long_running_tasks_on_connection_loss", "worker_enable_prefetch_count_reduction", "worker_soft_shutdown_timeout",
        "task_default_queue_type", "task_default_priority", "task_queue_max_priority", "task_default_delivery_mode",
        "task_publish_retry", "task_publish_retry_policy", "task_always_eager", "worker_enable_remote_control", "worker_send_task_events",
    }  # fmt: skip
    unknown = {
        name
        for name in told
        if name not in DEFAULTS
        and not name.startswith("dbqueue_beat_")
        and name
        not in ("visibility_timeout", "priority_steps", "expires", "add_periodic_task", "result_backend_thread_safe")
    }
    assert wanted <= told
    if celery.VERSION >= (5, 7):  # older ones do not know them all
        assert unknown == set()
