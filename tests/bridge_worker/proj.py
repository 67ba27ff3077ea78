"""The Celery app that the worker of these tests runs. It lies in a folder of the test's own, beside ``proj_settings``; what its tasks do
is noted in a file, one line each, which is written before they go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import proj_settings as settings  # type: ignore[import-not-found]
from celery import Celery, Task, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

app = Celery("proj", broker=settings.BROKER, backend=settings.RESULTS)
app.conf.update(task_default_queue="proj", **settings.CONF)


def note(text: str) -> None:
    with open(settings.NOTES, "a") as file:
        file.write(text + "\n")


# -- what a task sees and returns --------------------------------------------------------------------------------------


@app.task(bind=True, time_limit=30, soft_time_limit=20)
def see(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    request = self.request
    names = (
        "id",
        "root_id",
        "parent_id",
        "group",
        "retries",
        "hostname",
        "timelimit",
        "delivery_info",
        "called_directly",
        "is_eager",
    )
    seen = {
        name: getattr(request, name) for name in (*names, "stamps", "stamped_headers", "reply_to", "correlation_id")
    }
    return {**seen, "args": args, "kwargs": kwargs, "headers": {"x": request.get("x")}, "process": os.getpid()}


@app.task
def add(x: int, y: int) -> int:
    note(f"add {x} {y}")
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def fail(name: str, *_: Any) -> None:
    raise ValueError(name)


@app.task
def tell(*args: Any) -> None:
    note("told " + " ".join(str(arg) for arg in args))


@app.task
def told_of_error(request: Any, error: Any, traceback: Any, name: str) -> None:
    note(f"error of {name}: {type(error).__name__}")


@app.task
def errback(task_id: str, name: str) -> None:
    note(f"old error of {name}")


# -- how a task ends ---------------------------------------------------------------------------------------------------


@app.task(bind=True, max_retries=3)
def again(self: Any, name: str, times: int, options: dict[str, Any] | None = None) -> str:
    note(f"try {name} {self.request.retries}")
    if self.request.retries < times:
        raise self.retry(**{"countdown": 0, **(options or {})})
    return f"{name} after {self.request.retries} in {self.request.delivery_info['routing_key']}"


@app.task(bind=True, max_retries=None)
def without_end(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(bind=True, max_retries=1)
def goes_on(self: Any, name: str) -> str:
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        note(f"went on {name}")
    return f"{self.request.retries}"


@app.task(bind=True, autoretry_for=(KeyError,), default_retry_delay=0, max_retries=2)
def auto(self: Any, times: int) -> int:
    if self.request.retries < times:
        raise KeyError("again")
    return int(self.request.retries)


@app.task(bind=True)
def replaced(self: Any, x: int) -> None:
    raise self.replace(add.s(x, 100))


@app.task
def ignored(name: str) -> None:
    note(f"ignored {name}")
    raise Ignore()


@app.task(bind=True)
def rejected(self: Any, name: str, requeue: bool) -> str:
    note(f"rejected {name} {self.request.delivery_info['redelivered']}")
    if requeue and self.request.delivery_info["redelivered"]:
        return "in the end"
    raise Reject("no", requeue=requeue)


@app.task(ignore_result=True)
def unkept(name: str) -> str:
    note(f"unkept {name}")
    return name


@app.task(bind=True)
def sends_and_fails(self: Any, name: str) -> None:
    tell.delay("from the body of", name)
    raise ValueError(name)


@app.task(soft_time_limit=0.2)
def soft(caught: bool) -> str:
    try:
        time.sleep(30)
    except SoftTimeLimitExceeded:
        if not caught:
            raise
    return "caught"


@app.task(time_limit=0.3)
def hard(name: str) -> None:
    note(f"hard {name}")
    time.sleep(30)


@app.task
def slow(name: str, seconds: float) -> str:
    note(f"start {name}")
    time.sleep(seconds)
    note(f"end {name}")
    return name


@app.task
def held(name: str, until: str) -> str:
    """Runs until a file is there."""
    note(f"start {name} {os.getpid()}")
    while not os.path.exists(until):
        time.sleep(0.01)
    note(f"end {name}")
    return name


@app.task
def dies(name: str, times: int) -> str:
    """Its process is killed in its first runs."""
    with open(settings.NOTES) as file:
        before = file.read().split("\n").count(f"dies {name}")
    note(f"dies {name}")
    if before < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"


@app.task
def takes_down(name: str) -> None:
    """Its worker, whose process id stands in a file."""
    with open(os.path.join(os.path.dirname(settings.NOTES), "worker")) as file:
        pid = int(file.read())
    note(f"takes down {name}")
    os.kill(pid, signal.SIGKILL)
    time.sleep(600)


@app.task(bind=True)
def puts_back_and_dies(self: Any, name: str, backs: int, deaths: int) -> str:
    """Its first runs put it back, and in the next ones its process is killed."""
    with open(settings.NOTES) as file:
        before = file.read().split("\n").count(f"runs {name}")
    note(f"runs {name}")
    if before < backs:
        raise Reject("not yet", requeue=True)
    if before < backs + deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return "lived"


@app.task
def exits() -> None:
    raise SystemExit(3)


@app.task
def at(name: str) -> float:
    """When it ran."""
    return time.time()


@app.task
def where() -> tuple[int, bool]:
    return os.getpid(), threading.current_thread() is threading.main_thread()


class Own(Task):  # type: ignore[misc]
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tell.delay("from __call__ of", args[0])
        return f"own {super().__call__(*args, **kwargs)}"

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        note(f"before {args[0]}")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        note(f"success {args[0]} {retval}")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(f"failure {args[0]} {type(exc).__name__}")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        note(f"after {args[0]} {status}")


@app.task(base=Own)
def own(name: str, fails: bool) -> str:
    if fails:
        raise ValueError(name)
    return name


@app.task(bind=True, base=Own, time_limit=0.3)
def own_hard(self: Any, name: str) -> None:
    time.sleep(30)


# -- kills -------------------------------------------------------------------------------------------------------------


class Killer:
    """Kills this process before the n-th word to the database (a statement, BEGIN, COMMIT) of what ends a task; 0: after COMMIT."""

    def __init__(self) -> None:
        self.planned = False
        self.armed, self.left, self.nth, self.name = False, 0, 0, ""

    def arm(self, name: str, nth: int) -> None:
        self.planned, self.name, self.nth, self.left = True, name, nth, nth

    def patch(self) -> None:
        from celery_bridge.runner import _Ended
        from dbqueue.database.postgres import PostgresSession
        from dbqueue.database.sqlite import SqliteSession

        for kind, words in (
            (PostgresSession, ("execute", "_run", "begin", "commit")),
            (SqliteSession, ("execute", "begin", "commit")),
        ):
            for word in words:
                setattr(kind, word, self.counted(word, getattr(kind, word)))

        write = _Ended.write

        def begin(ended: Any, settlement: Any) -> Any:
            self.armed, self.planned = self.planned, False
            return write(ended, settlement)

        _Ended.write = begin  # type: ignore[method-assign]

    def counted(self, word: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.armed:
                return method(*args, **kwargs)
            self.left -= 1
            if self.left == 0:
                self.kill()
            result = method(*args, **kwargs)
            if word == "commit":  # the end of what is counted
                self.armed = False
                if self.left < 0 and self.nth == 0:
                    self.kill()
            return result

        return call

    def kill(self) -> None:
        note(f"killed {self.name}")
        os.kill(os.getpid(), signal.SIGKILL)


killer = Killer()


@app.task(bind=True, max_retries=1)
def mined(self: Any, nth: int) -> int:
    """Retries once; the first time its process is killed at the n-th word of what ends it."""
    name = str(nth)
    note(f"mined {name} {self.request.retries}")
    if self.request.retries == 0:
        if not self.request.delivery_info["redelivered"]:
            killer.arm(name, nth)
        raise self.retry(countdown=0)
    return int(self.request.retries)


# -- signals -----------------------------------------------------------------------------------------------------------


def hear(signal_name: str) -> None:
    def heard(sender: Any = None, **more: Any) -> None:
        about = getattr(sender, "name", "") if signal_name.startswith("task") else ""
        task_id = more.get("task_id") or getattr(more.get("request"), "id", "")
        ended = f"{more['pid']} {more['exitcode']}" if "exitcode" in more and "pid" in more else ""
        note(" ".join(word for word in ("signal", signal_name, about, task_id, ended) if word))

    getattr(signals, signal_name).connect(heard, weak=False)


for name in ("prerun", "postrun", "success", "failure", "retry", "revoked"):
    hear(f"task_{name}")
for name in ("worker_init", "worker_process_init", "worker_ready", "worker_process_shutdown", "worker_shutdown"):
    hear(name)


@signals.worker_process_init.connect(weak=False)
def patch(**_: Any) -> None:
    if settings.KILLS:
        killer.patch()


@app.task
def step(before: Any, of: Any, number: int) -> str:
    note(f"step {of} {number}")
    time.sleep(0.05)
    return f"{before}>{number}"


@app.task
def part(of: int, number: int) -> int:
    note(f"part {of} {number}")
    time.sleep(0.02)
    return number


@app.task
def body(numbers: list[int], of: int) -> int:
    note(f"body {of} {sum(numbers)}")
    return sum(numbers)
