"""Messages of task protocol 1, which older senders and apps with ``task_protocol = 1`` write: all of it stands in the body, also which
task it is for. A worker rewrites them as messages of protocol 2 when it has claimed them, and its targets see no others."""

from __future__ import annotations

from typing import Any

from celery.worker.strategy import proto1_to_proto2
from msgspec.structs import replace

from dbqueue.database.tables import ClaimedRow
from dbqueue.kombu_transport import message as messages

IN_THE_BODY = frozenset({"args", "kwargs", "callbacks", "errbacks", "chord", "taskset", "headers"})
"""Of what Celery makes headers of: these are written once."""


def as_protocol_2(row: ClaimedRow, accept: Any) -> ClaimedRow | None:
    """None: it is no task's message. Raises whatever a body raises that cannot be read, or is not accepted."""
    head = row.head or b""
    message = messages.incoming(head, row.payload, redelivered=False, accept=accept)
    told = message.decode()
    if not isinstance(told, dict) or not isinstance(told.get("task"), str) or not isinstance(told.get("id"), str):
        return None
    body, headers, _, _ = proto1_to_proto2(message, told)
    headers = {name: value for name, value in headers.items() if name not in IN_THE_BODY} | (message.headers or {})
    head, payload = messages.rewritten(head, message, headers, body)
    return replace(row, target=messages.target_of(headers["task"]), task_id=headers["id"], head=head, payload=payload)
