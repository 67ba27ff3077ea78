from django.apps import AppConfig
from django.conf import settings
from django.db.models.signals import post_migrate

from dbqueue import DBQueue


class OrdersConfig(AppConfig):
    name = "orders"

    def ready(self) -> None:
        post_migrate.connect(create_queue_tables, sender=self)


def create_queue_tables(**_: object) -> None:
    """`manage.py migrate` makes dbqueue's tables too, as `dbqueue migrate --url ...` would. A worker makes them when they are
    missing, but nothing is created inside of a request's transaction."""
    queue = DBQueue(settings.DATABASE_URL)
    queue.migrate()
    queue.close()
