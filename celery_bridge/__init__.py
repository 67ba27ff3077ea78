"""dbqueue targets as Celery call sites, and a Celery app's tasks as dbqueue targets.

This is the only room that knows both sides: everything below it (`dbqueue`) runs without Celery installed, apart from
the doors that Celery itself opens (its transport, result backend and beat scheduler). It is a package of its own so
that importing `dbqueue` can never import Celery by accident.

Nothing is public here yet; call sites, app discovery and the task runner move in with a later release.
"""
