"""What other programs do with a Celery broker: Flower, the `celery` command's clients, OpenTelemetry's instrumentation, Sentry's client.
All of them are started as their users start them, unchanged (C1, C11)."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import signal
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest

from dbqueue import DBQueue
from tests.conformance import upstream
from tests.transport.shops import Shop, need_package
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

MakeShop = Callable[..., Shop]

WORKER = "w0@shop"


class Flower:
    """A Flower process and its REST interface."""

    def __init__(self, shop: Shop) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.place = f"http://127.0.0.1:{port}"
        arguments = [
            "flower",
            "--address=127.0.0.1",
            f"--port={port}",
            "--basic-auth=guest:guest",
        ]
        self.process = shop.celery(*arguments)

    def ask(self, path: str, form: dict[str, str] | None = None) -> Any:
        """What it answers with, JSON or text; None: it does not listen yet."""
        body = None if form is None else urllib.parse.urlencode(form).encode()
        request = urllib.request.Request(self.place + path, body, {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read().decode()
                return json.loads(text) if "json" in answer.headers["Content-Type"] else text
        except ConnectionError:
            return None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionError):
                return None
            raise

    def worker(self) -> Any:
        return (self.ask("/api/workers?refresh=1") or {}).get(WORKER, {})

    def states(self) -> dict[str, str]:
        return {name: task["state"] for name, task in (self.ask("/api/tasks") or {}).items()}


# The command's own entry, called more than once: half a second each is saved.
COMMANDS = """
import sys
from celery.bin.celery import celery
for line in sys.argv[1:]:
    celery.main(["-A", "shop", *line.split()], standalone_mode=False)
"""


def answers(shop: Shop, *commands: str) -> list[Any]:
    """What ``celery <command> -j`` prints about the worker, for each of the commands."""
    process = shop.python("-W", "ignore", "-c", COMMANDS, *(f"{command} -j -t 20 -d {WORKER}" for command in commands))
    told = [json.loads(line) for line in shop.ended(process).splitlines() if line.startswith(("{", "["))]
    assert len(told) == len(commands), shop.log(process)
    return told


@pytest.mark.req("C1", "C11")
def test_flower_and_the_clients_of_the_celery_command(make_shop: MakeShop, queue: DBQueue) -> None:
    need_package("flower")
    shop = make_shop(eta_lead=7_200)
    worker = shop.celery("worker", "-n", WORKER, "-c", "1", "-E", "-l", "INFO", "-Q", "shop,other")
    dump = shop.celery("events", "--dump")
    flower = Flower(shop)
    wait_for(lambda: f"{WORKER} ready" in shop.log(worker), 60, "the worker did not become ready")
    wait_for(lambda: "stats" in flower.worker(), 60, "Flower does not see the worker")
    assert flower.worker()["stats"]["pool"]["max-concurrency"] == 1
    wait_for(lambda: " heartbeat: " in shop.log(dump), 30, "no events came")

    done, running = shop.app.add.delay(1, 1), shop.app.slow.delay("long", 600)
    shop.wait_for_note("start long")
    waiting = shop.app.add.delay(2, 2)
    later = shop.app.add.apply_async((3, 3), countdown=3_600)
    wait_for(
        lambda: queue.counts("shop").get("running") == 2,
        30,
        "the worker does not hold what waits and what is due later",
    )

    ping, active, reserved, scheduled, stats, queues, registered = answers(
        shop,
        *(
            f"inspect {name}"
            for name in ("ping", "active", "reserved", "scheduled", "stats", "active_queues", "registered")
        ),
    )
    assert ping == {WORKER: {"ok": "pong"}}
    assert [task["id"] for task in active[WORKER]] == [running.id]
    assert waiting.id in [task["id"] for task in reserved[WORKER]]
    assert [task["request"]["id"] for task in scheduled[WORKER]] == [later.id]
    assert stats[WORKER]["pool"]["max-concurrency"] == 1
    assert stats[WORKER]["broker"]["transport"] == "dbqueue"
    password = queue.database.url.password
    assert not password or password not in str(stats)
    assert {found["name"] for found in queues[WORKER]} == {"shop", "other"}
    assert {"shop.add", "shop.slow"} <= set(registered[WORKER])

    wait_for(lambda: flower.states().get(running.id) == "STARTED", 30, "Flower does not see the tasks")
    assert flower.states()[done.id] == "SUCCESS"
    flower.ask(f"/api/task/revoke/{waiting.id}", {})
    flower.ask(f"/api/task/revoke/{running.id}", {"terminate": "true", "signal": "SIGKILL"})
    wait_for(
        lambda: {flower.states().get(task.id) for task in (waiting, running)} == {"REVOKED"},
        30,
        "they were not revoked",
    )

    told = answers(
        shop,
        "control rate_limit shop.add 77/m",
        "control add_consumer more",
        "control cancel_consumer other",
        "control pool_grow 2",
    )
    assert [[list(answer[WORKER]) for answer in each] for each in told] == [[["ok"]]] * 4, told
    flower.ask(f"/api/worker/queue/add-consumer/{WORKER}", {"queue": "third"})
    inspect = shop.app.app.control.inspect([WORKER], timeout=20)
    assert "shop.add [rate_limit=77/m]" in inspect.registered("rate_limit")[WORKER]
    assert {found["name"] for found in inspect.active_queues()[WORKER]} == {"shop", "more", "third"}
    wait_for(lambda: len(inspect.stats()[WORKER]["pool"]["processes"]) == 3, 30, "the pool did not grow")
    shop.app.late.apply_async(("more", 0), queue="more")
    shop.wait_for_note("end more")
    assert "1 node online" in shop.ended(shop.celery("status", "-t", "20", "-d", WORKER))

    shop.celery("control", "shutdown", "-t", "1").wait(
        60
    )  # it complains that nobody replied: a worker does not, to this
    shop.ended(worker)
    assert f'flower_events_total{{task="shop.late",type="task-succeeded",worker="{WORKER}"}} 1.0' in flower.ask(
        "/metrics"
    )
    assert WORKER in flower.ask("/workers")
    wait_for(lambda: flower.ask("/api/workers?status=1") == {WORKER: False}, 30, "Flower does not see that it has gone")
    assert shop.notes == ["add 1 1", "start long", "start more", "end more"]
    seen = shop.log(dump)
    for event in ("task received", "task started", "task succeeded", "task revoked", "shutdown"):
        assert f"] {event}: " in seen
    for client in (flower.process, dump):
        client.send_signal(signal.SIGINT)
        client.wait(30)
        assert "Traceback" not in shop.log(client), shop.log(client)


TRACED = """
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

class Notes(SpanExporter):
    def export(self, spans):
        for span in spans:
            parent = span.parent.span_id if span.parent else 0
            note(f"{span.kind.name} {span.name} {span.context.trace_id} {span.context.span_id} {parent}")
        return SpanExportResult.SUCCESS

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Notes()))
CeleryInstrumentor().instrument(tracer_provider=provider)
"""


@pytest.mark.req("C11")
def test_a_trace_goes_from_the_publisher_through_all_tasks(make_shop: MakeShop, queue: DBQueue) -> None:
    """OpenTelemetry's instrumentation in a publisher and in a worker: what it puts into the headers arrives."""
    need_package("opentelemetry.instrumentation.celery")
    need_package("opentelemetry.sdk")
    shop = make_shop(more=TRACED)
    shop.worker(size=1)
    shop.ended(
        shop.python("-c", "import shop; shop.fan.delay(1)")
    )  # not here: the instrumentation is for a whole process
    wait_for(lambda: sum(note.startswith("CONSUMER") for note in shop.notes) == 4, 30, "not all was traced")
    spans = [note.split() for note in shop.notes if note.startswith(("PRODUCER", "CONSUMER"))]
    assert len({trace for _, _, trace, _, _ in spans}) == 1
    published, ran = (
        {span: parent for kind, _, _, span, parent in spans if kind == wanted} for wanted in ("PRODUCER", "CONSUMER")
    )
    assert len(published) == len(ran) == 4
    assert set(ran.values()) == set(published), "each task has the publishing of its own message as its parent"
    (first,) = (span for kind, name, _, span, _ in spans if (kind, name) == ("CONSUMER", "run/shop.fan"))
    assert sorted(published.values()) == ["0", first, first, first]


SENTRY = """
import sentry_sdk
from sentry_sdk.integrations.celery import CeleryIntegration

sentry_sdk.init(dsn={dsn!r}, traces_sample_rate=1.0, integrations=[CeleryIntegration()])

@app.task(shared=False, bind=True, max_retries=1, retry_backoff=False)
def broken(self):
    note(f"broken {{self.request.retries}}")
    try:
        raise ValueError("as planned")
    except ValueError as error:
        raise self.retry(exc=error, countdown=0)
"""
SHOPPING = """
import sentry_sdk, shop
with sentry_sdk.start_transaction(op="test", name="shopping"):
    shop.fan.delay(1)
    shop.broken.delay()
"""


class Sentry:
    """What Sentry's client sends, taken by an HTTP server of the test's own."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """Events and transactions, as they came."""
        keep = self._keep

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                keep(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *arguments: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.dsn = f"http://key@127.0.0.1:{self._server.server_address[1]}/1"

    def _keep(self, envelope: bytes) -> None:
        """A line of JSON about the whole, and then for each item one about it and its body, which has no line breaks in these kinds."""
        _, *lines = envelope.split(b"\n")
        for about, body in zip(lines[::2], lines[1::2], strict=False):
            if json.loads(about)["type"] in ("event", "transaction"):
                self.items.append(json.loads(body))

    def named(self, name: str, kind: str | None = "transaction") -> list[dict[str, Any]]:
        return [item for item in self.items if item.get("transaction") == name and item.get("type") == kind]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    sentry = Sentry()
    yield sentry
    sentry.close()


@pytest.mark.soak
@pytest.mark.req("C11")
def test_sentry_hears_of_the_errors_and_traces_all_tasks(make_shop: MakeShop, queue: DBQueue, sentry: Sentry) -> None:
    """Its Celery integration in a publisher and in a worker. An error is told once, by the last retry, with its task; and all of them
    belong to the trace of who published them."""
    need_package("sentry_sdk")
    shop = make_shop(more=SENTRY.format(dsn=sentry.dsn))
    worker = shop.worker(size=2)
    shop.ended(shop.python("-c", SHOPPING))
    wait_for(lambda: queue.counts("shop") == {"acked": 6}, 30, "not all were acked")
    worker.send_signal(signal.SIGTERM)  # it sends what is left
    shop.ended(worker)
    wanted = {"shopping": 1, "shop.fan": 1, "shop.add": 3, "shop.broken": 2}
    assert {name: len(sentry.named(name)) for name in wanted} == wanted
    transactions = [transaction for name in wanted for transaction in sentry.named(name)]
    (error,) = sentry.named("shop.broken", None)
    traces = {item["contexts"]["trace"]["trace_id"] for item in (*transactions, error)}
    assert len(traces) == 1
    assert [(e["type"], e["value"]) for e in error["exception"]["values"]][-1] == ("ValueError", "as planned")
    assert error["extra"]["celery-job"]["task_name"] == "shop.broken"

    published = {
        span["span_id"]: span
        for each in transactions
        for span in each["spans"]
        if span["op"].startswith("queue.submit")
    }
    for transaction in transactions[1:]:
        trace = transaction["contexts"]["trace"]
        assert trace["op"] == "queue.task.celery"
        assert trace["parent_span_id"] in published, "its parent is the publishing of its message"
        (process,) = (span for span in transaction["spans"] if span["op"] == "queue.process")
        assert process["data"]["messaging.system"] == "dbqueue"
        assert process["data"]["messaging.destination.name"] == "shop"
        assert 0 <= process["data"]["messaging.message.receive.latency"] < 60_000
    publishing = [span for each in transactions for span in each["spans"] if span["op"] == "queue.publish"]
    assert {span["data"]["messaging.system"] for span in publishing} == {"dbqueue"}


BATCHES = """
from celery_batches import Batches

app.conf.worker_prefetch_multiplier = 0

@app.task(base=Batches, flush_every=10, flush_interval=0.5, acks_late=True)
def bulk(requests):
    note("batch " + " ".join(str(request.args[0]) for request in requests))
"""


@pytest.mark.soak
@pytest.mark.req("C11")
@pytest.mark.timeout(600)  # the first run on a machine makes the environment
def test_tasks_in_batches(make_shop: MakeShop, queue: DBQueue) -> None:
    """celery-batches, which works with Celery up to 5.6 and so has an environment of its own."""
    try:
        environment = upstream.environment("5.6.3", None, "celery-batches>=0.10")
    except upstream.IndexUnreachable as unreachable:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"PyPI cannot be reached: {unreachable}")
    shop = make_shop(more=BATCHES)
    app = celery.Celery(broker=shop.broker_url, set_as_current=False)
    try:
        for n in range(25):
            app.send_task("shop.bulk", (n,), queue="shop")
        worker = shop.worker(size=1, python=str(environment.python))
        wait_for(lambda: queue.counts("shop") == {"acked": 25}, 60, "not all were acked")
        batches = [note.split()[1:] for note in shop.notes]
        assert sorted(int(n) for batch in batches for n in batch) == list(range(25))
        assert [len(batch) for batch in batches][:2] == [10, 10]
        worker.send_signal(signal.SIGTERM)
        shop.ended(worker)
    finally:
        app.close()
