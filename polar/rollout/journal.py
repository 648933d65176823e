"""What a node must not forget when it is killed: one SQLite file in its directory.

Invariant: a session is noted together with the position behind its command, in one
transaction, before anything of it happens; so a restarted node neither runs a session twice
nor forgets one, and it finds the processes that its last life left behind.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from schemas.nodes import StartSession

_MAX_FINISHED = 10_000
"""Finished session ids kept, so that a StartSession sent again is recognised."""

_TABLES = """
CREATE TABLE IF NOT EXISTS positions (partition INTEGER PRIMARY KEY, next INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, command TEXT NOT NULL, runtime TEXT NOT NULL DEFAULT '',
    touched_gateway INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS finished (number INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS processes (
    pid INTEGER PRIMARY KEY, started INTEGER NOT NULL, runtime TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class UnfinishedSession:
    """A session that an earlier life of the node accepted."""

    command: StartSession
    runtime: str
    """Its runtime's directory; empty before it had one."""
    touched_gateway: bool
    """Whether the gateway may know it, so that it must be sealed."""


@dataclass(frozen=True, slots=True)
class NotedProcess:
    """A process group that the node started."""

    pid: int
    started: int
    """Start time in clock ticks since boot: tells the process from a later one of the same pid."""
    runtime: str


class Journal:
    """Open it once per process; every method is one transaction."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def positions(self) -> dict[int, int]:
        """Partition of node-commands → next offset to read; empty for a new node."""
        return dict(self._db.execute("SELECT partition, next FROM positions").fetchall())

    def advance(self, partition: int, following: int) -> None:
        """Everything below `following` was handled."""
        self._db.execute("INSERT OR REPLACE INTO positions VALUES (?, ?)", (partition, following))

    def accept(self, command: StartSession, partition: int, following: int) -> bool:
        """Note a session and the position behind its command. False when it is known already."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            known = self._db.execute(
                "SELECT 1 FROM sessions WHERE session_id = ?1 "
                "UNION SELECT 1 FROM finished WHERE session_id = ?1",
                (command.session_id,),
            ).fetchone()
            if known is None:
                self._db.execute(
                    "INSERT INTO sessions (session_id, command) VALUES (?, ?)",
                    (command.session_id, command.model_dump_json()),
                )
            self.advance(partition, following)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
        return known is None

    def note_runtime(self, session_id: str, runtime: str) -> None:
        """The session has this runtime directory."""
        self._db.execute("UPDATE sessions SET runtime = ? WHERE session_id = ?", (runtime, session_id))

    def note_gateway(self, session_id: str) -> None:
        """The gateway is about to hear of the session."""
        self._db.execute("UPDATE sessions SET touched_gateway = 1 WHERE session_id = ?", (session_id,))

    def finish(self, session_id: str) -> None:
        """Its SessionFinished is on the log."""
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
        self._db.execute("INSERT OR IGNORE INTO finished (session_id) VALUES (?)", (session_id,))
        self._db.execute(
            "DELETE FROM finished WHERE number <= (SELECT MAX(number) FROM finished) - ?", (_MAX_FINISHED,)
        )
        self._db.execute("COMMIT")

    def unfinished(self) -> list[UnfinishedSession]:
        """Sessions accepted and not finished, in order of acceptance."""
        rows = self._db.execute(
            "SELECT command, runtime, touched_gateway FROM sessions ORDER BY rowid"
        ).fetchall()
        return [
            UnfinishedSession(StartSession.model_validate_json(command), runtime, bool(touched))
            for command, runtime, touched in rows
        ]

    def add_process(self, process: NotedProcess) -> None:
        """A process group was started."""
        self._db.execute(
            "INSERT OR REPLACE INTO processes VALUES (?, ?, ?)",
            (process.pid, process.started, process.runtime),
        )

    def remove_process(self, pid: int) -> None:
        """The process group has ended as a whole."""
        self._db.execute("DELETE FROM processes WHERE pid = ?", (pid,))

    def processes(self) -> list[NotedProcess]:
        """Process groups that were not seen to end."""
        rows = self._db.execute("SELECT pid, started, runtime FROM processes").fetchall()
        return [NotedProcess(*row) for row in rows]
