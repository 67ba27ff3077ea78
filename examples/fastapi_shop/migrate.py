"""Makes the tables, the shop's and dbqueue's: `python -m examples.fastapi_shop.migrate`."""

from __future__ import annotations

from dbqueue import DBQueue
from examples.fastapi_shop.database import URL, Base
from examples.fastapi_shop.tasks import engine

if __name__ == "__main__":
    Base.metadata.create_all(engine)
    queue = DBQueue(URL)
    queue.migrate()  # as `dbqueue migrate --url ...`; inside of a request's transaction nothing is created
    queue.close()
