"""The application of a worker process: what Celery's suite gives to the worker that it starts in a thread of its own."""

from __future__ import annotations

import os

from celery import Celery
from celery.contrib.testing.tasks import ping  # noqa: F401  how one knows that it is up
from t.integration.tasks import ClassBasedAutoRetryTask  # type: ignore[import-not-found]

app = Celery("conformance", broker=os.environ["TEST_BROKER"], backend=os.environ["TEST_BACKEND"])
app.conf.update(result_extended=True, timezone="UTC", broker_connection_retry_on_startup=True)
app.register_task(ClassBasedAutoRetryTask())
