"""One URL names the shop's database, and with `dbqueue+` before it Celery's broker."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

BASE_DIR = Path(__file__).parents[1]
DATABASE_URL = os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{BASE_DIR / 'shop.db'}")


def database(url: str) -> dict[str, object]:
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        # IMMEDIATE: a transaction that reads first can still write when somebody else has committed meanwhile.
        options = {"timeout": 20, "transaction_mode": "IMMEDIATE"}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": unquote(parts.path[1:]), "OPTIONS": options}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path[1:]),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": parts.port or "",
    }


DATABASES = {"default": database(DATABASE_URL)}

# The line that changed: it was "redis://localhost:6379/0".
CELERY_BROKER_URL = f"dbqueue+{DATABASE_URL}"
# Seconds after which a killed worker's messages come back; a live worker's never do, however long they take.
CELERY_BROKER_TRANSPORT_OPTIONS = {"lease": float(os.environ.get("SHOP_LEASE", "60"))}
CELERY_TASK_IGNORE_RESULT = True
CELERY_BEAT_SCHEDULE = {
    "count-orders": {"task": "orders.tasks.count_orders", "schedule": float(os.environ.get("SHOP_COUNT_EVERY", "3600"))}
}

REVIEW_AFTER = float(os.environ.get("SHOP_REVIEW_AFTER", "86400"))
"""Seconds after an order at which its customer is asked for a review."""
BANK_SECONDS = float(os.environ.get("SHOP_BANK_SECONDS", "0"))
"""How long the bank takes to charge a card."""
PRINTER_SECONDS = float(os.environ.get("SHOP_PRINTER_SECONDS", "0"))
"""How long the label printer takes."""

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only good enough for an example")
DEBUG = False
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = ["orders"]
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
ROOT_URLCONF = "config.urls"
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
