"""``dbqueue migrate``: dbqueue's own tables, apart from the application's migrations (D6)."""

from __future__ import annotations

import click

from dbqueue.cli.options import Asked, database_options, file_exists
from dbqueue.cli.output import document, words
from dbqueue.clock import POSTGRES_NOW, SQLITE_NOW
from dbqueue.database import migrate as schema
from dbqueue.database.migrate import Migration
from dbqueue.queue import DBQueue


@click.command()
@click.option("--dry-run", is_flag=True, help="Only list what would be applied.")
@click.option("--sql", "as_sql", is_flag=True, help="Only print the statements that would be run.")
@database_options
def migrate(asked: Asked, dry_run: bool, as_sql: bool) -> None:
    """Create or upgrade dbqueue's tables.

    Safe to run at once in many places. A schema newer than this program is refused (exit code 4).

    \b
    dbqueue migrate --url sqlite:///app.db
    dbqueue migrate -A shop.jobs --sql | psql "$OWNER_URL"
    """
    if as_sql and asked.as_json:
        raise click.UsageError("--sql prints SQL; leave --json out")
    with asked.opened() as queue:
        if as_sql:
            _print_sql(queue)
        else:
            _print_list(asked, _pending(queue) if dry_run else queue.migrate(), dry_run)


def _pending(queue: DBQueue) -> list[Migration]:
    """To look must not make a file."""
    if not file_exists(queue):
        return schema.migrations(queue.database.dialect.name, queue.database.dialect.names)
    return queue.database.pending_migrations()


def _print_sql(queue: DBQueue) -> None:
    dialect = queue.database.dialect
    now = SQLITE_NOW if dialect.name == "sqlite" else POSTGRES_NOW
    if script := schema.script(dialect, _pending(queue), now):
        click.echo(script, nl=False)
    else:
        words("Nothing to apply.")


def _print_list(asked: Asked, listed: list[Migration], dry_run: bool) -> None:
    if asked.as_json:
        named = [{"version": migration.version, "name": migration.name} for migration in listed]
        document({"dry_run": dry_run, "migrations": named})
        return
    for migration in listed:
        click.echo(f"{'would apply' if dry_run else 'applied'} {migration.version:04d}_{migration.name}")
    if not listed:
        words("Nothing to apply.")
