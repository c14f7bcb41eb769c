"""Schedules: golden lists before and after each pass, laws on all of them, and damaged lists refused by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plans import plan as plan_by_hand

from planner.plans import Block, Pipeline, Plan, TiedBlock
from planner.schedule import (
    NAMES,
    Action,
    Kind,
    Schedule,
    action_lists,
    check_deadlock,
    deadlock,
    depths,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    launches,
    of_plan,
    one_f_one_b,
    validate,
    with_reductions,
    with_transfers,
    zero_bubble,
)

# Stage counts and micro-batch counts for the laws: m < S, m = S and m > S.
SIZES = [(S, m) for S in (1, 2, 3, 4, 7) for m in (1, 2, 3, 4, 5, 9)]


def lists(*ranks: str) -> str:
    return "\n".join(ranks)


def parse(*ranks: str) -> Schedule:
    return Schedule.parse(ranks, name="written")


def generated(S: int, m: int) -> list[Schedule]:
    """Every kind of schedule with S stages."""
    found = [gpipe(S, m), one_f_one_b(S, m), eager_one_f_one_b(S, m), zero_bubble(S, m)]
    found += [zero_bubble(S, m, range(S, 0, -1)), zero_bubble(S, m, split=range(0, S, 2))]
    found += [depths(S, m, [3 * (S - s) for s in range(S)])]
    return found + [interleaved(S // chunks, chunks, m) for chunks in (1, 2, 3) if S % chunks == 0]


def makespan(schedule: Schedule, forward: int = 1, backward: int = 2, inputs: int = 1, weights: int = 1) -> int:
    """End of the last compute action when transfers are free: a plain clock, to hold the lists against."""
    seconds = {Kind.F: forward, Kind.B: backward, Kind.I: inputs, Kind.W: weights}
    ends: dict[Action, int] = {}
    at = [0] * len(schedule.ranks)
    clock = [0] * len(schedule.ranks)
    while len(ends) < sum(map(len, schedule.ranks)):
        before = len(ends)
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                s, kind, k = action = actions[at[rank]]
                split = any(other.kind == Kind.I and other.stage == s + 1 for each in schedule.ranks for other in each)
                needs = []
                if kind == Kind.F and s > 0:
                    needs = [Action(s - 1, Kind.F, k)]
                if kind in (Kind.B, Kind.I) and s < schedule.num_stages - 1:
                    needs = [Action(s + 1, Kind.I if split else Kind.B, k)]
                if not all(need in ends for need in needs):
                    break
                start = max([clock[rank], *(ends[need] for need in needs)])
                clock[rank] = ends[action] = start + seconds[kind]
                at[rank] += 1
        assert len(ends) > before, "the lists wait for each other"
    return max(ends.values())


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["0F3", "1B0", "2I1", "2W1", "0SEND_F3", "1RECV_F3", "1SEND_B0", "0RECV_B0", "0REDUCE_GRAD2", "0UPDATE"]
)
def test_actions_print_and_parse(text: str) -> None:
    """What prints as a text is what it parses to."""
    assert str(Action.parse(text)) == text
    assert repr(Action.parse(f" {text} ")) == text


def test_action_fields() -> None:
    """Stage, kind, index."""
    assert Action.parse("12SEND_B34") == (12, Kind.SEND_B, 34)
    assert Action.parse("3UPDATE") == (3, Kind.UPDATE, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0", "'F0' is no action, expected stage, kind"),
        ("0X1", "'0X1' is no action"),
        ("0F-1", "'0F-1' is no action"),
        ("0f1", "'0f1' is no action"),
        ("0F1B2", "'0F1B2' is no action"),
        ("0F", "'0F' lacks its index, expected 0F0 for the first"),
        ("0REDUCE_GRAD", "'0REDUCE_GRAD' lacks its index"),
        ("0UPDATE1", "'0UPDATE1' has an index, expected 0UPDATE"),
        ("", "'' is no action"),
    ],
)
def test_bad_actions_are_named(text: str, words: str) -> None:
    """The error quotes the text and says what would be right."""
    with pytest.raises(ValueError) as error:
        Action.parse(text)
    assert words in str(error.value)


def test_schedules_print_and_parse() -> None:
    """A line per rank; comments and empty lines do not count; the numbers come from the highest that occur."""
    schedule = one_f_one_b(3, 4)
    parsed = Schedule.parse(f"# my own\n\n{schedule}   # the end\n", name="1f1b")
    assert parsed == schedule
    assert (parsed.num_stages, parsed.num_micro_batches) == (3, 4)
    assert str(parsed) == str(schedule)


def test_csv_is_the_form_torch_reads() -> None:
    """compute_only: a row per rank, empty cells are steps without an action, nothing but compute is written."""
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n"
    schedule = Schedule.from_csv(text, name="1f1b")
    assert schedule == one_f_one_b(2, 2)
    assert schedule.to_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert with_transfers(schedule).to_csv() == schedule.to_csv()


def test_lists_load_from_files(tmp_path: Path) -> None:
    """``.csv`` is read as CSV, anything else as text; errors start with the file and the line."""
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    (tmp_path / "mine.txt").write_text("0F0 0B0\n")
    (tmp_path / "bad.txt").write_text("0F0\n0B0 0C0\n")
    assert Schedule.load(tmp_path / "mine.csv").ranks == Schedule.load(tmp_path / "mine.txt").ranks
    with pytest.raises(ValueError, match=r"bad\.txt: line 2: '0C0' is no action"):
        Schedule.load(tmp_path / "bad.txt")
    with pytest.raises(ValueError, match=r"none\.txt: cannot be read"):
        Schedule.load(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="custom: no actions, expected a line per rank"):
        Schedule.parse("# nothing\n")


def test_a_schedule_knows_its_stages() -> None:
    """Rank, depth and warm-up per stage, also where a rank runs several."""
    schedule = interleaved(2, 2, 4)
    assert [schedule.rank_of(s) for s in range(4)] == [0, 1, 0, 1]
    assert [schedule.in_flight(s) for s in range(4)] == [4, 3, 2, 1]
    assert [one_f_one_b(3, 4).warm_up(s) for s in range(3)] == [2, 1, 0]
    with pytest.raises(ValueError, match="no rank runs stage 7"):
        schedule.rank_of(7)


# Golden lists -------------------------------------------------------------------------------------------------------


def test_gpipe() -> None:
    """All forwards, then all backwards."""
    assert str(gpipe(2, 3)) == lists("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")


def test_one_f_one_b() -> None:
    """Warm-up of S - 1 - s forwards, then F and B in turn, then the backwards that are left."""
    assert str(one_f_one_b(3, 4)) == lists(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )


def test_one_f_one_b_of_few_micro_batches() -> None:
    """m < S: the warm-up ends with the micro-batches."""
    assert str(one_f_one_b(3, 2)) == lists("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")


def test_eager_one_f_one_b() -> None:
    """Warm-up of 2 (S - 1 - s) forwards, or as told per stage."""
    assert str(eager_one_f_one_b(3, 6)) == lists(
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5",
    )
    assert str(eager_one_f_one_b(2, 4, warm_up=[2, 1])) == lists(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
    )


def test_depths() -> None:
    """W_s - 1 forwards come before the first pair, whatever W_s is."""
    assert str(depths(2, 5, [4, 2])) == lists(
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4"
    )


def test_interleaved() -> None:
    """R = 2, two stages each, groups of 2: rank 0 runs 2 + 2 forwards before its first pair, rank 1 runs 2."""
    assert str(interleaved(2, 2, 4)) == lists(
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    )


def test_interleaved_with_a_remainder() -> None:
    """R = 2, m = 3: one group of 3 rather than 2 + 1, so rank 1 runs 3 forwards before its first pair."""
    assert str(interleaved(2, 2, 3)) == lists(
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    )


def test_zero_bubble() -> None:
    """I and F as B and F of 1F1B; stage s puts its W off until it holds S = 3, and fills the cool-down with them."""
    assert str(zero_bubble(3, 5)) == lists(
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4",
    )


def test_zero_bubble_in_the_memory_of_one_f_one_b() -> None:
    """W_s = S - s on every stage: each W follows its I."""
    assert str(zero_bubble(2, 3, [2, 1])) == lists(
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"
    )


def test_zero_bubble_splits_the_stages_it_is_told() -> None:
    """A stage whose backward is not split runs 1F1B."""
    assert str(zero_bubble(2, 3, split=[1])) == lists("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: one_f_one_b(0, 4), "num_stages: 0 is less than 1"),
        (lambda: gpipe(2, 0), "num_micro_batches: 0 is less than 1"),
        (lambda: depths(2, 4, [2]), "in_flight: 1 entries, expected one for each of 2 stages"),
        (lambda: depths(2, 4, [2, 0]), "in_flight[1]: 0 is less than 1"),
        (lambda: depths(2, 4, [1, 2]), "in_flight[1]: 2 is more than the 1 of the stage before"),
        (lambda: interleaved(2, 0, 4), "num_chunks: 0 is less than 1"),
        (lambda: zero_bubble(2, 4, split=[2]), "split: stage 2 is not among 0 ... 1"),
        (lambda: zero_bubble(3, 4, in_flight=[3, 3]), "in_flight: 2 entries"),
    ],
)
def test_impossible_schedules_are_refused(build: object, words: str) -> None:
    """The error names the argument, its value and what would be right."""
    with pytest.raises(ValueError) as error:
        build()  # type: ignore[operator]
    assert words in str(error.value)


# Passes -------------------------------------------------------------------------------------------------------------


def test_transfers_of_gpipe() -> None:
    """SEND right after the action that makes it, RECV right before the one that needs it."""
    assert str(with_transfers(gpipe(2, 2))) == lists(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )


def test_transfers_of_one_f_one_b() -> None:
    """After 0F1 and 1B0 both neighbours have something to send: stage 1 receives first."""
    assert str(with_transfers(one_f_one_b(2, 3))) == lists(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2",
    )


def test_transfers_of_a_stage_far_ahead() -> None:
    """Stage 0 runs 3 further ahead: were 0RECV_B0 to wait for 0B0, no order of the transfers would do."""
    assert str(with_transfers(depths(2, 4, [4, 1]))) == lists(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0F3 0RECV_B1 0SEND_F3 0B0 0B1 0RECV_B2 0B2 0RECV_B3 0B3",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1RECV_F3 1SEND_B2 1F3 1B3 1SEND_B3",
    )


def test_transfers_of_a_split_backward() -> None:
    """The gradient leaves after I, before W."""
    assert str(with_transfers(zero_bubble(2, 2, [2, 1]))) == lists(
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1",
    )


def test_stages_on_one_rank_hand_over_without_transfers() -> None:
    """A V: stages 0 and 3 on rank 0, 1 and 2 on rank 1; nothing moves between 1 and 2."""
    schedule = parse("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert str(with_transfers(schedule)) == lists(
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    )


def test_transfers_are_added_once() -> None:
    """A list that has some is left to its author."""
    with pytest.raises(ValueError, match="lists transfers already, such as 0SEND_F0"):
        with_transfers(with_transfers(gpipe(2, 2)))


def test_reductions_and_updates() -> None:
    """Each reduction after the stage's last action, in the order given; updates last; other stages' left out."""
    order = {5: [1], 4: [0, 1], 3: [0], 2: []}
    assert str(with_reductions(with_transfers(gpipe(2, 1)), order)) == lists(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD4 0REDUCE_GRAD3 0UPDATE",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD5 1REDUCE_GRAD4 1UPDATE",
    )


def test_reductions_of_a_rank_with_two_stages() -> None:
    """Stage 2 is done before stage 0 and reduced at once; what both share is launched once, after the later one."""
    assert str(with_reductions(interleaved(2, 2, 2), {0: [3], 1: [2], 2: [0, 1], 3: [0, 2]})) == lists(
        "0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD1 0B0 0B1 0REDUCE_GRAD2 0REDUCE_GRAD3 0UPDATE 2UPDATE",
        "1F0 1F1 3F0 3B0 3F1 3B1 3REDUCE_GRAD0 1B0 1B1 1REDUCE_GRAD2 1UPDATE 3UPDATE",
    )


def test_reductions_keep_one_order_on_every_rank() -> None:
    """Stage 0 is done first here, yet reduction 1 waits for reduction 0, as everywhere else."""
    schedule = parse("0F0 1F0 1I0 0I0 0W0 1W0")
    assert str(with_reductions(schedule, {0: [1], 1: [0]})) == (
        "0F0 1F0 1I0 0I0 0W0 1W0 1REDUCE_GRAD0 0REDUCE_GRAD1 0UPDATE 1UPDATE"
    )


def test_reductions_stay_where_the_user_wrote_them() -> None:
    """Only what is missing is added."""
    schedule = parse("0F0 0B0 0REDUCE_GRAD1", "1F0 1B0 1UPDATE")
    assert str(with_reductions(schedule, {0: [0], 1: [0]})) == lists(
        "0F0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD1 0UPDATE", "1F0 1B0 1UPDATE"
    )


def test_reductions_of_unknown_stages_are_refused() -> None:
    """The error names the reduction."""
    with pytest.raises(ValueError, match=r"reduction 3: stage 2 is not among 0 \.\.\. 1"):
        with_reductions(gpipe(2, 1), {3: [2]})


# Laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("S", "m"), SIZES)
def test_every_schedule_is_valid_and_finishes(S: int, m: int) -> None:
    """Also with transfers, both where every SEND and RECV waits for its other end and where no SEND waits."""
    for schedule in generated(S, m):
        complete = with_reductions(with_transfers(schedule), dict.fromkeys(range(S), range(S)))
        for actions in complete.ranks:
            for n, action in enumerate(actions):
                if action.kind in (Kind.SEND_F, Kind.SEND_B):  # never later than the next compute action
                    made = next(each for each in actions[n::-1] if each.is_compute)
                    assert (made.stage, made.index) == (action.stage, action.index)
        for each in (schedule, with_transfers(schedule), complete):
            validate(each)
            check_deadlock([each])
            check_deadlock([each], rendezvous=False)
        assert complete.compute_only() == schedule


@pytest.mark.parametrize(("S", "m"), SIZES)
def test_micro_batches_in_flight(S: int, m: int) -> None:
    """As stated: GPipe m, 1F1B min(m, S - s), eager min(m, 2 (S - 1 - s) + 1), zero-bubble min(m, S) or its limit."""
    for schedule, held in [
        (gpipe(S, m), [m] * S),
        (one_f_one_b(S, m), [min(m, S - s) for s in range(S)]),
        (eager_one_f_one_b(S, m), [min(m, 2 * (S - 1 - s) + 1) for s in range(S)]),
        (zero_bubble(S, m), [min(m, S)] * S),
        (zero_bubble(S, m, range(S, 0, -1)), [min(m, S - s) for s in range(S)]),
    ]:
        assert [schedule.in_flight(s) for s in range(S)] == held, schedule.name
        validate(schedule, limits=held)
        for s in range(S):
            short = [depth - (t == s) for t, depth in enumerate(held)]
            with pytest.raises(
                ValueError, match=f"stage {s} holds {held[s]} micro-batches, its limit is {held[s] - 1}"
            ):
                validate(schedule, limits=short)


@pytest.mark.parametrize(("S", "m"), SIZES)
def test_warm_up(S: int, m: int) -> None:
    """Forwards before the first pair: S - 1 - s for 1F1B, 2 (S - 1 - s) for eager, at most m - 1."""
    assert [one_f_one_b(S, m).warm_up(s) for s in range(S)] == [min(m, S - s) - 1 for s in range(S)]
    assert [eager_one_f_one_b(S, m).warm_up(s) for s in range(S)] == [min(m - 1, 2 * (S - 1 - s)) for s in range(S)]


@pytest.mark.parametrize(
    ("R", "chunks", "m"), list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 5, 7, 8, 10)))
)
def test_interleaved_holds_and_takes_what_it_should(R: int, chunks: int, m: int) -> None:
    """Rank r holds (chunks - 1) g + 2 (R - 1 - r) + 1, g the largest group; m >= R: (m chunks + R - 1)(F + B)."""
    schedule = interleaved(R, chunks, m)
    g = -(-m // max(1, m // R))
    for r, actions in enumerate(schedule.ranks):
        steps = [(a.kind == Kind.F) - (a.kind == Kind.B) for a in actions]
        held = max(itertools.accumulate(steps))
        assert held == min(m * chunks, (chunks - 1) * g + 2 * (R - 1 - r) + 1)
    if m >= R:
        assert makespan(schedule) == (m * chunks + R - 1) * 3


@pytest.mark.parametrize(("S", "m"), [size for size in SIZES if size[1] >= size[0]])
def test_time_of_equal_stages(S: int, m: int) -> None:
    """F = 1, B = 2 = I + W: (m + S - 1) 3; the W fill the bubble down to (S - 1)(F + I - W) under ZB-H1, and with the
    memory of 1F1B on every stage gradients still travel as I, not B: (S - 1)(F + I)."""
    assert makespan(gpipe(S, m)) == makespan(one_f_one_b(S, m)) == makespan(eager_one_f_one_b(S, m)) == (m + S - 1) * 3
    assert makespan(zero_bubble(S, m)) == 3 * m + (S - 1) * 1
    assert makespan(zero_bubble(S, m, range(S, 0, -1))) == 3 * m + (S - 1) * 2


@st.composite
def any_depths(draw: st.DrawFn) -> tuple[int, list[int]]:
    """m, and W_s that never grow along the pipeline."""
    held = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    return draw(st.integers(1, 10)), sorted(held, reverse=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_depths())
def test_any_depths_hold_what_they_say_and_finish(case: tuple[int, list[int]]) -> None:
    """W_s micro-batches in flight, m where that is fewer; safe transfers, split or not."""
    m, held = case
    S = len(held)
    for schedule in (depths(S, m, held), zero_bubble(S, m, held)):
        complete = with_transfers(schedule)
        validate(complete, limits=held)
        check_deadlock([complete])
        check_deadlock([complete], rendezvous=False)
    assert [depths(S, m, held).in_flight(s) for s in range(S)] == [min(m, depth) for depth in held]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_depths())
def test_transfers_stand_beside_their_action(case: tuple[int, list[int]]) -> None:
    """No stage three or more further ahead than the next: every SEND directly behind the action that makes it and every
    RECV directly before the one that needs it, but for each other."""
    m, steep = case
    gentle = list(itertools.accumulate(reversed(steep), lambda after, depth: min(depth, after + 2)))[::-1]
    for actions in with_transfers(depths(len(steep), m, gentle)).ranks:
        for n, action in enumerate(actions):
            if action.is_transfer:
                receives = action.kind in (Kind.RECV_F, Kind.RECV_B)
                nearest = next(each for each in (actions[n:] if receives else actions[n::-1]) if each.is_compute)
                assert (nearest.kind, nearest.index) == (Kind(action.kind[-1]), action.index)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_no_list_with_a_damage_passes(data: st.DataObject) -> None:
    """Without one action, with one twice, or with a forward behind all else, a list is refused and the action named."""
    S, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from(generated(S, m)))
    schedule = data.draw(st.sampled_from([schedule, with_reductions(with_transfers(schedule), {})]))
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    actions = list(schedule.ranks[rank])
    # A single stage may go without its update: a list need not have any.
    n = data.draw(st.sampled_from([n for n, action in enumerate(actions) if action.kind != Kind.UPDATE]))
    how = data.draw(st.sampled_from(["drop", "repeat", "late"]))
    named = str(actions[n])
    if how == "drop":
        actions = actions[:n] + actions[n + 1 :]
        if not any(action.stage == Action.parse(named).stage for action in actions):
            named = f"no rank runs stage {Action.parse(named).stage}"
    elif how == "repeat":
        actions.insert(n, actions[n])
    else:  # the forward of a micro-batch goes behind everything else
        n = next(i for i, action in enumerate(actions) if action.kind == Kind.F)
        named = str(actions[n])
        actions.append(actions.pop(n))
    ranks = [tuple(actions) if r == rank else each for r, each in enumerate(schedule.ranks)]
    damaged = dataclasses.replace(schedule, ranks=tuple(ranks))
    with pytest.raises(ValueError) as error:
        validate(damaged)
    assert named in str(error.value)


# Damaged lists ------------------------------------------------------------------------------------------------------

SOUND = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD0 0UPDATE",
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1I1 1SEND_B1 1W1 1REDUCE_GRAD0 1UPDATE",
)


def test_accepts_a_list_written_by_hand() -> None:
    """B and I/W may be mixed; the damages below start from here."""
    validate(parse(*SOUND))
    check_deadlock([parse(*SOUND)])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (" 0F1 ", " ", "rank 0: 0F1 is missing"),
        (" 0B1", "", "rank 0: 0B1 (or 0I1 and 0W1) is missing"),
        (" 1W1", "", "rank 1: 1W1 is missing"),
        (" 1I1", "", "rank 1: 1I1 is missing"),
        (" 1W1", " 1W1 1B1", "rank 1: 1B1 is the whole backward, yet 1I1 stands there too"),
        (" 0F1 ", " 0F1 0F1 ", "rank 0: 0F1 stands twice"),
        (" 1B0 ", " 1B0 1B0 ", "rank 1: 1B0 stands twice"),
        ("1F0 1B0", "1B0 1F0", "rank 1: 1B0 stands before 1F0, which it needs"),
        ("1I1 1SEND_B1 1W1", "1W1 1I1 1SEND_B1", "rank 1: 1W1 stands before 1I1, which it needs"),
        ("0RECV_B1 0B1", "0B1 0RECV_B1", "rank 0: 0B1 stands before 0RECV_B1, which it needs"),
        ("1I1 1SEND_B1", "1SEND_B1 1I1", "rank 1: 1SEND_B1 stands before 1I1, which it needs"),
        (" 1RECV_F1", "", "rank 1: 1RECV_F1 is missing"),
        (" 0SEND_F1", "", "rank 0: 0SEND_F1 is missing"),
        ("0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0", "rank 1: 1RECV_F0 stands where rank 0 sends what"),
        ("0F1 ", "0F1 0F2 ", "rank 0: 0B2 (or 0I2 and 0W2) is missing"),
        ("0F0 ", "0F0 1F0 ", "rank 1: 1RECV_F0 is of stage 1, which rank 0 runs"),
        ("0B0 ", "0B0 3B0 ", "no rank runs stage 2: 2F0 is missing"),
        ("1UPDATE", "", "rank 1: 1UPDATE is missing"),
        ("0REDUCE_GRAD0 0UPDATE", "0UPDATE 0REDUCE_GRAD0", "rank 0: 0REDUCE_GRAD0 stands after 0UPDATE"),
        ("1W1 1REDUCE_GRAD0", "1REDUCE_GRAD0 1W1", "rank 1: 1REDUCE_GRAD0 stands before 1W1, the last backward"),
        ("0REDUCE_GRAD0", "0REDUCE_GRAD0 0REDUCE_GRAD0", "rank 0: 0REDUCE_GRAD0 stands twice"),
        ("0F0 ", "0RECV_F0 0F0 ", "rank 0: 0RECV_F0 has no stage at its other end"),
        ("1F0 ", "1F0 1SEND_F0 ", "rank 1: 1SEND_F0 has no stage at its other end"),
    ],
)
def test_damaged_lists_are_refused(old: str, new: str, words: str) -> None:
    """The error names the rank and the action that is missing, twice or out of order."""
    text = lists(*SOUND)
    assert text.count(old) == 1
    with pytest.raises(ValueError, match="schedule 'written': ") as error:
        validate(Schedule.parse(text.replace(old, new), name="written"))
    assert words in str(error.value)


def test_what_cannot_be_parsed_is_refused_too() -> None:
    """Lists built from values: stages and micro-batches out of range, an index where none belongs."""
    for action, words in [
        (Action(2, Kind.F, 0), "2F0 is of a stage that is not among 0 ... 0"),
        (Action(0, Kind.F, 1), "0F1 is of a micro-batch that is not among 0 ... 0"),
        (Action(0, Kind.UPDATE, 1), "0UPDATE1 has an index"),
        (Action(0, Kind.F), "0F lacks its index"),
    ]:
        actions = (*one_f_one_b(1, 1).ranks[0], action)
        schedule = Schedule(name="built", num_stages=1, num_micro_batches=1, ranks=(actions,))
        with pytest.raises(ValueError, match="schedule 'built': rank 0: ") as error:
            validate(schedule)
        assert words in str(error.value)


def test_transfers_inside_a_rank_are_refused() -> None:
    """Stages on one rank hand over without."""
    with pytest.raises(ValueError, match="rank 0: 0SEND_F0 has its other end on the same rank"):
        validate(parse("0F0 0SEND_F0 1F0 1B0 0B0"))


def test_damaged_lists_get_no_transfers() -> None:
    """The pass checks what it is given."""
    with pytest.raises(ValueError, match="rank 0: 0B1"):
        with_transfers(parse("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"))
    with pytest.raises(ValueError, match="deadlock: pipeline 0 rank 0 waits at 0B0 for 1B0 of pipeline 0 rank 1"):
        with_transfers(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


# Deadlocks ----------------------------------------------------------------------------------------------------------


def test_neighbours_that_both_send_first() -> None:
    """1F1B with every SEND straight behind its action: a circle if sends wait, none if they do not."""
    naive = parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    validate(naive)
    assert deadlock([naive]) == (
        "pipeline 0 rank 0 waits at 0SEND_F1 for 1RECV_F1 of pipeline 0 rank 1",
        "pipeline 0 rank 1 waits at 1SEND_B0 for 0RECV_B0 of pipeline 0 rank 0",
    )
    assert deadlock([naive], rendezvous=False) is None


def test_a_stage_that_holds_more_than_the_one_before() -> None:
    """W = (1, 2), transfers implied: 1B0 comes after 1F1, which comes after 0F1, which comes after 0B0."""
    waits = (
        "pipeline 0 rank 0 waits at 0B0 for 1B0 of pipeline 0 rank 1",
        "pipeline 0 rank 1 waits at 1F1 for 0F1 of pipeline 0 rank 0",
    )
    schedule = parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    validate(schedule)
    assert deadlock([schedule]) == deadlock([schedule], rendezvous=False) == waits
    with pytest.raises(ValueError, match="deadlock: ") as error:
        check_deadlock([schedule])
    assert "; ".join(waits) in str(error.value)


def test_a_wait_for_what_is_not_there() -> None:
    """The last line names the action that the other rank does not list, or the stage that no rank runs."""
    assert deadlock([parse("0F0 0SEND_F0", "1F0 1B0")]) == (
        "pipeline 0 rank 0 waits at 0SEND_F0 for 1RECV_F0 of pipeline 0 rank 1",
        "pipeline 0 rank 1 does not list 1RECV_F0",
    )
    assert deadlock([parse("0F0", "2F0")]) == ("pipeline 0 rank 1 waits at 2F0 for 1F0, but no rank runs stage 1",)
    assert deadlock([parse("0F0 0SEND_F0 0SEND_F0", "1RECV_F0 1F0 1B0")]) == (
        "pipeline 0 rank 0 waits at 0SEND_F0 for 1RECV_F0 of pipeline 0 rank 1",
        "pipeline 0 rank 1 has run its list to the end",
    )
    assert deadlock([parse("0B0 0F0")]) == ("pipeline 0 rank 0 waits at 0B0 for 0F0 of pipeline 0 rank 0",)


def test_reductions_in_opposite_order() -> None:
    """Two ranks that share two groups wait for each other for ever, even if launches do not wait."""
    one = parse("0F0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD1 0UPDATE")
    other = parse("0F0 0B0 0REDUCE_GRAD1 0REDUCE_GRAD0 0UPDATE")
    assert deadlock([one, one]) is None
    assert deadlock([one, other]) == (
        "pipeline 0 rank 0 waits at 0REDUCE_GRAD0 for 0REDUCE_GRAD0 of pipeline 1 rank 0",
        "pipeline 1 rank 0 waits at 0REDUCE_GRAD1 for 0REDUCE_GRAD1 of pipeline 0 rank 0",
    )
    assert deadlock([one, other], rendezvous=False) == (
        "pipeline 0 rank 0 waits at 0UPDATE for 0REDUCE_GRAD0 of pipeline 1 rank 0",
        "pipeline 1 rank 0 waits at 0UPDATE for 0REDUCE_GRAD1 of pipeline 0 rank 0",
    )


def test_many_reductions_at_once() -> None:
    """Thousands that all wait for one rank end one after another."""
    actions = (Action(0, Kind.F, 0), Action(0, Kind.B, 0), *(Action(0, Kind.REDUCE_GRAD, n) for n in range(5000)))
    schedule = Schedule(name="long", num_stages=1, num_micro_batches=1, ranks=(actions,))
    assert deadlock([schedule] * 3, rendezvous=False) is None


def test_three_ranks_in_a_ring() -> None:
    """Each pair shares one group, and each starts with another one: a circle of three."""
    pairs = {0: [(0, 0), (1, 0)], 1: [(1, 0), (2, 0)], 2: [(2, 0), (0, 0)]}
    ring = [parse(f"0F0 0B0 0REDUCE_GRAD{a} 0REDUCE_GRAD{b}") for a, b in [(0, 2), (1, 0), (2, 1)]]
    waits = deadlock(ring, pairs)
    assert waits is not None
    assert len(waits) == 3
    sorted_order = [parse(f"0F0 0B0 0REDUCE_GRAD{a} 0REDUCE_GRAD{b}") for a, b in [(0, 2), (0, 1), (1, 2)]]
    assert deadlock(sorted_order, pairs) is None


def test_a_reduction_behind_a_transfer_that_needs_it() -> None:
    """Rank 0 of pipeline 1 reduces before it sends the activation on, and its peer is the rank that waits for it."""
    first = parse("0F0 0B0 0REDUCE_GRAD0")
    second = parse("0F0 0REDUCE_GRAD0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD0")
    assert deadlock([first, second]) == (
        "pipeline 1 rank 0 waits at 0REDUCE_GRAD0 for 1REDUCE_GRAD0 of pipeline 1 rank 1",
        "pipeline 1 rank 1 waits at 1RECV_F0 for 0SEND_F0 of pipeline 1 rank 0",
    )
    assert deadlock([first, second], rendezvous=False) is None


def test_groups_and_lists_have_to_agree() -> None:
    """A member that does not list the reduction, a rank that is no member, a member that does not exist."""
    lists_it, lists_none = parse("0F0 0B0 0REDUCE_GRAD3 0UPDATE"), parse("0F0 0B0 0UPDATE")
    both = {3: [(0, 0), (1, 0)]}
    for rendezvous, at in [(True, "0REDUCE_GRAD3"), (False, "0UPDATE")]:
        assert deadlock([lists_it, lists_none], both, rendezvous) == (
            f"pipeline 0 rank 0 waits at {at} for 0REDUCE_GRAD3 of pipeline 1 rank 0",
            "pipeline 1 rank 0 does not list 0REDUCE_GRAD3",
        )
    with pytest.raises(ValueError, match="pipeline 0 rank 0 lists 0REDUCE_GRAD3 and is not among its members"):
        deadlock([lists_it, lists_it], {3: [(1, 0)]})
    with pytest.raises(ValueError, match="REDUCE_GRAD3 has pipeline 2 rank 0 as a member, which does not exist"):
        deadlock([lists_it, lists_it], {3: [(0, 0), (1, 0), (2, 0)]})
    with pytest.raises(ValueError, match="no rank lists REDUCE_GRAD3"):
        deadlock([lists_none, lists_none], both)


# Of a plan ----------------------------------------------------------------------------------------------------------


def test_schedules_of_a_plan() -> None:
    """``plan`` keeps the plan's depths, and so does ``zero-bubble``; the others are what their names say."""
    pipeline = plan_by_hand().pipelines[0]  # 2 stages, 3 micro-batches, 2 and 1 in flight
    assert of_plan(pipeline).ranks == one_f_one_b(2, 3).ranks
    assert of_plan(pipeline, "zero-bubble") == zero_bubble(2, 3, [2, 1])
    deeper = dataclasses.replace(
        pipeline, stages=(dataclasses.replace(pipeline.stages[0], in_flight=3), *pipeline.stages[1:])
    )
    assert of_plan(deeper).ranks == depths(2, 3, [3, 1]).ranks
    for name, schedule in [
        ("gpipe", gpipe(2, 3)),
        ("1f1b", one_f_one_b(2, 3)),
        ("eager-1f1b", eager_one_f_one_b(2, 3)),
    ]:
        assert of_plan(deeper, name) == schedule


def test_unknown_names_are_refused() -> None:
    """With the nearest name, or with the reason."""
    pipeline = plan_by_hand().pipelines[0]
    with pytest.raises(ValueError, match=r"schedule '1fb1' is not among plan, gpipe, .*; did you mean '1f1b'\?"):
        of_plan(pipeline, "1fb1")
    with pytest.raises(
        ValueError, match="schedule 'interleaved' needs several stages per unit, and each unit of a plan runs"
    ):
        of_plan(pipeline, "interleaved")


def test_action_lists_of_a_plan() -> None:
    """Blocks [4, 6) in 2 chunks and [0, 4) in 5, then the tied weights of layers 0 and 5; pipeline 1 has one stage."""
    plan = plan_by_hand()
    assert [launch[:2] for launch in launches(plan)] == [(1, 1), (1, 0), (0, 4), (0, 3), (0, 2), (0, 1), (0, 0), (2, 0)]
    stranger = dataclasses.replace(plan.blocks[0], layers=(0, 5))
    with pytest.raises(ValueError, match=r"blocks\[0\].layers: \[0, 5\), pipeline 0 stage 0 runs \[0, 4\)"):
        launches(dataclasses.replace(plan, blocks=(stranger, *plan.blocks[1:])))
    stranger_tied = dataclasses.replace(plan.tied_blocks[0], layers=(8, 9))
    with pytest.raises(ValueError, match=r"tied_blocks\[0\].layers: \(8, 9\), pipeline 0 stage 0 runs \[0, 4\)"):
        launches(dataclasses.replace(plan, tied_blocks=(stranger_tied,)))
    schedules, groups = action_lists(plan)
    numbers = [f"REDUCE_GRAD{n}" for n in range(8)]
    first, second = schedules[0].ranks
    assert [str(action)[1:] for action in first][-7:] == [*numbers[2:], "UPDATE"]
    assert [str(action)[1:] for action in second][-4:] == [*numbers[:2], numbers[7], "UPDATE"]
    assert [str(action)[1:] for action in schedules[1].ranks[0]][-9:] == [*numbers, "UPDATE"]
    assert groups[0] == ((0, 1), (1, 0))
    assert groups[2] == ((0, 0), (1, 0))
    assert groups[7] == ((0, 0), (0, 1), (1, 0))
    check_deadlock(schedules, groups)
    check_deadlock(schedules, groups, rendezvous=False)


def test_one_pipeline_reduces_nothing() -> None:
    """No peers, no reductions; each stage still updates."""
    alone = refined(plan_by_hand(), [[0, 4, 6]], [3])
    (schedule,), groups = action_lists(alone)
    assert groups == {}
    assert str(schedule).count("UPDATE") == 2
    assert "REDUCE" not in str(schedule)


def refined(
    plan: Plan, cuts: Sequence[Sequence[int]], counts: Sequence[int], chunks: int = 1, tie: bool = False
) -> Plan:
    """`plan` with pipelines of 6 layers cut as told, and their blocks."""
    whole = plan.pipelines[1].stages[0]
    pipelines = []
    for edges, m in zip(cuts, counts, strict=True):
        S = len(edges) - 1
        stages = tuple(
            dataclasses.replace(whole, layers=(i, j), recompute=(), in_flight=min(m, S - s))
            for s, (i, j) in enumerate(itertools.pairwise(edges))
        )
        pipelines.append(Pipeline(micro_batch=1, num_micro_batches=m, stages=stages, time_s=1.0))

    def owner(p: int, layer: int) -> int:
        return next(s for s, j in enumerate(cuts[p][1:]) if layer < j)

    blocks = []
    for i, j in itertools.pairwise(sorted({edge for edges in cuts for edge in edges})):
        owners = tuple(owner(p, i) for p in range(len(cuts)))
        blocks.append(Block(layers=(i, j), owners=owners, gradient_bytes=1, num_chunks=chunks if len(cuts) > 1 else 0))
    tied: tuple[TiedBlock, ...] = ()
    homes = dict.fromkeys((p, owner(p, layer)) for p in range(len(cuts)) for layer in (0, 5))
    if tie and len(homes) > len(cuts):
        tied = (TiedBlock(layers=(0, 5), owners=tuple(homes), gradient_bytes=1),)
    return dataclasses.replace(plan, pipelines=tuple(pipelines), blocks=tuple(blocks), tied_blocks=tied)


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    """One to four pipelines of one to six stages, a few chunks, weights tied or not."""
    inner = st.sets(st.integers(1, 5)).map(lambda edges: [0, *sorted(edges), 6])
    cuts = draw(st.lists(inner, min_size=1, max_size=4))
    counts = [draw(st.integers(1, 7)) for _ in cuts]
    return refined(plan_by_hand(), cuts, counts, draw(st.integers(1, 3)), draw(st.booleans()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_plan(), st.sampled_from(NAMES))
def test_lists_of_any_plan_finish(plan: Plan, name: str) -> None:
    """Whatever the cuts, depths and counts: complete, and no circle even if every transfer and reduction waits."""
    schedules, groups = action_lists(plan, name)
    for schedule in schedules:
        validate(schedule)
        for actions in schedule.ranks:
            reductions = [action.index for action in actions if action.kind == Kind.REDUCE_GRAD]
            assert reductions == sorted(reductions)
    check_deadlock(schedules, groups)
    check_deadlock(schedules, groups, rendezvous=False)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(any_plan(), st.data())
def test_ranks_with_several_stages_finish_too(plan: Plan, data: st.DataObject) -> None:
    """Interleaved lists of a pipeline whose stages are dealt to fewer ranks."""
    schedules = []
    for pipeline in plan.pipelines:
        S = len(pipeline.stages)
        chunks = data.draw(st.sampled_from([n for n in range(1, S + 1) if S % n == 0]))
        schedules.append(interleaved(S // chunks, chunks, pipeline.num_micro_batches))
    complete, groups = action_lists(plan, schedules)
    for schedule in complete:
        validate(schedule)
    check_deadlock(complete, groups)
    check_deadlock(complete, groups, rendezvous=False)


# Against torch ------------------------------------------------------------------------------------------------------


def test_torch_makes_the_same_lists_and_accepts_ours() -> None:
    """torch.distributed.pipelining as oracle: the same interleaved and zero-bubble orders wherever it has one, and its
    own checks of compute and transfers pass on every list as read from our CSV."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    private = ("_get_1f1b_rank_ops", "_get_warmup_ops", "_validate_schedule", "_add_send_recv", "_Action")
    if not all(hasattr(theirs, name) for name in private):
        pytest.skip("this torch keeps its schedules elsewhere")

    def order(R: int, chunks: int, m: int, r: int, split: bool) -> str:
        size = m // max(1, m // R)
        ahead = theirs._get_warmup_ops(r, chunks, size, R, m, 1 if split else 2)
        rest = chunks * m - ahead
        actions = theirs._get_1f1b_rank_ops(
            chunks, R, ahead, rest, ahead, r,
            lambda n: n // size % chunks * R + r,
            lambda n: (chunks - 1 - (n - ahead) // size % chunks) * R + r,
            r if split else 0, split,
        )  # fmt: skip
        return " ".join(str(action) for action in actions if action is not None)

    for R, chunks, m in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12)):
        if m % max(1, m // R) == 0:
            expected = lists(*(order(R, chunks, m, r, False) for r in range(R)))
            assert str(interleaved(R, chunks, m)) == expected
            if chunks == 1 and m >= R:
                assert str(zero_bubble(R, m)) == lists(*(order(R, 1, m, r, True) for r in range(R)))

    for S, m in SIZES[1::4]:
        for schedule in generated(S, m):
            rows = [row.split(",") for row in schedule.to_csv().splitlines()]
            actions = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
            homes = theirs._validate_schedule(actions, len(rows), schedule.num_stages, m)
            assert homes == {s: schedule.rank_of(s) for s in range(schedule.num_stages)}
            theirs._add_send_recv(actions, homes.__getitem__, schedule.num_stages)
