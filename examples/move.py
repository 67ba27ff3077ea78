"""Moves what waits in a Celery app's queues from one broker to another, ETAs too: python move.py PROJ SOURCE DESTINATION [QUEUE ...]

A message is acknowledged once the other broker has it. A move that is interrupted may leave one in both; run it again."""

from __future__ import annotations

import sys
from datetime import datetime, timezone

from celery.app.utils import find_app
from kombu import Connection, Producer

from dbqueue import DBQueue


def move(queue, source, destination):
    source, destination = source.channel(), destination.channel()
    queue(destination).declare()
    waiting, producer, moved = queue(source), Producer(destination), 0
    waiting.declare()
    while (message := waiting.get()) is not None:
        ttl = message.properties.get("expiration")
        producer.publish(
            message.body.encode() if isinstance(message.body, str) else bytes(message.body),
            exchange="", routing_key=queue.name, headers=message.headers, delivery_mode=2,
            content_type=message.content_type, content_encoding=message.content_encoding,
            priority=message.properties.get("priority"), expiration=None if ttl is None else float(ttl) / 1000,
            correlation_id=message.properties.get("correlation_id"), reply_to=message.properties.get("reply_to"),
        )  # fmt: skip
        message.ack()
        moved += 1
    return moved


def bring_forward(database, queue):
    """A database keeps an ETA until it is due. A job that is cancelled and retried can be taken at once. Returns whether any waits."""
    waiting = database.jobs(queue=queue.name, state="pending", limit=1000)
    for job in waiting:
        if job.run_at > datetime.now(timezone.utc):
            database.cancel(job.id)
            database.retry(job.id)
    return bool(waiting)


def main(proj, source_url, destination_url, *names):
    app = find_app(proj)
    database = DBQueue(source_url.removeprefix("dbqueue+")) if source_url.startswith("dbqueue+") else None
    with (
        Connection(source_url) as source,
        Connection(destination_url, transport_options={"confirm_publish": True}) as destination,
    ):
        for name in names or list(app.amqp.queues):
            queue, moved = app.amqp.queues[name], 0
            while database is not None and bring_forward(database, queue):
                moved += move(queue, source, destination)
            moved += move(queue, source, destination)
            print(f"{queue.name}: {moved} moved")


if __name__ == "__main__":
    main(*sys.argv[1:])
