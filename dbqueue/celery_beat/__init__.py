"""Celery's beat entries on our schedules: any number of beats, each slot sent once.

An entry of ``beat_schedule`` is a row whose owner is the app. What it sends stands in the app's code alone, so only a beat with that
code can fire it: ``celery -A proj beat -S dbqueue``, or ``dbqueue beat -A proj``. The message goes through Celery itself, as its own
scheduler sends it, and is written in the transaction that moves the cursor: the broker is the beat's database.

``entries`` reads the app, ``source`` owns and fires, ``scheduler`` is what Celery's command holds, ``broker`` finds app and database.
"""

from dbqueue.celery_beat.scheduler import Scheduler

__all__ = ["Scheduler"]
