"""`planner.stage_milp`: the program against enumeration of all cuts and device orders, and by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from planner.cost import Costs, DeviceClass, pipeline_s, stage_table
from planner.plans import Infeasible
from planner.stage_milp import Cap, Pin, StageSplit, evaluate, solve

GIB = 2**30


def costs(
    forward,
    backward=None,
    *,
    state=0.0,
    kept=0.0,
    saved=0.0,
    logits=0.0,
    workspace=0.0,
    inputs=None,
    rework=0.0,
    usable=math.inf,
    sync_buffer=0.0,
    cut=0.0,
    tied=None,
) -> Costs:
    """Costs from (K, L) forward seconds; unless said otherwise backward takes twice as long, links and memory are free.

    `cut` is (K, K) or one figure: seconds of every inner cut between two classes.
    """
    forward = np.array(forward, dtype=float)
    num_classes, num_layers = forward.shape

    def spread(values):
        return np.broadcast_to(np.array(values, dtype=float), forward.shape).copy()

    cuts = np.zeros((num_classes, num_classes, num_layers + 1))
    cuts[:, :, 1:-1] = np.broadcast_to(np.array(cut, dtype=float), (num_classes, num_classes))[:, :, None]
    memory = np.broadcast_to(np.array(usable, dtype=float), (num_classes,)).copy()
    return Costs(
        classes=tuple(DeviceClass(device_type="ABC"[k], tp=1) for k in range(num_classes)),
        micro_batch=1,
        forward=forward,
        backward=2 * forward if backward is None else np.array(backward, dtype=float),
        update=spread(0),
        state=spread(state),
        kept=spread(kept),
        saved=spread(saved),
        logits=spread(logits),
        workspace=spread(workspace),
        inputs=np.zeros(num_layers) if inputs is None else np.array(inputs, dtype=float),
        rework=np.broadcast_to(np.array(rework, dtype=float), (num_classes,)).copy(),
        usable=np.where(np.isfinite(memory), memory, 1e6),
        sync_buffer=float(sync_buffer),
        gradients=np.zeros(num_layers),
        calls=np.ones(num_layers),
        cut=cuts,
        cut_floor=cuts,
        tied=tied,
        update_per_stage=False,
        extrapolated=np.zeros(num_classes, dtype=bool),
    )


def random_case(seed, room=(0.45, 0.6, 1.0)):
    """Up to 3 classes, 7 layers and 4 stages of unlike devices and links, with `room` of the memory for all layers."""
    draw = random.Random(seed)
    num_classes, num_layers = draw.randint(1, 3), draw.randint(3, 7)
    counts = [draw.randint(0, 2) for _ in range(num_classes)]
    counts[0] = max(counts[0], 1)
    while sum(counts) > min(4, num_layers):
        counts[counts.index(max(counts))] -= 1

    def table(low, high):
        return np.array([[draw.randint(low, high) for _ in range(num_layers)] for _ in range(num_classes)], dtype=float)

    inputs = np.array([0] + [draw.randint(1, 3) for _ in range(num_layers - 1)], dtype=float)
    kept, state = table(4, 30), table(5, 20)
    recomputable = np.array([draw.random() < 0.8 for _ in range(num_layers)])
    need = (state + kept).sum(axis=1)
    slow = np.array([[draw.uniform(0.1, 1.0) for _ in range(num_classes)] for _ in range(num_classes)])
    value = costs(
        table(1, 9),
        table(1, 20),
        state=state,
        kept=kept,
        saved=np.where(recomputable, np.maximum(kept - inputs, 0), 0),
        logits=table(0, 2),
        workspace=table(0, 4),
        inputs=inputs,
        rework=np.where(recomputable, kept, 0).max(axis=1),
        usable=draw.choice(room) * need * [draw.uniform(0.6, 1.2) for _ in range(num_classes)],
        sync_buffer=3.0,
        tied=(0, num_layers - 1, np.full(num_classes, 4.0), 1.0) if draw.random() < 0.5 else None,
    )
    value.cut[:, :, :-1] = (slow + slow.T)[:, :, None] * inputs
    return value, tuple(counts), draw.randint(1, 6), draw.random() < 0.5


def best_split(value, counts, num_micro_batches, synced, allowed=lambda order, ends: True):
    """Least planning form over all `allowed` device orders and cuts, with stage loads from `cost.stage_table`."""
    num_stages, num_layers = sum(counts), value.num_layers
    table = stage_table(value, [min(num_micro_batches, num_stages - s) for s in range(num_stages)], synced)
    best = math.inf
    for order in set(itertools.permutations([k for k, count in enumerate(counts) for _ in range(count)])):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            ends = (0, *cuts, num_layers)
            if not allowed(order, ends):
                continue
            loads = [float(table.load[k, s, ends[s], ends[s + 1]]) for s, k in enumerate(order)]
            for s in range(1, num_stages):
                hand_over = float(value.cut[order[s - 1], order[s], ends[s]])
                loads[s - 1] += hand_over
                loads[s] += hand_over
            if all(map(math.isfinite, loads)):
                best = min(best, pipeline_s(loads, num_micro_batches))
    return best


def solved(value, counts, num_micro_batches, **options) -> StageSplit | None:
    try:
        return solve(value, counts, num_micro_batches, **options)
    except Infeasible:
        return None


def agree(split, best, value, num_micro_batches, synced):
    """The split is the best one, proved, within memory, and its value is what its stages add up to."""
    assert (split is None) == (best == math.inf)
    if split is not None:
        assert split.outcome.status == "optimal"
        assert split.value == pytest.approx(best, rel=1e-7)
        assert split.value * (1 - 1e-6) <= split.bound <= split.value
        again, short = evaluate(value, split.stages, num_micro_batches, synced=synced)
        assert again == split.value and max(short) <= 0


def test_equals_enumeration_of_cuts_and_orders():
    """On 36 random chains the value is that of the best of all cuts and device orders.

    At least 8 of them recompute, and at least 8 do not fit at all.
    """
    recomputing = impossible = 0
    for seed in range(36):
        value, counts, m, synced = random_case(seed)
        best = best_split(value, counts, m, synced)
        split = solved(value, counts, m, synced=synced)
        agree(split, best, value, m, synced)
        impossible += split is None
        recomputing += split is not None and any(recomputed for *_, recomputed in split.stages)
    assert recomputing >= 8 and impossible >= 8


def test_a_given_order_equals_enumeration_of_cuts():
    """With the device order given, the best of all cuts in that order; never better than the free order."""
    found = 0
    for seed in range(36, 60):
        value, counts, m, synced = random_case(seed)
        order = [k for k, count in enumerate(counts) for _ in range(count)]
        random.Random(seed).shuffle(order)
        best = best_split(value, counts, m, synced, lambda chosen, _, order=tuple(order): chosen == order)
        split = solved(value, counts, m, synced=synced, order=order)
        agree(split, best, value, m, synced)
        if split is not None:
            found += 1
            assert tuple(k for k, *_ in split.stages) == tuple(order)
            assert best_split(value, counts, m, synced) <= split.value * (1 + 1e-9)
    assert found >= 8


def test_a_hand_over_loads_both_ends():
    """Layers of F + B = 3 and 6 on two devices, one cut of 1: loads 4 and 7, m = 4: 4 + 7 + 3 x 7 = 32."""
    split = solve(costs([[1, 2]], cut=1.0), [2], 4)
    assert split.value == pytest.approx(32)
    assert split.stages == ((0, 0, 1, ()), (0, 1, 2, ()))


def test_a_hand_over_depends_on_both_classes():
    """Orders of A, A, B with equal layers of 3: a cut next to B takes 2, between the two A 0.5, which favours A A B.

    A A B or its mirror: loads 3.5, 5.5, 5; A B A: 5, 7, 5. m = 1: 14 against 17.
    """
    value = costs([[1] * 3, [1] * 3], cut=[[0.5, 2.0], [2.0, 9.0]])
    split = solve(value, [2, 1], 1)
    assert split.value == pytest.approx(14)
    assert [k for k, *_ in split.stages] in ([0, 0, 1], [1, 0, 0])
    assert solve(value, [2, 1], 1, order=(0, 1, 0)).value == pytest.approx(17)


def test_early_stages_hold_more_micro_batches():
    """Equal layers that keep 10 bytes: cuts 1 + 3, 2 + 2, 3 + 1 hold 2 x 10 and 30, 2 x 20 and 20, 2 x 30 and 10 bytes.

    30 bytes of memory leave the first: loads 3 and 9, m = 2: 12 + 9 = 21. With one micro-batch any cut fits, and all
    take 12.
    """
    value = costs([[1] * 4], kept=10.0, usable=30.0)
    assert solve(value, [2], 2).stages == ((0, 0, 1, ()), (0, 1, 4, ()))
    assert solve(value, [2], 2).value == pytest.approx(21)
    assert solve(value, [2], 1).value == pytest.approx(12)


def test_recompute_costs_a_forward_and_needs_room_for_one_layer():
    """Two layers keep 20 bytes each; recomputing saves 15 and needs 5 once: 40 - 15 + 5 = 30, 40 - 30 + 5 = 15.

    Forwards of 1 and 2 (F + B = 3 and 6): 40 bytes of memory need nothing, 9 s; 30 the cheaper, 10 s; 29 both, 12 s.
    """
    chain = {"kept": 20.0, "saved": 15.0, "rework": 5.0}
    assert solve(costs([[1, 2]], **chain, usable=40.0), [1], 1).value == pytest.approx(9)
    some, both = (solve(costs([[1, 2]], **chain, usable=room), [1], 1) for room in (30.0, 29.0))
    assert some.value == pytest.approx(10) and some.stages == ((0, 0, 2, (0,)),)
    assert both.value == pytest.approx(12) and both.stages == ((0, 0, 2, (0, 1)),)


def test_each_kind_of_memory_counts():
    """A stage of 2 layers holds exactly 12 + 2 x 3 + 2 x 2 + 7 + 5 = 34 bytes: 34 fit, 33.9 do not, 28.9 do unsynced.

    State 6 + 6, kept 1.5 a layer and logits 1 a layer for 2 micro-batches in flight, workspace max(4, 7), buffer 5.
    The second stage, of one tiny layer, receives 3 bytes and holds them once, 6 + 1.5 + 1 + 3 + 4 + 5 = 20.5.
    """
    chain = {
        "state": 6.0,
        "kept": 1.5,
        "logits": 1.0,
        "workspace": [[4, 7, 4]],
        "sync_buffer": 5.0,
        "inputs": [0, 9, 3],
    }
    pin = (Pin(layer=1, stage=0),)
    assert solve(costs([[1] * 3], usable=34.0, **chain), [2], 2, pinned=pin).value == pytest.approx(9 + 6)
    with pytest.raises(Infeasible):
        solve(costs([[1] * 3], usable=33.9, **chain), [2], 2, pinned=pin)
    solve(costs([[1] * 3], usable=29.0, **chain), [2], 2, pinned=pin, synced=False)
    _, short = evaluate(costs([[1] * 3], usable=34.0, **chain), ((0, 0, 2, ()), (0, 2, 3, ())), 2)
    assert short == pytest.approx((0.0, 20.5 - 34.0))


def test_tied_weights_are_stored_once_per_stage():
    """Two layers of 10 bytes that share 4: 16 on one stage of 16 bytes; on 15.9 they do not fit."""
    tied = (0, 1, np.array([4.0]), 4.0)
    assert solve(costs([[1, 1]], state=10.0, usable=16.0, tied=tied), [1], 1).value == pytest.approx(6)
    with pytest.raises(Infeasible, match="do not fit"):
        solve(costs([[1, 1]], state=10.0, usable=15.9, tied=tied), [1], 1)


def test_bytes_of_real_size_do_not_slip_through_the_tolerance():
    """Three layers of 20 GiB, two of them fill a stage to the byte; with 4, 2 or 1 bytes less the other cut is taken.

    Forwards 1, 1, 3: cutting after layer 1 gives 6 and 9, m = 2: 24; after layer 0, 3 and 12: 27. Seconds x 1e-4. A
    solver's tolerance of 1e-6 MiB is one byte.
    """
    forward = np.array([[1.0, 1.0, 3.0], [1.0, 1.0, 3.0]]) * 1e-4
    room = 40.0 * GIB
    exact = costs(forward, state=20.0 * GIB, usable=[room, room])
    assert solve(exact, [1, 1], 2, order=(0, 1)).value == pytest.approx(24e-4)
    for missing in (4, 2, 1):
        short = costs(forward, state=20.0 * GIB, usable=[room - missing, room])
        assert solve(short, [1, 1], 2, order=(0, 1)).value == pytest.approx(27e-4)


def test_side_constraints_equal_enumeration_of_what_they_allow():
    """Random pins, layers together, a cap per stage and one per class: the best of the splits they allow.

    At least 5 of the 24 cases have one, at least 5 have none.
    """
    found = 0
    for seed in range(100, 124):
        value, counts, m, synced = random_case(seed, room=(1.5, 3.0))
        draw = random.Random(seed)
        layers, num_stages = range(value.num_layers), sum(counts)
        amounts = tuple(float(draw.randint(0, 3)) for _ in layers)
        pins = [Pin(layer=draw.choice(layers), class_index=draw.choice([k for k, a in enumerate(counts) if a]))]
        pins += [Pin(layer=draw.choice(layers), stage=draw.randrange(num_stages))] * draw.randint(0, 1)
        pair = sorted(draw.sample(layers, 2)) if draw.random() < 0.5 else []
        each = Cap(name="cache", amounts=amounts, limit=sum(amounts) * draw.uniform(0.5, 1.0))
        total = Cap(name="keys", amounts=amounts, limit=sum(amounts) * draw.uniform(0.3, 1.0), class_index=0)

        def allowed(order, ends, pins=pins, pair=pair, each=each, total=total, amounts=amounts):
            stage_of = [s for s in range(len(order)) for _ in range(ends[s], ends[s + 1])]
            sums = [sum(amounts[ends[s] : ends[s + 1]]) for s in range(len(order))]
            return (
                all(p.stage is None or stage_of[p.layer] == p.stage for p in pins)
                and all(p.class_index is None or order[stage_of[p.layer]] == p.class_index for p in pins)
                and len({stage_of[l] for l in pair}) <= 1
                and max(sums) <= each.limit
                and sum(a for a, k in zip(sums, order, strict=True) if k == 0) <= total.limit
            )

        best = best_split(value, counts, m, synced, allowed)
        groups = [pair] if pair else []
        split = solved(value, counts, m, synced=synced, pinned=pins, together=groups, caps=[each, total])
        agree(split, best, value, m, synced)
        found += split is not None
    assert 5 <= found <= 19


def test_conflicting_side_constraints_are_named_and_innocent_ones_are_not():
    """Layer 1 on stage 0 and layer 0 on stage 1 contradict the order of layers; layers 2, 3 and the cap are innocent.

    Layer 0 on stage 1 leaves stage 0 empty and is impossible alone.
    """
    value = costs([[1] * 4])
    with pytest.raises(Infeasible) as raised:
        solve(
            value,
            [2],
            4,
            pinned=[Pin(layer=1, stage=0), Pin(layer=0, stage=1)],
            together=[(2, 3)],
            caps=[Cap(name="cache", amounts=(1.0,) * 4, limit=4.0)],
        )
    text = str(raised.value)
    assert "layer 0 on stage 1" in text
    assert "cache" not in text and "layers 2, 3" not in text


def test_three_constraints_in_conflict_are_all_named():
    """Layers 0, 1 together, 1, 2 together and 2, 3 together put all on one of two stages: any two are possible."""
    with pytest.raises(Infeasible, match=r"together: layers 0, 1 .*; layers 1, 2 .*; layers 2, 3 on one stage"):
        solve(costs([[1] * 4]), [2], 4, together=[(0, 1), (1, 2), (2, 3)])
    assert solve(costs([[1] * 4]), [2], 4, together=[(0, 1), (2, 3)]).value == pytest.approx(12 + 18)


def test_a_pin_to_an_absent_class_and_a_cap_too_small_conflict_alone():
    """No unit of class B is in the pipeline; three layers of 2 on two stages cannot stay below 3 each."""
    with pytest.raises(Infeasible, match="cannot hold: layer 1 on B"):
        solve(costs([[1] * 3, [1] * 3]), [2, 0], 1, pinned=[Pin(layer=1, class_index=1)], together=[(0, 1)])
    with pytest.raises(Infeasible, match="cannot hold: slots at most 3 on each stage"):
        solve(costs([[1] * 3]), [2], 1, caps=[Cap(name="slots", amounts=(2.0,) * 3, limit=3.0)])


def test_what_does_not_fit_says_where_and_by_how_much():
    """Four layers of 10 bytes on stages of 25 and 10: 2 + 2 is 10 short on B, 3 + 1 is 5 short on A, the nearest miss.

    Side constraints are not blamed for it.
    """
    value = costs([[1] * 4, [1] * 4], state=10.0, usable=[25.0, 10.0])
    with pytest.raises(Infeasible, match="4 layers do not fit on 1 A \\+ 1 B") as raised:
        solve(value, [1, 1], 2, together=[(0, 1)])
    assert raised.value.short_bytes == pytest.approx(5)
    assert raised.value.device_type == "A"


def test_a_missing_link_is_never_used():
    """B has no link to itself: A sits between the two, or with B, B alone there is no way at all."""
    value = costs([[1] * 3, [1] * 3], cut=[[0.0, 0.0], [0.0, math.inf]])
    assert [k for k, *_ in solve(value, [1, 2], 1).stages] == [1, 0, 1]
    with pytest.raises(Infeasible, match="no link"):
        solve(value, [0, 2], 1)


def test_seconds_and_bytes_in_other_units_give_the_same_split():
    """Times x 1e-5 and bytes x 2^30: the value is x 1e-5, on 6 random chains."""
    for seed in (0, 2, 6, 9, 11, 14):
        value, counts, m, synced = random_case(seed)
        other = costs(
            value.forward * 1e-5,
            value.backward * 1e-5,
            **{
                name: getattr(value, name) * GIB
                for name in (
                    "state",
                    "kept",
                    "saved",
                    "logits",
                    "workspace",
                    "inputs",
                    "rework",
                    "usable",
                    "sync_buffer",
                )
            },
            tied=value.tied and (*value.tied[:2], value.tied[2] * GIB, 1.0),
        )
        other.cut[:] = value.cut * 1e-5
        one, two = (solved(each, counts, m, synced=synced) for each in (value, other))
        assert (one is None) == (two is None)
        assert one is None or one.value == pytest.approx(two.value * 1e5, rel=1e-7)


def test_out_of_time_is_not_infeasible():
    """A split of 30 layers over 3 + 3 units exists; after 0.02 s the outcome is unknown and the value infinite.

    The bound stays below 8 micro-batches one after the other on the slower class.
    """
    rows = [[1 + l % 3 / 10 for l in range(30)], [2 + l % 5 / 10 for l in range(30)]]
    split = solve(costs(rows, cut=0.1, kept=1.0), [3, 3], 8, time_limit=0.02)
    assert split.outcome.status == "unknown"
    assert split.value == math.inf and split.stages == ()
    assert 0 <= split.bound <= 8 * 3 * sum(rows[1])


def test_questions_that_make_no_sense_are_refused():
    """An index that does not exist or an order against the counts is a ValueError; too many stages are Infeasible."""
    value = costs([[1] * 3, [1] * 3])
    for wrong in (
        {"pinned": [Pin(layer=3, stage=0)]},
        {"pinned": [Pin(layer=0, stage=2)]},
        {"pinned": [Pin(layer=0, class_index=2)]},
        {"together": [(0, 7)]},
        {"caps": [Cap(name="c", amounts=(1.0,), limit=1.0)]},
        {"caps": [Cap(name="c", amounts=(math.nan,) * 3, limit=1.0)]},
        {"order": (0, 0)},
    ):
        with pytest.raises(ValueError):
            solve(value, [1, 1], 2, **wrong)
    with pytest.raises(ValueError, match="give one"):
        Pin(layer=0)
    with pytest.raises(ValueError):
        solve(value, [0, 0], 2)
    with pytest.raises(Infeasible, match="4 stages need as many layers, there are 3"):
        solve(value, [4, 0], 2)
    with pytest.raises(Infeasible, match="B: no times"):
        solve(costs([[1] * 3, [math.inf] * 3]), [1, 1], 2)
