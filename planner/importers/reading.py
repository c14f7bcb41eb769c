"""Checked access to files that others wrote: every error names the file, and the key, the line or the column."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner import files

MOST_LAYERS, MOST_DEVICES = 10_000, 1000  # of a model, of a node


def short(value: object) -> str:
    """`value` as it fits into an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def fingerprint(file: Path) -> str:
    """Name and content hash of a file, for the source of a profile."""
    return f"{file.name} (sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:12]})"


def fingerprints(found: Sequence[Path]) -> str:
    """One hash over several files, with how many they are; of a single file its name."""
    if len(found) == 1:
        return fingerprint(found[0])
    whole = hashlib.sha256()
    for file in found:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{len(found)} files (sha256 {whole.hexdigest()[:12]})"


def positive(key: str, value: float) -> float:
    """`value` of an option, which has to be above 0."""
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key}: {value!r} is not a finite number above 0")
    return value


def counted(key: str, value: int | None, most: int = 10**15) -> None:
    """Refuse an option, or a figure, that is given but is no number from 1 to `most`; more is a slip."""
    if value is not None and not 1 <= value <= most:
        raise ValueError(f"{key}: {value} is not between 1 and {most}")


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Start the errors of values made inside with the place that they come from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def needed(key: str, value: object, because: str, example: str) -> None:
    """Refuse an option that is None although the format cannot do without."""
    if value is None:
        raise ValueError(f"{key}: missing; {because}; give for example {key}={example}")


@dataclass(frozen=True, slots=True)
class Json:
    """A value of a JSON file together with the file and the keys that lead to it, so that errors can name them."""

    value: object
    file: Path
    keys: tuple[str, ...] = ()
    line: int | None = None  # of a file with one value per line

    @classmethod
    def read(cls, file: Path) -> Json:
        return cls(files.read(file), file)

    @classmethod
    def parse(cls, line: Line) -> Json:
        """The value that a line of a JSONL file holds."""
        try:
            return cls(json.loads(line.text), line.file, (), line.number)
        except json.JSONDecodeError as error:
            raise ValueError(f"{line.where} column {error.colno}: {error.msg}") from None

    @property
    def where(self) -> str:
        place = str(self.file) if self.line is None else f"{self.file}: line {self.line}"
        return f"{place}: {' > '.join(self.keys)}" if self.keys else place

    def wrong(self, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {short(self.value)} is not {expected}")

    def _inside(self, key: str, value: object) -> Json:
        return Json(value, self.file, (*self.keys, key), self.line)

    def items(self) -> Iterator[tuple[str, Json]]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        for key, value in self.value.items():
            yield str(key), self._inside(str(key), value)

    def by_count(self) -> dict[int, Json]:
        """Entries whose keys are whole numbers as strings, in the order of the numbers."""
        entries = {}
        for key, entry in self.items():
            if not key.isdecimal():
                raise ValueError(f"{self.where}: key {key!r} is not a whole number")
            entries[int(key)] = entry
        return dict(sorted(entries.items()))

    def has(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def at(self, key: str) -> Json:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            close = files.did_you_mean(key, map(str, self.value))
            raise ValueError(f"{self.where}: key {key!r} is missing" + (f"; there are {close}" if self.value else ""))
        return self._inside(key, self.value[key])

    def list(self, length: int | None = None) -> tuple[Json, ...]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if length is not None and len(self.value) != length:
            raise ValueError(f"{self.where}: {len(self.value)} values, expected {length}")
        return tuple(self._inside(str(i), value) for i, value in enumerate(self.value))

    def number(self, minimum: float = 0.0) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.wrong("a number")
        if not (math.isfinite(self.value) and self.value >= minimum):
            raise self.wrong("a finite number" + (f" >= {minimum:g}" if math.isfinite(minimum) else ""))
        return float(self.value)

    def count(self, minimum: int = 0) -> int:
        number = self.number(minimum)
        if number != int(number):
            raise self.wrong("a whole number")
        return int(number)

    def flag(self) -> bool:
        """True or false, also written as 1 or 0."""
        if self.value not in (True, False, 0, 1):
            raise self.wrong("true, false, 1 or 0")
        return bool(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a text file, or a part of it, with its place."""

    text: str
    file: Path
    number: int
    column: str = ""  # name of the column or field, where there is one

    @property
    def where(self) -> str:
        return f"{self.file}: line {self.number}" + (f": {self.column}" if self.column else "")

    def wrong(self, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {short(self.text)} is not {expected}")

    def part(self, text: str, column: str) -> Line:
        return Line(text, self.file, self.number, column)

    def value(self, minimum: float = 0.0) -> float:
        try:
            number = float(self.text)
        except ValueError:
            raise self.wrong("a number") from None
        if not (math.isfinite(number) and number >= minimum):
            raise self.wrong(f"a finite number >= {minimum:g}")
        return number


def lines(file: Path) -> tuple[Line, ...]:
    """The lines of a text file that are not blank."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
    found = tuple(Line(line, file, i) for i, line in enumerate(text.split("\n"), start=1) if line.strip())
    if not found:
        raise ValueError(f"{file}: the file is empty")
    return found


def table(file: Path, columns: Sequence[str]) -> tuple[dict[str, Line], ...]:
    """The rows of a CSV file with a header that has at least these columns."""
    head, *rest = lines(file)
    header = [name.strip() for name in next(csv.reader([head.text]))]
    for name in columns:
        if name not in header:
            raise ValueError(f"{head.where}: column {name!r} is missing; there are {', '.join(header)}")
    rows = []
    for line in rest:
        entries = next(csv.reader([line.text]))
        if len(entries) != len(header):
            raise ValueError(f"{line.where}: {len(entries)} values, expected {len(header)}: {', '.join(header)}")
        rows.append({name: line.part(entry.strip(), name) for name, entry in zip(header, entries)})
    if not rows:
        raise ValueError(f"{file}: no rows below the header")
    return tuple(rows)
