# SPDX-License-Identifier: Apache-2.0
"""All nights in one SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.evaluation.nightly.records import Gap, Night, NightCase, NightPart, State

_VERSION = 1
_SCHEMA = """
CREATE TABLE nights (
    id INTEGER PRIMARY KEY,
    began TEXT NOT NULL,
    seconds REAL NOT NULL,
    exit_code INTEGER NOT NULL,
    versions TEXT NOT NULL,
    options TEXT NOT NULL,
    gaps TEXT NOT NULL,
    scores TEXT NOT NULL
) STRICT;
CREATE TABLE cases (
    night INTEGER NOT NULL REFERENCES nights (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    part TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    margin REAL,
    seconds REAL NOT NULL,
    marks TEXT NOT NULL,
    note TEXT NOT NULL,
    PRIMARY KEY (night, number)
) STRICT;
CREATE INDEX cases_by_name ON cases (part, name);
"""


class History:
    """The open file; a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it.

        Raises:
            TTraceError: when it is not a history of this version, or cannot be opened.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=30)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare()
        except (sqlite3.Error, OSError) as error:
            raise TTraceError(f"{path}: the history cannot be stored there ({error})") from error

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and not tables:
            with self._db:
                # executescript would commit between the statements.
                for statement in _SCHEMA.split(";")[:-1]:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise TTraceError(
                f"{self._path}: its format is {version}, this version keeps {_VERSION}: "
                "choose another --history"
            )

    def add(self, night: Night) -> None:
        """Store a night, all of it or nothing."""
        with self._errors(), self._db:
            number = self._db.execute(
                "INSERT INTO nights (began, seconds, exit_code, versions, options, gaps, scores)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    night.began,
                    night.seconds,
                    int(night.exit_code),
                    json.dumps(dict(night.versions)),
                    json.dumps(dict(night.options)),
                    json.dumps([dataclasses.astuple(gap) for gap in night.gaps]),
                    json.dumps(dict(night.scores)),
                ),
            ).lastrowid
            # The columns are the fields of a case, in their order.
            self._db.executemany(
                "INSERT INTO cases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(number, at, *dataclasses.astuple(case)) for at, case in enumerate(night.cases)],
            )

    def last(self, count: int) -> list[Night]:
        """The latest nights, in the order of their dates."""
        with self._errors():
            rows = self._db.execute("SELECT id FROM nights ORDER BY id DESC LIMIT ?", (count,))
            return [self._night(number) for (number,) in reversed(rows.fetchall())]

    def last_good(self) -> Night | None:
        """The latest night without a miss, a false alarm or a gap."""
        with self._errors():
            row = self._db.execute(
                "SELECT id FROM nights WHERE exit_code = ? ORDER BY id DESC LIMIT 1",
                (int(ExitCode.EQUIVALENT),),
            ).fetchone()
            return self._night(row[0]) if row else None

    def _night(self, number: int) -> Night:
        began, seconds, versions, options, gaps, scores = self._db.execute(
            "SELECT began, seconds, versions, options, gaps, scores FROM nights WHERE id = ?",
            (number,),
        ).fetchone()
        cases = self._db.execute("SELECT * FROM cases WHERE night = ? ORDER BY number", (number,))
        return Night(
            began=began,
            seconds=seconds,
            versions=json.loads(versions),
            options=json.loads(options),
            cases=tuple(
                NightCase(NightPart(part), name, State(state), *rest)
                for _, _, part, name, state, *rest in cases
            ),
            gaps=tuple(
                Gap(NightPart(part), reason, chosen) for part, reason, chosen in json.loads(gaps)
            ),
            scores=json.loads(scores),
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            raise TTraceError(f"{self._path}: the history is damaged ({error})") from error
