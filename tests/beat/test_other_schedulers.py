"""Other schedulers of Celery, unchanged, whose messages this broker takes: Celery's own, django-celery-beat, RedBeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dbqueue import DBQueue
from tests.brokers import redis_url as redis_url
from tests.transport.conftest import make_shop as make_shop
from tests.transport.shops import Shop, need_package
from tests.waiting import wait_for

pytestmark = [pytest.mark.req("C1", "C7"), pytest.mark.timeout(180)]

ENTRY = 'app.conf.beat_schedule = {"tick": {"task": "shop.add", "schedule": 0.5, "args": (1, 2)}}\n'

SITE = """
SECRET_KEY = "only good enough for a test"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": {file!r}}}}}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
DJANGO = """
os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
import django
django.setup()
app.conf.update(DJANGO_CELERY_BEAT_TZ_AWARE=True, beat_max_loop_interval=1)
"""
MAKE_ENTRY = """
import shop
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django_celery_beat.models import IntervalSchedule, PeriodicTask
every = IntervalSchedule.objects.create(every=1, period=IntervalSchedule.SECONDS)
PeriodicTask.objects.create(interval=every, name="tick", task="shop.add", args="[1, 2]")
"""


def check_that_it_fires(shop: Shop, queue: DBQueue, *arguments: str) -> None:
    """Twice, into a queue that nobody works on; a worker then runs what is there."""
    beat = shop.celery("beat", "-l", "INFO", *arguments)
    wait_for(
        lambda: queue.counts("shop").get("pending", 0) >= 2 or beat.poll() is not None, 60, "it did not fire twice"
    )
    assert beat.poll() is None, shop.log(beat)
    beat.terminate()
    beat.wait(30)
    shop.worker(pool="solo", size=1)
    wait_for(lambda: shop.notes.count("add 1 2") >= 2, 30, "the tasks did not run")
    assert not queue.schedules(), "entries of other schedulers are no rows here"


def test_celerys_own(make_shop: Callable[..., Shop], queue: DBQueue) -> None:
    check_that_it_fires(make_shop(more=ENTRY), queue)


def test_django_celery_beat(make_shop: Callable[..., Shop], queue: DBQueue, tmp_path: Path) -> None:
    need_package("django_celery_beat")
    shop = make_shop(more=DJANGO)
    (shop.folder / "site_settings.py").write_text(SITE.format(file=str(tmp_path / "site.db")))
    shop.ended(shop.python("-W", "ignore", "-c", MAKE_ENTRY))
    check_that_it_fires(shop, queue, "-S", "django")


def test_redbeat(make_shop: Callable[..., Shop], queue: DBQueue, redis_url: str) -> None:
    need_package("redbeat")
    shop = make_shop(more=ENTRY + f"app.conf.update(redbeat_redis_url={redis_url!r}, beat_max_loop_interval=1)\n")
    check_that_it_fires(shop, queue, "-S", "redbeat.RedBeatScheduler")
