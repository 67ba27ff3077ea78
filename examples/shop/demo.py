"""The main job, end to end, on SQLite: `make demo`.

Orders from a CSV are written together with their receipt jobs, some are rolled back on purpose, two workers run, one of them is
killed while it is busy, and at the end every committed order has its receipt and nothing else has one.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = "{:<34}{}"


def main() -> int:
    folder = tempfile.mkdtemp(prefix="dbqueue-shop-")
    os.environ["SHOP_FOLDER"] = folder  # before the app is imported, and for the workers
    try:
        return run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run() -> int:
    from examples.shop import app

    app.create()
    with open(Path(__file__).with_name("orders.csv"), encoding="utf-8", newline="") as file:
        orders = list(csv.DictReader(file))
    shop = app.connect()
    declined = 0
    for row in orders:
        order = app.Order(int(row["order"]), row["customer"], row["item"], int(row["quantity"]), int(row["unit_cents"]))
        try:
            app.place_order(shop, order, row["payment"])
        except app.Declined:
            declined += 1
    shop.close()
    placed = len(orders) - declined
    print(LINE.format("orders read from orders.csv", len(orders)))
    print(LINE.format("committed with their receipt job", placed))
    print(LINE.format("rolled back on purpose", declined))

    workers = [start_worker(f"shop-{n}") for n in (1, 2)]
    try:
        held = wait(
            lambda: [j for j in app.queue.jobs(state="running") if (j.worker or "").startswith("shop-1:")],
            "worker 1 to be busy",
        )
        workers[0].kill()
        workers[0].wait()
        print(LINE.format("worker 1", f"SIGKILL while it held {len(held)} jobs"))
        wait(lambda: not set(app.queue.counts()) - {"succeeded", "dead"}, "the jobs to end")
        workers[1].send_signal(signal.SIGTERM)
        print(LINE.format("worker 2", f"took over, stopped by SIGTERM, exit code {workers[1].wait()}"))
    finally:
        for worker in workers:
            worker.kill()

    counts = app.queue.counts()
    jobs = app.queue.jobs(limit=1_000)
    receipts = {path.stem for path in app.RECEIPTS.glob("[0-9]*.txt")}
    wanted = {order["order"] for order in orders if order["payment"] == "accepted"}
    print(LINE.format("jobs", ", ".join(f"{n} {state}" for state, n in counts.items())))
    print(LINE.format("attempts", f"{sum(j.attempt for j in jobs)} for {len(jobs)} jobs"))
    print(LINE.format("recovered after the kill", sum(j.lapses > 0 for j in jobs)))
    print(LINE.format("receipts on disk", len(receipts)))
    print(LINE.format("orders without a receipt (lost)", len(wanted - receipts)))
    print(LINE.format("receipts without an order", len(receipts - wanted)))
    app.queue.close()
    return 0 if receipts == wanted and counts == {"succeeded": placed} else 1


def start_worker(name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "dbqueue",
        "worker",
        "-A",
        "examples.shop.app:queue",
        "-c",
        "4",
        "-n",
        name,
        "-l",
        "ERROR",
    ]
    return subprocess.Popen(command)


def wait(fact, what: str, deadline: float = 60.0):
    """Waits for a fact, not for a time."""
    until = time.monotonic() + deadline
    while not (found := fact()):
        if time.monotonic() > until:
            raise SystemExit(f"gave up waiting for {what}")
        time.sleep(0.02)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
