"""planner.files: one reader, writer and (de)serialiser."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from planner import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    BRIEF: ClassVar[bool] = True

    radius_m: float
    spokes: int = 32

    def __post_init__(self) -> None:
        if self.radius_m <= 0:
            raise ValueError(f"radius_m: {self.radius_m}, expected metres above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sledge:
    runners: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cart(files.Document):
    SCHEMA: ClassVar[str] = "cart/1"

    name: str
    wheels: tuple[Wheel, ...] = ()
    size: tuple[int, int] = (1, 1)
    colour: Literal["red", "blue"] = "red"
    cargo: Wheel | Sledge | None = None
    limit: float | None = None
    either: int | str = 0
    braked: bool = False
    parts: tuple[tuple[str, float], ...] = field(default=(), metadata=files.MAPPING)
    by_size: tuple[tuple[int, int], ...] = field(default=(), metadata=files.MAPPING)
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @files.cached
    def total(self, times: int = 1) -> int:
        CALLS.append(times)
        return times * len(self.wheels)


CALLS: list[int] = []


def cart(**changes: Any) -> dict[str, Any]:
    return {"schema": "cart/1", "name": "hay", **changes}


def refusal(data: Any) -> str:
    with pytest.raises(ValueError) as caught:
        Cart.from_dict(data, "cart.json")
    return str(caught.value)


FULL = Cart(
    name="hay",
    wheels=(Wheel(radius_m=0.5), Wheel(radius_m=0.25, spokes=12)),
    size=(2, 3),
    cargo=Sledge(runners=2),
    limit=1.5,
    either="many",
    parts=(("hub", 1e-7), ("rim", 0.1)),
    by_size=((2, 20), (4, 40)),
)


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """A value saved and loaded, as JSON or YAML, equals itself and keeps its digest."""
    path = tmp_path / f"cart.{suffix}"
    FULL.save(path)
    assert Cart.load(path) == FULL
    assert Cart.load(path).digest == FULL.digest
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # the temporary file is gone


def test_text_is_canonical() -> None:
    """Equal values give equal text; short objects stand on one line, long ones are broken, all lines fit."""
    text = files.dumps(FULL)
    assert text == files.dumps(Cart.from_dict(FULL.to_dict()))
    assert text.endswith("}\n")
    assert ' "wheels": [{"radius_m": 0.5}, {"radius_m": 0.25, "spokes": 12}],\n' in text  # spokes 32 is the default
    assert max(map(len, files.dumps({"a": [[i, "x" * 30] for i in range(9)]}).splitlines())) <= 120
    assert json.loads(text) == FULL.to_dict()
    assert text.splitlines()[1] == ' "schema": "cart/1",'


def test_an_integer_for_a_float_changes_nothing() -> None:
    """limit 2 and limit 2.0 are the same value: same text, same digest."""
    assert files.dumps(Cart(name="a", limit=2)) == files.dumps(Cart(name="a", limit=2.0))
    assert Cart(name="a", limit=2).digest == Cart.from_dict(cart(name="a", limit=2)).digest


def test_digest_sees_every_change_but_key_order() -> None:
    """The digest changes with any value, and not with the order of keys."""
    assert files.digest({"a": 1, "b": 2}) == files.digest({"b": 2, "a": 1}) != files.digest({"a": 1, "b": 3})
    assert len(FULL.digest) == 16
    assert Cart(name="a").digest != Cart(name="b").digest


def test_numpy_becomes_python() -> None:
    """numpy scalars and arrays are written as plain numbers."""
    data = {"i": np.int64(3), "x": np.float64(0.1), "xs": np.arange(3), "yes": np.bool_(True)}
    assert files.dumps(data) == '{\n "i": 3,\n "x": 0.1,\n "xs": [0, 1, 2],\n "yes": true\n}\n'


def test_what_has_no_json_form_is_an_error() -> None:
    """An object that is no data, or an infinity, is refused, not written as something else."""
    with pytest.raises(TypeError, match="no JSON form"):
        files.dumps({"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        files.dumps({"a": float("inf")})


def test_mapping_keys_keep_their_type() -> None:
    """{"2": 20} in a file is the pair (2, 20) where keys are whole numbers."""
    assert Cart.from_dict(cart(by_size={"2": 20})).by_size == ((2, 20),)
    assert FULL.to_dict()["by_size"] == {"2": 20, "4": 40}
    assert refusal(cart(by_size={"two": 20})) == "cart.json: by_size: key 'two' is not a whole number"


def test_union_by_shape() -> None:
    """Of two dataclasses the one whose fields match the keys is taken; no match is an error."""
    assert Cart.from_dict(cart(cargo={"runners": 2})).cargo == Sledge(runners=2)
    assert Cart.from_dict(cart(cargo={"radius_m": 2})).cargo == Wheel(radius_m=2.0)
    assert "cargo: an object with keys wings is not an object (Wheel) or an object (Sledge)" in refusal(
        cart(cargo={"wings": 2})
    )
    assert Cart.from_dict(cart(either="x")).either == "x"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (cart(colour="blu"), "cart.json: colour: 'blu' is not among red, blue; did you mean 'blue'?"),
        (cart(wheles=[]), "cart.json: key 'wheles' is not among the keys: name, wheels, size, "),
        (cart(wheles=[]), "did you mean 'wheels'?"),
        (cart(wheels=[{"radius": 1}]), "cart.json: wheels[0]: key 'radius' is not among the keys: radius_m, spokes;"),
        (cart(wheels=[{"spokes": 1}]), "cart.json: wheels[0].radius_m: missing, expected a number"),
        (cart(wheels=[{"radius_m": -1}]), "cart.json: wheels[0].radius_m: -1.0, expected metres above 0"),
        (cart(wheels=[{"radius_m": "2 m"}]), "cart.json: wheels[0].radius_m: expected a number, got text '2 m'"),
        (cart(wheels=[3]), "cart.json: wheels[0]: expected an object for Wheel, got 3"),
        (cart(wheels={}), "cart.json: wheels: expected a list, each entry an object (Wheel), got an empty object"),
        (
            cart(size=[1, 2, 3]),
            "cart.json: size: expected a list of 2: a whole number, a whole number, got a list of 3",
        ),
        (cart(size=[1, 2.5]), "cart.json: size[1]: expected a whole number, got 2.5"),
        (cart(size=[1, True]), "cart.json: size[1]: expected a whole number, got true"),
        (cart(braked=1), "cart.json: braked: expected true or false, got 1"),
        (cart(name=None), "cart.json: name: expected text, got null"),
        (cart(limit=float("nan")), "cart.json: limit: nan is not a finite number"),
        (cart(limit=[1]), "cart.json: limit: expected a number, got a list of 1"),
        ({"name": "hay"}, "cart.json: schema: missing, expected 'cart/1'"),
        ({"schema": "cart/2"}, "cart.json: schema: 'cart/2' is not 'cart/1'"),
        ([], "cart.json: expected an object for Cart, got a list of 0"),
    ],
)
def test_refusals_name_file_key_value_and_what_is_right(data: Any, message: str) -> None:
    """Each wrong entry is a ValueError that names the file, the key, the value and what would be right."""
    assert message in refusal(data)


def test_a_float_without_fraction_is_a_whole_number() -> None:
    """4e10, as people write bytes, is accepted for a whole number."""
    assert Cart.from_dict(cart(size=[4e10, 1.0])).size == (40_000_000_000, 1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": 1,\n "b": }', "line 2 column 7: Expecting value"),
        ("a.json", '{"a": 1, "a": 2}', "key 'a' occurs twice in one object"),
        ("a.json", "[1]", "expected an object with keys at the top level, got a list of 1"),
        ("a.json", " \n", "the file is empty"),
        ("a.yaml", "a: 1\nb: [1, 2\nc: 3\n", "line 3 column 2: "),
        ("a.yaml", "a: 1\nb: 2\na: 3\n", "line 3 column 1: key 'a' occurs twice in one object"),
        ("a.yaml", "\t- a\n", "line 1 column 1: "),
        ("a.yaml", "a: !!python/name:os.system\n", "line 1 column 4: "),
        ("a.yml", "- 1\n", "expected an object with keys"),
    ],
)
def test_syntax_errors_name_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Bad syntax, a repeated key or an empty file is a ValueError with the file and, where known, line and column."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as caught:
        files.read(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file (with the nearest name), a directory, another suffix and binary data are named as such."""
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    for name, message in {
        "profil.json": "no such file; did you mean 'profile.json'?",
        "nowhere/a.json": "no such file (there is no directory",
        "binary.json": "not UTF-8 text (byte 0)",
        "folder.json": "cannot be read: Is a directory",
        "profile.toml": "suffix '.toml' is not among .json, .yaml, .yml",
    }.items():
        with pytest.raises(ValueError) as caught:
            files.read(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: {message}")


def test_yaml_reads_as_people_write_it(tmp_path: Path) -> None:
    """In YAML 1e9 is a number and a date is text; anchors and merges work."""
    path = tmp_path / "a.yaml"
    path.write_text("bytes: 16e9\nalpha: 1e-5\ndate: 2024-05-01\nbase: &base {x: 1}\nmore: {<<: *base, y: 2}\n")
    assert files.read(path) == {
        "bytes": 16e9,
        "alpha": 1e-5,
        "date": "2024-05-01",
        "base": {"x": 1},
        "more": {"x": 1, "y": 2},
    }


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """Writing where that is impossible names the path; the file that was there and the directory stay as they were."""
    path = tmp_path / "a.json"
    files.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "\ud800")
    assert path.read_text() == "old"
    with pytest.raises(ValueError, match="cannot be written: No such file or directory"):
        files.write(tmp_path / "no" / "a.json", "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_cached_computes_once_per_arguments() -> None:
    """A cached method runs once per value and arguments; an equal value has a cache of its own."""
    CALLS.clear()
    one, other = Cart(name="a"), Cart(name="a")
    assert [one.total(), one.total(), one.total(2), one.total(times=3), one.total(times=3), other.total()] == [0] * 6
    assert CALLS == [1, 2, 3, 1]
    assert one == other


def test_import_is_light() -> None:
    """`import planner` loads neither numpy, networkx, yaml nor a solver, and a value of it no numpy either."""
    code = (
        "import sys, planner\n"
        "heavy = {'numpy', 'networkx', 'yaml', 'pulp', 'ortools', 'torch', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "from planner import Job\n"
        "print(heavy, Job().global_batch, 'numpy' in sys.modules, 'plan' in dir(planner))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == ["set()", "256", "False", "True"]


def test_a_mistyped_name_in_the_package() -> None:
    """`planner.Profil` is an AttributeError that lists what there is."""
    import planner

    with pytest.raises(AttributeError, match="'Profil'; it offers Cluster, Infeasible, Job, ModelProfile, Plan, plan"):
        planner.Profil  # noqa: B018
