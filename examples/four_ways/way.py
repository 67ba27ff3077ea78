"""What tasks and call sites import from Celery or from the bridge: the only module, beside `app.py`, that knows which way it is."""

from __future__ import annotations

import os

WITH_CELERY = os.environ.get("SHOP_WAY", "celery") == "celery"

if WITH_CELERY:
    from celery import chord, shared_task
else:
    from celery_bridge import chord, shared_task

__all__ = ["WITH_CELERY", "chord", "shared_task"]
