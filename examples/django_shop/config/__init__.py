"""A Django shop whose Celery broker is its own database.

In this folder: `python manage.py migrate`, `python manage.py runserver`, `celery -A config worker`, `celery -A config beat`.
"""

from config.celery import app

__all__ = ["app"]
