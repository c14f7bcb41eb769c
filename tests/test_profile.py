"""planner.profile: what a layer costs, measured."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import cluster, profile

from planner.profile import Cell, Conditions, LayerKind, ModelProfile, sanity

BLOCK = LayerKind(name="block", parameters=100, output_bytes=10)
HEAD = LayerKind(name="head", parameters=30, output_bytes=0, logits_bytes=8)


def cell(kind: str, device_type: str = "A100", tp: int = 1, micro_batch: int = 1, **figures: Any) -> Cell:
    given: dict[str, Any] = {"forward_s": 1.0, "backward_s": 2.0, "activation_bytes": 10, **figures}
    return Cell(kind=kind, device_type=device_type, tp=tp, micro_batch=micro_batch, **given)


def model(*cells: Cell, **fields: Any) -> ModelProfile:
    given: dict[str, Any] = {"layers": ("block", "block", "head"), "kinds": (BLOCK, HEAD), **fields}
    return ModelProfile(name="m", cells=cells, **given)


def grid(times: Mapping[tuple[str, int], float], **fields: Any) -> ModelProfile:
    """Profile of (kind, micro-batch) -> forward seconds."""
    return model(*(cell(kind, micro_batch=b, forward_s=t) for (kind, b), t in times.items()), **fields)


def forward(costs: Any) -> list[float]:
    assert costs is not None
    return list(np.round(costs.forward_s, 12))


def test_unequal_devices_have_costs_of_their_own() -> None:
    """Costs are per device type and layer kind: no device type is a multiple of another."""
    # A100: block 1, head 2. V100: block 4, head 3. The ratio is 4 for the block and 1.5 for the head.
    m = model(
        cell("block", forward_s=1.0, update_s=0.25, workspace_bytes=7),
        cell("head", forward_s=2.0),
        cell("block", "V100", forward_s=4.0),
        cell("head", "V100", forward_s=3.0),
    )
    assert m.device_types == ("A100", "V100")
    assert forward(m.layer_costs("A100", 1, 1)) == [1, 1, 2]
    assert forward(m.layer_costs("V100", 1, 1)) == [4, 4, 3]
    costs = m.layer_costs("A100", 1, 1)
    assert costs is not None
    assert costs.measured and not costs.extrapolated
    assert list(costs.backward_s) == [2, 2, 2]
    assert list(costs.update_s) == [0.25, 0.25, 0]
    assert list(costs.activation_bytes) == [10, 10, 10]
    assert list(costs.workspace_bytes) == [7, 7, 0]
    with pytest.raises(ValueError):
        costs.forward_s[0] = 0  # read-only


def test_layers_follow_their_kinds() -> None:
    """kind_of gives every layer's kind in order; a kind no layer has is no hole."""
    m = model(cell("block"), cell("head"), kinds=(HEAD, BLOCK, LayerKind(name="spare", parameters=1, output_bytes=1)))
    assert [m.kind_of(l).name for l in range(m.num_layers)] == ["block", "block", "head"]
    assert m.degrees("A100") == (1,)
    assert m.holes() == ()


def test_interpolates_between_measured_sizes() -> None:
    """Between two sizes every kind lies on the line between its own two neighbours; measured says so."""
    # block 1, 2, 6 s at b = 1, 2, 4: at 3 (2 + 6) / 2 = 4. head 3 and 9 s at b = 1, 4: at 2 3 + 6 / 3 = 5, at 3 7.
    m = grid({("block", 1): 1, ("block", 2): 2, ("block", 4): 6, ("head", 1): 3, ("head", 4): 9})
    assert forward(m.layer_costs("A100", 1, 3)) == [4, 4, 7]
    assert forward(m.layer_costs("A100", 1, 2)) == [2, 2, 5]
    for b, measured in ((1, True), (2, False), (3, False), (4, True)):
        costs = m.layer_costs("A100", 1, b)
        assert costs is not None
        assert (costs.measured, costs.extrapolated) == (measured, False)
    assert m.micro_batches("A100", 1) == (1, 4)  # 2 was not measured for the head


def test_never_extrapolates_in_silence() -> None:
    """Outside the measured sizes of any kind there is no cost, unless asked for, and then it is marked."""
    # block 1, 2 s at b = 2, 4: at 8 2 + 2 = 4. head 3, 4 at b = 2, 8: measured.
    m = grid({("block", 2): 1, ("block", 4): 2, ("head", 2): 3, ("head", 8): 4})
    assert m.layer_costs("A100", 1, 8) is None
    assert m.layer_costs("A100", 1, 1) is None
    costs = m.layer_costs("A100", 1, 8, extrapolate=True)
    assert forward(costs) == [4, 4, 4]
    assert costs is not None
    assert costs.extrapolated and not costs.measured
    inside = m.layer_costs("A100", 1, 4, extrapolate=True)
    assert inside is not None
    assert not inside.extrapolated


def test_extrapolation_stays_plausible() -> None:
    """A larger micro-batch costs no less than the last; a smaller one at most the first, and at least its share."""
    # Upwards: 4, 3 s at b = 1, 2 falls, so 8 takes the 3 of b = 2. Downwards: 1, 5 s at b = 2, 3 (4 s a sample) gives
    # -3 at b = 1; its share of the first is 1 / 2. And 3, 2 s at b = 2, 3 gives 4 at b = 1, but no more than 3.
    m = grid({("block", 1): 4, ("block", 2): 3, ("head", 1): 1, ("head", 2): 1})
    assert forward(m.layer_costs("A100", 1, 8, extrapolate=True)) == [3, 3, 1]
    m = grid({("block", 2): 1, ("block", 3): 5, ("head", 2): 3, ("head", 3): 2})
    assert forward(m.layer_costs("A100", 1, 1, extrapolate=True)) == [0.5, 0.5, 3]


def test_one_size_cannot_be_extrapolated() -> None:
    """One measured size says nothing about others, even with extrapolation."""
    m = grid({("block", 1): 1, ("head", 1): 1})
    assert m.layer_costs("A100", 1, 2, extrapolate=True) is None


def test_cells_marked_extrapolated_need_permission() -> None:
    """A cell that is no measurement is a hole unless extrapolation is asked for; then it is used as it stands."""
    m = model(
        cell("block"),
        cell("head"),
        cell("block", micro_batch=2),
        cell("head", micro_batch=2, forward_s=7, extrapolated=True),
    )
    assert m.micro_batches("A100", 1) == (1,)
    assert m.layer_costs("A100", 1, 2) is None
    costs = m.layer_costs("A100", 1, 2, extrapolate=True)
    assert forward(costs) == [1, 1, 7]
    assert costs is not None
    assert costs.extrapolated and not costs.measured
    assert m.holes() == ("A100, tp 1, micro-batch 2: head",)


def test_holes_are_legal_and_listed() -> None:
    """Missing cells are named; what does not need them still has costs."""
    # A100: tp 1 at 1 and 2, tp 2 at 1 (block only). So tp 2 lacks the head at 1, and everything at 2.
    m = model(
        cell("block"),
        cell("head"),
        cell("block", micro_batch=2),
        cell("head", micro_batch=2),
        cell("block", tp=2),
        cell("block", "V100", micro_batch=4),
        cell("head", "V100", micro_batch=4),
    )
    assert m.holes() == ("A100, tp 2, micro-batch 1: head", "A100, tp 2, micro-batch 2: every kind")
    assert m.degrees("A100") == (1,)
    assert m.degrees("V100") == (1,)
    assert m.degrees("H100") == ()
    assert m.micro_batches("A100", 1) == (1, 2)
    assert m.micro_batches("A100", 2) == ()
    assert m.micro_batches("H100", 1) == ()
    assert m.layer_costs("A100", 2, 1) is None
    assert m.layer_costs("H100", 1, 1, extrapolate=True) is None


def test_a_degree_may_be_complete_by_interpolation_only() -> None:
    """tp 2 counts if some size has a cost for every kind, measured or interpolated."""
    # block at 1 and 4, head at 2: at 2 the block is interpolated.
    m = grid({("block", 1): 1, ("block", 4): 4, ("head", 2): 2})
    assert m.degrees("A100") == (1,)
    assert m.micro_batches("A100", 1) == ()
    assert forward(m.layer_costs("A100", 1, 2)) == [2, 2, 2]


def test_tied_parameters_count_once() -> None:
    """The total counts a tied tensor once: 50 + 2 x 100 + (60 - 50) = 260."""
    embedding = LayerKind(name="embedding", parameters=50, output_bytes=10)
    head = LayerKind(name="head", parameters=60, output_bytes=0, tied_to="embedding", tied_parameters=50)
    m = model(
        cell("block"), cell("head"), cell("embedding"),
        layers=("embedding", "block", "block", "head"), kinds=(embedding, BLOCK, head),
    )  # fmt: skip
    assert m.parameters == 260


def test_shards_round_up_unless_stated() -> None:
    """A rank holds parameters / tp rounded up, or what shard_parameters says (norms are not split, for one)."""
    kind = LayerKind(name="block", parameters=101, output_bytes=1, shard_parameters=((2, 60),))
    assert [kind.shard(tp) for tp in (1, 2, 4)] == [101, 60, 26]


def test_heads_rule() -> None:
    """tp divides the heads, and divides the key-value heads or is a multiple of them (which are then copied)."""
    # 40 heads: 1, 2, 4, 5, 8; with 8 key-value heads 5 neither divides 8 nor is a multiple of it.
    plain, grouped = model(cell("block"), num_heads=40), model(cell("block"), num_heads=40, num_kv_heads=8)
    assert [tp for tp in range(1, 9) if plain.tp_allowed(tp)] == [1, 2, 4, 5, 8]
    assert [tp for tp in range(1, 9) if grouped.tp_allowed(tp)] == [1, 2, 4, 8]
    # 8 key-value heads of 64: tp 16 copies each key-value head to two ranks.
    assert model(cell("block"), num_heads=64, num_kv_heads=8).tp_allowed(16)
    assert all(model(cell("block")).tp_allowed(tp) for tp in range(1, 9))  # nothing known


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": ("block", "blok")}, "layers[1]: kind 'blok' is not among kinds: block, head; did you mean 'block'?"),
    ({"layers": ()}, "layers: empty, expected at least one layer"),
    ({"kinds": (BLOCK, HEAD, BLOCK)}, "kinds[2]: 'block' occurs twice"),
    ({"cells": ()}, "cells: empty, expected at least one measurement"),
    ({"cells": (cell("haed"),)}, "cells[0].kind: 'haed' is not among kinds: block, head; did you mean 'head'?"),
    (
        {"cells": (cell("block"), cell("head"), cell("block"))},
        "cells[2]: kind 'block' on 'A100', tp 1, micro-batch 1 is already cells[0]",
    ),
    (
        {"cells": (cell("block"), cell("block", "V100", forward_s=0))},
        "cells: forward_s is 0 in every cell of 'V100', expected seconds",
    ),
    ({"num_heads": 0}, "num_heads: 0 is less than 1"),
    ({"num_heads": 40, "num_kv_heads": 6}, "num_kv_heads: 6 does not divide num_heads 40"),
    ({"num_kv_heads": 6}, "num_kv_heads: 6 does not divide num_heads None"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_profile_refuses(fields: dict[str, Any], message: str) -> None:
    """What does not fit together is refused with key, value and what would be right."""
    with pytest.raises(ValueError) as caught:
        model(*fields.pop("cells", (cell("block"), cell("head"))), **fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tied_to": "embeding"}, "kinds[1].tied_to: 'embeding' is not among the other kinds: embedding, block; did"),
        ({"tied_to": "head"}, "kinds[1].tied_to: 'head' is not among the other kinds"),
        ({"tied_to": "block"}, "kinds[1].tied_to: 'block' is the kind of 2 layers, expected one"),
        ({"tied_parameters": 40}, "kinds[1].tied_parameters: 40 is more than the 20 parameters of 'embedding'"),
    ],
)
def test_ties_must_have_one_partner(changes: dict[str, Any], message: str) -> None:
    """A tied kind names another kind that one layer has and that is large enough."""
    embedding = LayerKind(name="embedding", parameters=20, output_bytes=10)
    head = replace(HEAD, parameters=50, **{"tied_to": "embedding", "tied_parameters": 20, **changes})
    with pytest.raises(ValueError) as caught:
        model(cell("block"), layers=("embedding", "block", "block", "head"), kinds=(embedding, head, BLOCK))
    assert str(caught.value).startswith(message)


def test_ties_do_not_chain() -> None:
    """A kind tied to a tied kind has to name the one that holds the tensor."""
    a = LayerKind(name="a", parameters=5, output_bytes=1)
    b = replace(a, name="b", tied_to="a", tied_parameters=5)
    c = replace(a, name="c", tied_to="b", tied_parameters=5)
    with pytest.raises(ValueError, match="'b' is tied to 'a' itself; name that"):
        model(cell("a"), layers=("a", "b", "c"), kinds=(a, b, c))


@pytest.mark.parametrize("key", ["forward_s", "backward_s", "update_s"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_are_finite_and_not_negative(key: str, value: float) -> None:
    """A negative, infinite or undefined time names the cell and the value."""
    with pytest.raises(ValueError) as caught:
        cell("block", "V100", 2, 4, **{key: value})
    assert str(caught.value) == (
        f"{key}: {value} of kind 'block' on 'V100', tp 2, micro-batch 4, expected seconds of at least 0"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cell("block", tp=0), "tp: 0 is less than 1"),
        (lambda: cell("block", micro_batch=0), "micro_batch: 0 is less than 1"),
        (lambda: cell("block", activation_bytes=-5), "activation_bytes: -5 of kind 'block' on 'A100'"),
        (lambda: replace(BLOCK, parameters=-1), "parameters: -1 of kind 'block' is negative"),
        (lambda: replace(BLOCK, name=""), "name: empty"),
        (
            lambda: replace(BLOCK, tied_to="head"),
            "tied_parameters: 0 with tied_to 'head' of kind 'block', expected both",
        ),
        (
            lambda: replace(BLOCK, tied_parameters=3),
            "tied_parameters: 3 with tied_to None of kind 'block', expected both",
        ),
        (
            lambda: replace(BLOCK, tied_to="head", tied_parameters=101),
            "tied_parameters: 101 of kind 'block' is more than",
        ),
        (lambda: replace(BLOCK, shard_parameters=((2, 40),)), "shard_parameters: 40 per rank at tp 2 of kind 'block'"),
        (
            lambda: replace(BLOCK, shard_parameters=((2, 101),)),
            "shard_parameters: 101 per rank at tp 2 of kind 'block'",
        ),
        (lambda: replace(BLOCK, shard_parameters=((2, 50), (2, 60))), "shard_parameters: kind 'block' has a tp degree"),
        (lambda: Conditions(sequence_length=0), "sequence_length: 0 is less than 1"),
        (lambda: Conditions(tp_communication="out"), "tp_communication: 'out' is not among inside, outside"),  # type: ignore[arg-type]
        (lambda: Conditions(update_per="model"), "update_per: 'model' is not among layer, stage"),  # type: ignore[arg-type]
    ],
)
def test_parts_refuse(make: Any, message: str) -> None:
    """Kinds, cells and conditions refuse what makes no sense, by key and value."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """A random profile of unequal devices, saved and loaded, is the same value with the same digest and costs."""
    m = profile(seed=3, ends=True, tied=True, tps=(1, 2), micro_batches=(1, 2), num_heads=16, warnings=("beware",))
    m = replace(m, kinds=(replace(m.kinds[0], shard_parameters=((2, 80_000_000),)), *m.kinds[1:]))
    path = tmp_path / f"profile.{suffix}"
    m.save(path)
    again = ModelProfile.load(path)
    assert again == m
    assert again.digest == m.digest != profile(seed=4).digest
    assert forward(again.layer_costs("slow", 2, 1)) == forward(m.layer_costs("slow", 2, 1))


def test_the_file_is_compact_and_readable() -> None:
    """Layers are runs, cells one row each under one header; an object per cell and bare kinds are read too."""
    m = model(cell("block"), cell("head", workspace_bytes=5))
    data = m.to_dict()
    assert data["layers"] == [["block", 2], ["head", 1]]
    assert data["cells"] == {
        "columns": ["kind", "device_type", "tp", "micro_batch", "forward_s", "backward_s", "activation_bytes",
                    "workspace_bytes"],
        "rows": [["block", "A100", 1, 1, 1.0, 2.0, 10, 0], ["head", "A100", 1, 1, 1.0, 2.0, 10, 5]],
    }  # fmt: skip
    assert data["kinds"][0] == {"name": "block", "parameters": 100, "output_bytes": 10}
    rows = [dict(zip(data["cells"]["columns"], row)) for row in data["cells"]["rows"]]
    loose = {**data, "cells": rows, "layers": ["block", ["block", 1], "head"]}
    assert ModelProfile.from_dict(loose) == m


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "block"}, "layers: expected a list such as"),
        ({"layers": [["block", 0]]}, "layers: entry 0 is ['block', 0], expected a kind or a pair such as"),
        ({"layers": [["block", 3], "tail"]}, "layers[3]: kind 'tail' is not among kinds: block, head"),
        ({"cells": {"columns": ["kind"]}}, 'cells: expected a list of objects, or an object with keys "columns" and'),
        ({"cells": {"columns": ["kind"], "rows": 3}}, "cells: rows is 3, expected a list"),
        (
            {"cells": {"columns": ["kind", "tps"], "rows": []}},
            "cells: column 'tps' is not among the columns: kind, dev",
        ),
        (
            {"cells": {"columns": ["kind", "tp"], "rows": [["a"]]}},
            "cells: row 0 is ['a'], expected 2 entries: kind, tp",
        ),
        ({"cells": [{"kind": "block", "tp": "1"}]}, "cells[0].device_type: missing, expected text"),
        ({"kinds": [{"name": "block", "parameters": 1.5}]}, "kinds[0].parameters: expected a whole number, got 1.5"),
        ({"conditions": {"tf32": "yes"}}, "conditions.tf32: expected true or false, got text 'yes'"),
        ({"num_head": 8}, "key 'num_head' is not among the keys: name, layers, kinds, cells, conditions, num_heads"),
        ({"schema": "hpp-cluster/1"}, "schema: 'hpp-cluster/1' is not 'hpp-profile/1'"),
    ],
)
def test_file_errors_name_the_key(changes: dict[str, Any], message: str) -> None:
    """Whatever is wrong in a profile file is named: file, key, value, what would be right."""
    with pytest.raises(ValueError) as caught:
        ModelProfile.from_dict({**model(cell("block"), cell("head")).to_dict(), **changes}, "m.json")
    assert str(caught.value).startswith(f"m.json: {message}")


def test_sanity_finds_milliseconds_taken_for_seconds() -> None:
    """Times 1000-fold too large imply under 1 % of the peak, 1000-fold too small more than all; right ones pass."""
    # 6 FLOP x 50e6 parameters x 1024 tokens = 0.307 TFLOP in 0.03 s = 10.2 TFLOP/s, a third of a peak of 30.
    m = profile(speeds={"fast": 1.0}, distinct=False, ends=True)
    gpus = cluster({"fast": 1}, peak_flops_per_s=30e12)

    def scaled(factor: float) -> ModelProfile:
        return replace(
            m,
            cells=tuple(replace(c, forward_s=factor * c.forward_s, backward_s=factor * c.backward_s) for c in m.cells),
        )

    assert sanity(m, gpus) == ()
    slow, fast = sanity(scaled(1000), gpus), sanity(scaled(0.001), gpus)
    assert len(slow) == len(fast) == 2  # block and head; the embedding is no matrix product
    # 0.0102 / 30 = 0.0341 %, and 10240 / 30 = 341 x
    assert slow[0] == (
        "kind 'block' on 'fast', tp 1, micro-batch 1: forward + backward of 30 s implies 0.0341 % of the device's peak"
        " FLOP/s; are the times seconds?"
    )
    assert "implies 3.41e+04 % of the device's peak FLOP/s; is the peak the one for this dtype" in fast[0]


def test_sanity_is_silent_where_nothing_is_known() -> None:
    """No peak, no sequence length, backward of zero, tiny kinds: no warning. Frozen layers count 4 FLOP, not 6."""
    m = profile(speeds={"fast": 1.0}, distinct=False, forward_s=10.0)
    known, unknown = cluster({"fast": 1}, peak_flops_per_s=30e12), cluster({"fast": 1})
    assert len(sanity(m, known)) == 1
    assert sanity(m, unknown) == ()
    assert sanity(replace(m, conditions=Conditions()), known) == ()
    assert sanity(replace(m, cells=tuple(replace(c, backward_s=0.0) for c in m.cells)), known) == ()
    tiny = LayerKind(name="norm", parameters=1000, output_bytes=1)
    with_norm = replace(m, kinds=(*m.kinds, tiny), cells=(*m.cells, cell("norm", "fast")))
    assert len(sanity(with_norm, known)) == 1
    # 50e6 x 1024 = 51.2e9 per FLOP: in 30 s at a peak of 0.9e12 six make 1.14 %, four 0.76 %.
    low = cluster({"fast": 1}, peak_flops_per_s=0.9e12)
    assert sanity(m, low) == ()
    assert len(sanity(replace(m, kinds=(replace(m.kinds[0], trainable=False),)), low)) == 1


def test_sanity_counts_the_other_cells() -> None:
    """One line per kind and device type: its worst cell, and how many more are off."""
    m = profile(speeds={"fast": 1.0}, distinct=False, forward_s=10.0, micro_batches=(1, 2, 4))
    (line,) = sanity(m, cluster({"fast": 1}, peak_flops_per_s=30e12))
    assert "micro-batch 1:" in line and "(so do 2 more cells of this kind)" in line


def test_a_profile_is_a_value() -> None:
    """Equal profiles are equal and hash alike whatever was asked of them; pickling and replacing work."""
    a, b = profile(seed=1), profile(seed=1)
    assert a.layer_costs("slow", 1, 1) is a.layer_costs("slow", 1, 1)
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    assert replace(a, name="other").degrees("slow") == (1,)


def test_large_profiles_are_fast() -> None:
    """130 distinct layers in 2 x 4 x 4 cells each (4160): built in seconds, costs in milliseconds, once each."""
    start = time.perf_counter()
    m = profile(num_layers=130, tps=(1, 2, 4, 8), micro_batches=(1, 2, 4, 8))
    built = time.perf_counter()
    for tp in m.degrees("slow"):
        for b in range(1, 9):
            assert m.layer_costs("slow", tp, b) is not None
    asked = time.perf_counter()
    for _ in range(10_000):
        m.layer_costs("slow", 8, 7)
    again = time.perf_counter()
    assert built - start < 2
    assert asked - built < 2  # 32 tables
    assert again - asked < 0.5
