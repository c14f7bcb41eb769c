"""What the benchmarks share: options, timing, the environment, tables, and results written whole."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from planner import files

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("numpy", "ortools", "pulp", "networkx")
SOLVERS = ("numpy", "networkx", "pulp", "ortools.linear_solver.pywraplp", "ortools.sat.python.cp_model")
START, END = "<!-- printed by the program: start -->", "<!-- printed by the program: end -->"


def data_folder() -> Path:
    """Where others' published measurements lie: the folder HPP_DATA names, or ../shared/data beside the repository."""
    return Path(os.environ.get("HPP_DATA", ROOT.parent / "shared" / "data"))


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    out = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(description or "").splitlines()[0])
    out.add_argument("--out", type=Path, default=ROOT / "out" / name, metavar="DIR", help="results and plans go here")
    out.add_argument("--cases", nargs="+", default=None, metavar="CASE", help="only these, by name")
    out.add_argument("--runs", type=int, default=3, metavar="N", help="times are the median of N runs (3)")
    out.add_argument("--readme", action="store_true", help="put the printed tables into the benchmark's README.md")
    return out


def chosen(names: Sequence[str], asked: Sequence[str] | None) -> list[str]:
    """The cases to run, in their own order."""
    unknown = sorted(set(asked or ()) - set(names))
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if asked is None or name in asked]


# Timing.


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A value and the median seconds it took: by the clock, and of processor."""

    value: T
    wall_s: float
    cpu_s: float


def timed(call: Callable[[], T], runs: int = 1) -> Timed[T]:
    """The last value of `runs` calls. Processor seconds are those of this process and the processes it waited for."""
    walls, cpus = [], []
    for _ in range(max(1, runs)):
        wall, cpu = time.perf_counter(), _processor_s()
        value = call()
        walls.append(time.perf_counter() - wall)
        cpus.append(_processor_s() - cpu)
    return Timed(value, statistics.median(walls), statistics.median(cpus))


def _processor_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed_process(arguments: Sequence[str], runs: int = 1) -> Timed[str]:
    """A whole Python process from start to exit, run in the root of the repository; its output."""

    def call() -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
        return done.stdout

    return timed(call, runs)


def import_solvers() -> None:
    """Load the libraries that the planner otherwise loads during its first plan."""
    for name in SOLVERS:
        import_module(name)


# Results.


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when the figures were taken; `load` is the average number of runnable processes, at start and end."""

    date: str
    processor: str
    processors: int
    memory_gib: float
    system: str
    python: str
    packages: tuple[tuple[str, str], ...]
    load: tuple[float, float]

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {number}" for name, number in self.packages)
        return (
            f"{self.date}, {self.processor}, {self.processors} processors, {self.memory_gib:.0f} GiB, {self.system}, "
            f"Python {self.python}, {packages}; load {self.load[0]:.1f} at the start, {self.load[1]:.1f} at the end."
        )


def load() -> float:
    """Average number of runnable processes over the last minute: what else the machine did."""
    return os.getloadavg()[0]


def environment(load_before: float) -> Environment:
    """This machine, now."""
    return Environment(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        processor=_processor_name(),
        processors=os.cpu_count() or 0,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=tuple((name, version(name)) for name in PACKAGES),
        load=(load_before, load()),
    )


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def finish(name: str, options: argparse.Namespace, where: Environment, text: str, **results: Any) -> None:
    """Print the tables, write results.json whole, and, if asked to, put the tables into the README."""
    runs = "1 run each" if options.runs == 1 else f"the median of {options.runs} runs"
    text = f"{text.rstrip()}\n\nTimes are of {runs}. {where}\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    files.write(options.out / "results.json", files.dumps({"benchmark": name, "environment": asdict(where), **results}))
    print(f"Written to {options.out}")
    if options.readme:
        _into_readme(ROOT / "benchmarks" / name / "README.md", text)


def _into_readme(path: Path, text: str) -> None:
    before, _, rest = path.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    files.write(path, f"{before}{START}\n\n{text}\n{END}{after}")


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A markdown table of rows with equal keys; padded, so that it reads in a terminal too, numbers to the right."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    width = [max(3, *map(len, column)) for column in zip(*cells)]
    left = [any(text[:1].isalpha() or text[:1] == "`" for text in column[1:]) for column in zip(*cells)]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(x.ljust(w) if a else x.rjust(w) for x, w, a in zip(row, width, left)) + " |"

    rule = "| " + " | ".join("-" * w if a else "-" * (w - 1) + ":" for w, a in zip(width, left)) + " |"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def verdict(value: bool | None) -> str:
    """yes, NO, or "-" for what could not be told."""
    return {True: "yes", False: "NO", None: "-"}[value]


def tally(what: str, names: Sequence[str], missed: Sequence[str]) -> str:
    """A sentence: how many reached a target, and which did not."""
    return f"{what}: {len(names) - len(missed)} of {len(names)}{', not ' if missed else ''}{', '.join(missed)}."


def figure(value: float | None, digits: int = 3, missing: str = "-") -> str:
    """A number with so many significant digits, without exponent; `missing` for None."""
    if value is None:
        return missing
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}"


def seconds(value: float | None) -> str:
    """Seconds to milliseconds, or "-"."""
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as per cent, or "-"."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"
