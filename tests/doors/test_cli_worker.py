"""`dbqueue worker`: what its options say to the worker, and what becomes of its log."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbqueue import DBQueue
from dbqueue.runtime import worker as runtime
from dbqueue.runtime.worker import WorkerOptions
from tests.doors.conftest import Answer, Run

APP = """
from dbqueue import DBQueue
queue = DBQueue("{url}")

@queue.job(max_attempts=1, timeout=5)
def hello() -> None:
    print("hello from a job", flush=True)

@queue.job(max_attempts=1, timeout=5)
def broken() -> None:
    raise ValueError("p4ssw0rd")
"""


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dbqueue")
    level = root.level
    yield
    root.level, ours.level = level, logging.NOTSET


@pytest.fixture
def bare(cli: Run) -> Run:
    """Runs a command in a process whose root logger has no handler yet: pytest's own are taken away for that long."""
    root = logging.getLogger()

    def run(*args: object, stdin: str = "") -> Answer:
        before, root.handlers[:] = root.handlers[:], []
        try:
            return cli(*args, stdin=stdin)
        finally:
            root.handlers[:] = before

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerOptions]:
    """The options that would be run; nothing is."""
    Path("shop.py").write_text(APP.format(url="sqlite:///a.db"))
    seen: list[WorkerOptions] = []

    def run_worker(queue: DBQueue, options: WorkerOptions) -> int:
        assert set(queue.targets) == {"shop.hello", "shop.broken"}
        seen.append(options)
        return 75

    monkeypatch.setattr(runtime, "run_worker", run_worker)
    return seen


def test_defaults(cli: Run, started: list[WorkerOptions]) -> None:
    assert cli("worker", "-A", "shop") == (75, "", "")
    assert cli("-A", "shop:queue", "worker").code == 75
    assert started == [WorkerOptions(None, None, None, None, False, None, 30.0)] * 2
    assert logging.getLogger("dbqueue").level == logging.INFO


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["-Q", "mail, default,mail"], "queues", ("mail", "default")),
        (["--queues=mail"], "queues", ("mail",)),
        (["-c", "8"], "slots", 8),
        (["--concurrency=1"], "slots", 1),
        (["--lease", "2.5"], "lease", 2.5),
        (["-n", "mail"], "name", "mail"),
        (["--hostname", "w%%@%h.%n.%d"], "name", "w%@box.example.org.box.example.org"),
        (["--once"], "once", True),
        (["--max-jobs", "9"], "max_jobs", 9),
        (["--shutdown", "0"], "shutdown", 0),
        (["-P", "threads"], "slots", None),
        (["--pool=threads"], "slots", None),
    ],
)
def test_options(
    cli: Run, started: list[WorkerOptions], words: list[str], field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box.example.org")
    assert cli("worker", "-A", "shop", *words).code == 75
    assert getattr(started[0], field) == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-P", "gevent"], "'gevent' is not one of 'threads', 'processes', 'prefork'"),
        (["--max-jobs-per-child", "5"], "need child processes: -P processes"),
        (["-P", "processes", "--max-memory-per-child", "0"], "--max-memory-per-child"),
        (["--processes", "0"], "--processes"),
        (["-Q", ""], "queue name"),
        (["-Q", "a,,b"], "queue name"),
        (["-Q", "dbqueue.x"], "keeps for itself"),
        (["-c", "0"], "--concurrency"),
        (["-c", "many"], "--concurrency"),
        (["--lease", "0"], "--lease"),
        (["--lease", "nan"], "--lease"),
        (["-n", "%x"], "%h (host)"),
        (["-n", "50%"], "%h (host)"),
        (["-n", ""], "worker name"),
        (["-l", "loud"], "--loglevel"),
        (["--max-jobs", "0"], "--max-jobs"),
        (["--shutdown", "-1"], "--shutdown"),
        (["--autoscale", "1,2"], "--autoscale"),
    ],
)
def test_wrong_options(cli: Run, started: list[WorkerOptions], words: list[str], told: str) -> None:
    code, out, err = cli("worker", "-A", "shop", *words)
    assert (code, out, started) == (2, "", [])
    assert told in err
    assert err.count("\n") == 1


def test_a_worker_needs_an_app(cli: Run) -> None:
    for words in ([], ["--url", "sqlite:///a.db"]):
        code, _, err = cli("worker", *words)
        assert code == 2
        assert "a worker needs -A, the module that declares its jobs, or --outbox" in err


# -- outboxes ----------------------------------------------------------------------------------------------------------

MAIL = """
import sys
def deliver(message):
    print(message.payload, message.attempt, flush=True)
class Client:
    def send(self, message): ...
client = Client()
number = 7
"""


@pytest.fixture
def mail() -> None:
    Path("shop_mail.py").write_text(MAIL)


@pytest.mark.req("A6")
def test_outboxes(cli: Run, started: list[WorkerOptions], mail: None) -> None:
    more = ["--outbox", "a b=shop_mail:deliver", "--outbox=letters=shop_mail:client.send", "-P", "processes"]
    assert cli("worker", "-A", "shop:queue", "-Q", "mail", "-c", "3", *more).code == 75
    options = started[0]
    named = [(o.outbox, o.module, o.attribute) for o in options.outboxes]
    assert named == [("a b", "shop_mail", "deliver"), ("letters", "shop_mail", "client.send")]
    assert options.child is not None
    assert options.child.imports == ("shop", "shop_mail")
    assert (options.queues, options.slots) == (("mail",), 3)


@pytest.mark.req("A6")
def test_outboxes_alone(process: Run, queue: DBQueue, database_url: str, mail: None) -> None:
    queue.outbox("receipts").enqueue("hello")
    code, out, err = process(
        "worker", "--outbox", "receipts=shop_mail:deliver", "--url", database_url, "--once", "-c", "1"
    )
    assert (code, out) == (0, "hello 1\n"), err
    assert queue.counts() == {"acked": 1}


@pytest.mark.req("A6")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("receipts", "write name=module:callable; 'receipts' has no callable"),
        ("receipts=", "write name=module:callable; 'receipts' has no callable"),
        ("=shop_mail:deliver", "outbox name must have 1 to 200 characters"),
        ("dbqueue.x=shop_mail:deliver", "keeps for itself"),
        (f"{'x' * 186}=shop_mail:deliver", "outbox name must have 1 to 185 characters"),
        ("receipts=shop_mail", "receipts: write module:callable, as in shop.mail:send"),
        ("receipts=shop_mail:", "receipts: write module:callable"),
        ("receipts=shop_mail:deliver()", "receipts: write module:callable"),
        ("receipts=shop_mail:send", "receipts: shop_mail has no attribute 'send'"),
        ("receipts=shop_mail:number", "receipts: shop_mail:number cannot be called, its type is int"),
        ("receipts=shop:hello", "receipts: deliver must be a plain callable that takes an OutboxMessage; got Target"),
        ("receipts=shop_post:send", "receipts: there is no module 'shop_post'"),
        ("receipts=shop_mail.py:deliver", "a module is asked for and not its file: write shop_mail"),
        ("receipts=shop_broken:x", "--outbox receipts: importing shop_broken failed: ZeroDivisionError"),
    ],
)
def test_wrong_outboxes(cli: Run, started: list[WorkerOptions], mail: None, value: str, told: str) -> None:
    Path("shop_broken.py").write_text("1 / 0\n")
    code, out, err = cli("worker", "-A", "shop", "--outbox", value)
    assert (code, out, started) == (2, "", [])
    assert "--outbox" in err
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.req("A6")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-A", "shop", "--url", "sqlite:///a.db"], "give -A or --url, not both"),
        (["--url", "sqlite:///a.db", "-Q", "mail"], "-Q needs -A"),
        (["--url", "sqlite:///a.db", "--outbox", "receipts=shop_mail:deliver"], "outbox 'receipts' is named twice"),
        ([], "no database is named"),
    ],
)
def test_outboxes_with_options_that_do_not_go_together(
    cli: Run, started: list[WorkerOptions], mail: None, words: list[str], told: str
) -> None:
    code, out, err = cli("worker", "--outbox", "receipts=shop_mail:deliver", *words)
    assert (code, out, started) == (2, "", [])
    assert told in err


@pytest.mark.parametrize("level", ["debug", "WARNING", "Fatal"])
def test_levels(cli: Run, started: list[WorkerOptions], level: str) -> None:
    cli("worker", "-A", "shop", "-l", level)
    assert logging.getLogger("dbqueue").level == getattr(logging, level.upper())


def test_an_application_that_logs_already_keeps_its_handlers(cli: Run, started: list[WorkerOptions]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    assert handlers, "pytest's own"
    cli("worker", "-A", "shop", "-l", "debug")
    assert (root.handlers, root.level) == (handlers, level)
    assert logging.getLogger("dbqueue").level == logging.DEBUG


def test_json_log_lines(bare: Run, started: list[WorkerOptions], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_worker(*_: Any) -> int:
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("dbqueue.jobs").exception("job %s\nfailed", 7, extra={"worker": "w"})
        return 0

    monkeypatch.setattr(runtime, "run_worker", run_worker)
    code, out, err = bare("worker", "-A", "shop", "--log-format", "json")
    line = json.loads(err)
    assert (code, out) == (0, "")
    assert line.pop("time").endswith("Z")
    assert line.pop("exception").endswith("ValueError: x")
    assert line == {"level": "ERROR", "logger": "dbqueue.jobs", "message": "job 7\nfailed", "worker": "w"}


@pytest.mark.req("D17")
def test_a_queue_that_nobody_fills_is_told(process: Run, database_url: str, queue: DBQueue) -> None:
    """Its name is misspelt, as a rule, and the worker would wait for ever without a word."""
    Path("shop.py").write_text(APP.format(url=database_url))
    queue.send("theirs", 1, delay=3_600)
    warning = "-Q defualt,other: no target of this code sends there, and no unfinished job is there; its targets send to default"
    for names, told in (("defualt,default,theirs,other", [warning]), ("default,theirs", [])):
        code, _, err = process("worker", "-A", "shop", "--once", "-Q", names)
        assert code == 0, err
        assert [line.partition(" dbqueue: ")[2] for line in err.splitlines() if " WARNING " in line] == told


def test_a_worker_process_runs_what_is_due(process: Run, database_url: str, queue: DBQueue) -> None:
    Path("shop.py").write_text(APP.format(url=database_url))
    run = DBQueue(database_url)

    @run.job(max_attempts=1, timeout=5, name="shop.hello")
    def hello() -> None: ...

    job_id = hello.enqueue().id
    code, out, err = process("worker", "-A", "shop", "--once", "-c", "1", "-n", "w@%h")
    assert (code, out) == (0, "hello from a job\n"), err
    record = queue.get_job(job_id)
    assert record is not None
    assert record.state == "succeeded"
    assert record.worker is not None
    assert record.worker.startswith(f"w@{socket.gethostname()}")
    assert "Z INFO dbqueue: worker w@" in err
    run.close()
