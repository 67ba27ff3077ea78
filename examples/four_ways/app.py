"""What `-A examples.four_ways.app` finds: a Celery app, or a queue with a bridge."""

from __future__ import annotations

import os

from examples.four_ways.way import WITH_CELERY

URL = os.environ["SHOP_URL"]

if WITH_CELERY:
    from celery import Celery

    app = Celery("four_ways", broker=URL, backend=os.environ.get("SHOP_RESULTS", URL))
    app.conf.update(task_default_queue="orders", broker_connection_retry_on_startup=True)
else:
    from celery_bridge import Bridge
    from dbqueue import DBQueue

    queue = DBQueue(URL)
    bridge = Bridge(queue, default_queue="orders")

import examples.four_ways.tasks  # noqa: E402, F401  (its tasks belong to the app or to the bridge above)
