"""What can be wrong with an SQLite file: where it lies, who may write there, its write-ahead log, and its empty
pages.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path

from dbqueue.database.sqlite import Sqlite, SqliteSession
from dbqueue.doctor import catalog, schema
from dbqueue.doctor.check import Check, Finding, Patient, Problem, Status, verdict
from dbqueue.errors import ConfigError, DatabaseError, SchemaMissing

OLDEST_SQLITE = (3, 24, 0)
"""ON CONFLICT ... DO NOTHING."""
LARGE_WAL = 64 * 2**20
"""A checkpoint comes every 1,000 pages, 4 MB: a log of this size means that a reader keeps it from starting over."""
FREE_BYTES, FREE_SHARE = 100 * 2**20, 0.5
LOCK_PATIENCE = 2.0
"""Seconds that a healthy system never holds the write lock for."""

BESIDE = ("", "-wal", "-shm", "-mail", "-mail-wal", "-mail-shm", "-alive")
TRANSPORTS = ("-mail", "-mail-wal", "-mail-shm", "-alive")
"""The transport's log of short-lived messages, and the folder with the locks of its living processes."""

MOUNTS = Path("/proc/mounts")
NETWORK = frozenset((
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "smb2", "smb3", "smbfs", "fuse.blobfuse2", "fuse.ceph", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.goofys", "fuse.juicefs", "fuse.mfs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
))  # fmt: skip
"""File systems on which locks or shared memory, which write-ahead logging needs, do not hold."""
SHARED = frozenset((
    "gfs2", "ocfs2", "prl_fs", "vboxsf", "virtiofs", "vmhgfs", "fuse.grpcfuse", "fuse.mergerfs", "fuse.osxfs",
    "fuse.vmhgfs-fuse",
))  # fmt: skip
"""Shared with a host or a cluster: they hold among the programs of one side only."""


def library(_: Patient) -> Finding:
    found = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        return Finding("sqlite", Status.FAILURE, f"this is SQLite {found}", f"dbqueue needs SQLite {oldest} or newer")
    return Finding("sqlite", Status.OK, f"SQLite {found}")


def file(patient: Patient) -> Finding:
    """SQLite writes beside the file, too: its log and shared memory. Notes ``stop`` where it could not. Raises
    SchemaMissing."""
    path = os.path.realpath(_dialect(patient).path)
    if not os.path.exists(path):  # to connect would make it
        raise SchemaMissing("the SQLite file of this queue does not exist yet: run `dbqueue migrate`")
    folder = os.path.dirname(path)
    problems = []
    beside = [f"{path}{suffix}" for suffix in BESIDE if os.path.exists(f"{path}{suffix}")]
    for place in (folder, *beside):
        if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            if place.endswith(TRANSPORTS):
                remedy = f"chown or chmod it: every Celery program that works here needs {' and '.join(TRANSPORTS)}"
            else:
                patient.notes.add("stop")
                remedy = (
                    f"chown or chmod it: everybody who works here needs the file, {path}-wal, {path}-shm and the folder"
                )
            what = "the folder" if os.path.isdir(place) else "the file"
            told = f"this user (uid {os.geteuid()}) may not write to {what} {place}"
            problems.append(Problem(Status.FAILURE, told, remedy))
    owners = {os.stat(place).st_uid for place in beside}
    if len(owners) > 1:
        told = f"the file and what lies beside it belong to different users (uid {', '.join(map(str, sorted(owners)))})"
        problems.append(Problem(Status.WARNING, told, "run everything that uses the file as one user"))
    for place in beside:
        if os.stat(place).st_mode & stat.S_IWOTH:
            told = f"every user of this machine may write to {place}"
            problems.append(Problem(Status.WARNING, told, f"chmod o-w {place}"))
    return verdict("file", problems, f"{path}: {os.path.getsize(path) / 2**20:.1f} MB, writable with its folder")


def file_system(patient: Patient) -> Finding:
    path = os.path.realpath(_dialect(patient).path)
    try:
        kind = file_system_of(path, MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return Finding("file_system", Status.OK, f"{MOUNTS} cannot be read here, so this was not looked at")
    if kind in NETWORK:
        told = f"the file lies on {kind}: its locks do not hold between machines, and the file may be destroyed"
        return Finding("file_system", Status.FAILURE, told, "put the file on a local disk, or use PostgreSQL")
    if kind in SHARED:
        told = f"the file lies on {kind}, which other machines may see too: its locks do not hold for them"
        return Finding(
            "file_system", Status.WARNING, told, "let nobody but this machine use it, or put it on a local disk"
        )
    return Finding("file_system", Status.OK, f"the file lies on {kind or 'an unknown file system'}")


def file_system_of(path: str, mounts: str) -> str | None:
    """The kind of the file system, by the text of /proc/mounts: the longest mount point above ``path``, of equals
    the last."""
    best, kind = -1, None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")
        above = point.decode("utf-8", "surrogateescape").rstrip("/") + "/"
        if len(above) >= best and path.startswith(above):
            best, kind = len(above), fields[2]
    return kind


def journal(patient: Patient) -> Finding:
    """Every connection of ours asks for write-ahead logging, and one that does not get it is refused."""
    try:
        mode = patient.session.execute("PRAGMA journal_mode")[0][0]
    except ConfigError as error:
        patient.notes.add("stop")
        problem, _, remedy = str(error).partition("; ")
        return Finding("journal", Status.FAILURE, problem, remedy)
    synchronous = patient.session.execute("PRAGMA synchronous")[0][0]
    return Finding("journal", Status.OK, f"journal_mode={mode}, synchronous={synchronous} (2 is FULL)")


def tables(patient: Patient) -> Finding:
    return schema.judged_tables(_differences(patient))


def indexes(patient: Patient) -> Finding:
    return schema.judged_indexes(patient.database.dialect.names, _differences(patient))


def _differences(patient: Patient) -> list[schema.Difference]:
    expected = catalog.sqlite_expected(_dialect(patient))
    found = catalog.sqlite(patient.session, patient.database.dialect.names, catalog.table_names(expected))
    return schema.compare(expected, found)


def write_lock(patient: Patient) -> Finding:
    assert isinstance(patient.session, SqliteSession)
    began = time.monotonic()
    try:
        with patient.database.errors():
            patient.session.begin(began + LOCK_PATIENCE)
    except DatabaseError:
        told = f"another connection has held the write lock for more than {LOCK_PATIENCE:g} s: nobody else can write"
        remedy = "find the program that keeps a transaction open on this file (`fuser -v FILE`), and let it commit"
        return Finding("write_lock", Status.WARNING, told, remedy)
    patient.session.rollback()
    return Finding(
        "write_lock", Status.OK, f"the write lock was free within {(time.monotonic() - began) * 1000:.0f} ms"
    )


def wal(patient: Patient) -> Finding:
    path = _dialect(patient).path + "-wal"
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if size <= LARGE_WAL:
        return Finding("wal", Status.OK, f"the write-ahead log has {size / 2**20:.1f} MB")
    # It waits for nobody, and does what the next commit would do anyway.
    _, pages, done = patient.session.execute("PRAGMA wal_checkpoint(PASSIVE)")[0]
    held = done < pages
    told = f"the write-ahead log has {size / 2**20:.0f} MB" + (
        f", and {pages - done} pages cannot be taken over: a reader keeps its transaction open" if held else ""
    )
    remedy = "end that transaction" if held else "PRAGMA wal_checkpoint(TRUNCATE) makes it small again"
    return Finding("wal", Status.WARNING, told, remedy)


def free_pages(patient: Patient) -> Finding:
    free, pages, size = (
        int(patient.session.execute(f"PRAGMA {name}")[0][0]) for name in ("freelist_count", "page_count", "page_size")
    )
    told = f"{free} of {pages} pages are empty ({free * size / 2**20:.1f} MB)"
    if free * size > FREE_BYTES and free > FREE_SHARE * pages:
        remedy = "they are used again by new jobs; to make the file smaller, stop the workers and run VACUUM"
        return Finding("free_pages", Status.WARNING, told, remedy)
    return Finding("free_pages", Status.OK, told)


def _dialect(patient: Patient) -> Sqlite:
    assert isinstance(patient.database.dialect, Sqlite)
    return patient.database.dialect


FIRST = (
    Check("sqlite", library),
    Check("file", file),
    Check("file_system", file_system),
    Check("journal", journal),
)
CHECKS = (
    Check("tables", tables),
    Check("indexes", indexes),
    Check("write_lock", write_lock),
    Check("wal", wal),
    Check("free_pages", free_pages),
)
