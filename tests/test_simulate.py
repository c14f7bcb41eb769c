"""The simulator: every rule by a case worked out on a time line, then what must hold for all."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import factories
import pytest

from planner import Job, Plan, plan
from planner.cluster import Cluster
from planner.cost import one_f_one_b_s
from planner.plans import Block
from planner.schedule import (
    Action,
    Kind,
    Schedule,
    action_lists,
    deadlock,
    depths,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    validate,
    with_transfers,
    zero_bubble,
)
from planner.simulate import (
    IDLE,
    Event,
    Reduction,
    StageBytes,
    StageWork,
    Timeline,
    Workload,
    lay_out,
    play,
    simulate,
    workload,
)

ONE = gpipe(1, 1)  # 0F0 0B0


def work(forward_s: float, backward_s: float, send_s: float = 0.0, **others: object) -> StageWork:
    return StageWork(forward_s=forward_s, backward_s=backward_s, send_s=send_s, **others)  # type: ignore[arg-type]


def run(schedule: Schedule, *works: StageWork, blocking: bool = False) -> Timeline:
    return play(Workload(pipelines=((schedule, works),)), blocking=blocking)


def rows(events: Sequence[Event]) -> str:
    return " ".join(f"{event.action}@{event.start_s:g}-{event.end_s:g}" for event in events)


def lanes(timeline: Timeline) -> list[str]:
    return [rows(lane.events) for lane in timeline.lanes]


def path(timeline: Timeline) -> str:
    return rows([event for _, event in timeline.critical_path])


def parse(text: str, num_micro_batches: int) -> Schedule:
    ranks = tuple(tuple(map(Action.parse, line.split())) for line in text.splitlines())
    stages = {action.stage for actions in ranks for action in actions}
    return Schedule(name="written", num_stages=len(stages), num_micro_batches=num_micro_batches, ranks=ranks)


# Compute, by schedule.


def test_one_f_one_b_of_unequal_stages() -> None:
    """F, B of 1, 2 and 2, 3 s, m = 3: the second stage is never idle after its first forward, the first waits for it.

    Stage 1: F0 from 1 (0F0 ends), then no gap: 1 + 3 x 5 = 16. Stage 0: B0 after 1B0 (6), B1 after 1B1 (11), B2 after
    1B2 (16): 18.
    """
    timeline = run(one_f_one_b(2, 3), work(1, 2), work(2, 3))
    assert lanes(timeline) == [
        "0F0@0-1 0F1@1-2 0B0@6-8 0F2@8-9 0B1@11-13 0B2@16-18",
        "1F0@1-3 1B0@3-6 1F1@6-8 1B1@8-11 1F2@11-13 1B2@13-16",
    ]
    assert timeline.iteration_s == 18
    assert path(timeline) == "0F0@0-1 1F0@1-3 1B0@3-6 1F1@6-8 1B1@8-11 1F2@11-13 1B2@13-16 0B2@16-18"


def test_gpipe_of_unequal_stages() -> None:
    """The same stages: 1F2 ends at 1 + 3 x 2 = 7, 1B2 at 7 + 3 x 3 = 16, and 0B2 2 s later."""
    timeline = run(gpipe(2, 3), work(1, 2), work(2, 3))
    assert lanes(timeline) == [
        "0F0@0-1 0F1@1-2 0F2@2-3 0B0@10-12 0B1@13-15 0B2@16-18",
        "1F0@1-3 1F1@3-5 1F2@5-7 1B0@7-10 1B1@10-13 1B2@13-16",
    ]


def test_eager_one_f_one_b_hides_transfers() -> None:
    """F = B = 1 s, transfers of 1 s, m = 4. 1F1B: stage 1 starves for F2; eager has sent it ahead.

    1F1B: 1F0 at 2 (1 + 1), 1B0 3-4, 1F1 4-5, 1B1 5-6; its gradient is at stage 0 at 5, 0B0 5-6, 0F2 6-7, which is at
    stage 1 at 8. Eager: 0F2 is done at 3, its transfer waits for the one before (2-3) and is over at 4.
    """
    works = work(1, 1, 1), work(1, 1)
    late = run(one_f_one_b(2, 4), *works)
    assert lanes(late) == [
        "0F0@0-1 0F1@1-2 0B0@5-6 0F2@6-7 0B1@7-8 0F3@8-9 0B2@11-12 0B3@13-14",
        "1F0@2-3 1B0@3-4 1F1@4-5 1B1@5-6 1F2@8-9 1B2@9-10 1F3@10-11 1B3@11-12",
    ]
    eager = run(eager_one_f_one_b(2, 4), *works)
    assert lanes(eager) == [
        "0F0@0-1 0F1@1-2 0F2@2-3 0B0@5-6 0F3@6-7 0B1@7-8 0B2@9-10 0B3@11-12",
        "1F0@2-3 1B0@3-4 1F1@4-5 1B1@5-6 1F2@6-7 1B2@7-8 1F3@8-9 1B3@9-10",
    ]


def test_interleaved_of_unequal_stages() -> None:
    """Two ranks with two stages each, m = 2, transfers of 0.5 s; (F, B) = (1, 2), (2, 3), (1, 1), (1, 2).

    Rank 1 has 1F0 from 1.5 to 3.5, so 2F0 runs from 4; 1F1 to 5.5, so 2F1 from 6. Rank 1 then never waits: 3F0 5.5,
    3B0 6.5, 3F1 8.5, 3B1 9.5, 1B0 11.5, 1B1 14.5 to 17.5; 0B1 from 18 to 20.
    """
    timeline = run(interleaved(2, 2, 2), work(1, 2, 0.5), work(2, 3, 0.5), work(1, 1, 0.5), work(1, 2))
    assert lanes(timeline) == [
        "0F0@0-1 0F1@1-2 2F0@4-5 2F1@6-7 2B0@9-10 2B1@12-13 0B0@15-17 0B1@18-20",
        "1F0@1.5-3.5 1F1@3.5-5.5 3F0@5.5-6.5 3B0@6.5-8.5 3F1@8.5-9.5 3B1@9.5-11.5 1B0@11.5-14.5 1B1@14.5-17.5",
    ]
    assert timeline.lanes[0].stages == (0, 2)


def test_stages_of_one_rank_hand_over_for_nothing() -> None:
    """All stages on one rank: no transfer is listed and no time passes, whatever a transfer would take: 2 x 6 s."""
    timeline = run(interleaved(1, 2, 2), work(1, 2, 9), work(1, 2))
    assert timeline.iteration_s == 12
    assert timeline.lanes[0].transfers == ()


def test_zero_bubble_of_unequal_stages() -> None:
    """(F, I, W) = (1, 2, 1) and (2, 1, 2), m = 3: stage 0 gets its gradients before 1W runs.

    Stage 1: 1F0 1-3, 1I0 3-4, 1F1 4-6 (it may hold two), 1I1 6-7, 1W0, then it may hold another: 1F2 9-11, and so on
    without a gap until 1 + 3 x 5 = 16. Stage 0: 0I0 from 4, 0W0 6-7, 0F2 7-8, 0I1 8-10 (1I1 ended at 7), 0W1, and 0I2
    from 12.
    """
    timeline = run(zero_bubble(2, 3), work(1, 3, weight_s=1), work(2, 3, weight_s=2))
    assert lanes(timeline) == [
        "0F0@0-1 0F1@1-2 0I0@4-6 0W0@6-7 0F2@7-8 0I1@8-10 0W1@10-11 0I2@12-14 0W2@14-15",
        "1F0@1-3 1I0@3-4 1F1@4-6 1I1@6-7 1W0@7-9 1F2@9-11 1I2@11-12 1W1@12-14 1W2@14-16",
    ]
    # with B of 3 s in their place: 0F0 1, stage 1 without a gap 1 + 3 x 5 = 16, 0B2 3: 19
    assert run(one_f_one_b(2, 3), work(1, 3), work(2, 3)).iteration_s == 19


def test_a_split_backward_is_halved_unless_told() -> None:
    """B of 3 s without weight_s: I and W of 1.5 s each."""
    assert lanes(run(zero_bubble(1, 1), work(1, 3))) == ["0F0@0-1 0I0@1-2.5 0W0@2.5-4"]


def test_one_micro_batch_may_be_split_and_another_not() -> None:
    """F = 1, B = 2, halves of 1: micro-batch 0 is held until the end of W0 (4), 1 until that of B1 (6)."""
    timeline = run(parse("0F0 0I0 0F1 0W0 0B1", 2), work(1, 2, memory=StageBytes(activations=1)))
    assert lanes(timeline) == ["0F0@0-1 0I0@1-2 0F1@2-3 0W0@3-4 0B1@4-6"]
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert (memory.times_s, memory.activations) == ((0, 2, 4, 6), (1, 2, 1, 0))
    assert timeline.peak_in_flight(0, 0) == 2


def test_a_list_that_a_user_wrote() -> None:
    """Backwards in another order than forwards: 0B1 needs 1B1, which runs first.

    Stage 1: 1F0 1-2, 1F1 2-3, 1B1 3-5, 1B0 5-7. Stage 0: 0B1 5-7, 0B0 7-9.
    """
    timeline = run(parse("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", 2), work(1, 2), work(1, 2))
    assert lanes(timeline) == ["0F0@0-1 0F1@1-2 0B1@5-7 0B0@7-9", "1F0@1-2 1F1@2-3 1B1@3-5 1B0@5-7"]


# Transfers.


def test_transfers_go_on_while_computing() -> None:
    """1F1B, (F, B) = (1, 2) and (2, 3), transfers of 1 s, m = 3: stage 1 has F1 at hand when B0 ends.

    Stage 1: 1F0 2-4, 1B0 4-7, 1F1 (there since 3) 7-9, 1B1 9-12. Stage 0: gradient 0 comes at 8: 0B0 8-10, 0F2 10-11,
    there at 12: 1F2 12-14, 1B2 14-17; 0B2 18-20.
    """
    timeline = run(one_f_one_b(2, 3), work(1, 2, 1), work(2, 3))
    assert lanes(timeline) == [
        "0F0@0-1 0F1@1-2 0B0@8-10 0F2@10-11 0B1@13-15 0B2@18-20",
        "1F0@2-4 1B0@4-7 1F1@7-9 1B1@9-12 1F2@12-14 1B2@14-17",
    ]
    assert rows(timeline.lanes[0].transfers) == (
        "0SEND_F0@1-2 0SEND_F1@2-3 0RECV_B0@7-8 0SEND_F2@11-12 0RECV_B1@12-13 0RECV_B2@17-18"
    )
    assert rows(timeline.lanes[1].transfers) == (
        "1RECV_F0@1-2 1RECV_F1@2-3 1SEND_B0@7-8 1RECV_F2@11-12 1SEND_B1@12-13 1SEND_B2@17-18"
    )


def test_blocking_transfers_keep_both_ends() -> None:
    """The same, but both ends wait: 0SEND_F1 starts when stage 1 comes to it after 1B0, together with 1SEND_B0.

    1F0 2-4, 1B0 4-7, both transfers 7-8, 1F1 8-10, 1B1 10-13, 0B0 8-10, 0F2 10-11; exchange 13-14; 1F2 14-16, 1B2
    16-19; gradient 20; 0B2 20-22. Stage 0 waits 1-2, 7-8, 13-14, 19-20 for transfers that move, and 3-7, 11-13, 16-19
    for gradients.
    """
    timeline = run(one_f_one_b(2, 3), work(1, 2, 1), work(2, 3), blocking=True)
    assert lanes(timeline) == [
        "0F0@0-1 0F1@2-3 0B0@8-10 0F2@10-11 0B1@14-16 0B2@20-22",
        "1F0@2-4 1B0@4-7 1F1@8-10 1B1@10-13 1F2@14-16 1B2@16-19",
    ]
    idle = timeline.lanes[0].idle
    assert (idle.transfer_s, idle.gradient_s, idle.activation_s) == (4, 9, 0)
    assert path(timeline).endswith("1B1@10-13 1SEND_B1@13-14 1F2@14-16 1B2@16-19 1SEND_B2@19-20 0B2@20-22")


def test_a_gradient_may_take_longer_than_its_activation() -> None:
    """F, B of 1 s, 1 s there, 3 s back: 0F0 1, there 2, 1F0 3, 1B0 4, back 7, 0B0 8."""
    assert run(one_f_one_b(2, 1), work(1, 1, 1, send_back_s=3), work(1, 1)).iteration_s == 8


def test_in_and_out_of_a_port_are_independent() -> None:
    """Transfers of 3 s, F = B = 1 s, m = 2: 1SEND_B0 (6-9) and 0SEND_F1 (4-7) overlap.

    0SEND_F0 1-4; 0SEND_F1, ready at 2, 4-7; 1F0 4-5, 1B0 5-6; 1F1 7-8, 1B1 8-9, its gradient 9-12; 0B1 12-13.
    """
    timeline = run(one_f_one_b(2, 2), work(1, 1, 3), work(1, 1))
    assert rows(timeline.lanes[0].transfers) == "0SEND_F0@1-4 0SEND_F1@4-7 0RECV_B0@6-9 0RECV_B1@9-12"
    assert timeline.iteration_s == 13


def test_transfers_that_share_a_port_queue() -> None:
    """Two pipelines whose first stages share an out-port, whose second stages share an in-port, or neither.

    F = B = 1 s, 2 s there, nothing back. 0F0 ends at 1 in both. Alone: 1F0 3-4, 1B0 4-5, 0B0 5-6. Shared: pipeline 1
    comes second, 3-5: 0B0 ends at 8.
    """

    def ends(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[float, ...]:
        works = work(1, 1, 2, send_back_s=0, ports=first), work(1, 1, ports=second)
        return play(Workload(pipelines=((one_f_one_b(2, 1), works),) * 2)).pipelines_s

    assert ends((), ()) == (6, 6)
    assert ends(("a",), ()) == (6, 8)
    assert ends((), ("b",)) == (6, 8)
    assert ends(("a", "a2"), ("b",)) == (6, 8)


def test_transfers_are_served_in_the_order_they_are_ready() -> None:
    """Pipeline 1 is ready at 1, pipeline 0 at 2: 1 goes first, 0 waits until 4 though it stands first in the list."""
    slow = work(2, 1, 3, ports=("a",)), work(1, 1)
    fast = work(1, 1, 3, ports=("a",)), work(1, 1)
    timeline = play(Workload(pipelines=((one_f_one_b(2, 1), slow), (one_f_one_b(2, 1), fast))))
    assert rows(timeline.lanes[0].transfers[:1]) == "0SEND_F0@4-7"
    assert rows(timeline.lanes[2].transfers[:1]) == "0SEND_F0@1-4"


def test_a_transfer_inside_a_node_leaves_the_network_port_alone() -> None:
    """Pipeline 0 stays in node x, pipeline 1 leaves it by the one port of x: neither waits: 6 s."""
    inside = work(1, 1, 2, send_back_s=0, node="x", ports=("a",)), work(1, 1, node="x", ports=("a",))
    across = work(1, 1, 2, send_back_s=0, node="x", ports=("a",)), work(1, 1, node="y", ports=("b",))
    timeline = play(Workload(pipelines=((one_f_one_b(2, 1), inside), (one_f_one_b(2, 1), across))))
    assert timeline.pipelines_s == (6, 6)


def test_listed_transfers_play_like_implied_ones() -> None:
    """SEND right after its producer and RECV before its consumer change nothing where computing goes on."""
    works = work(1, 2, 0.7), work(2, 3, 0.4), work(1, 1)
    for schedule in (gpipe(3, 5), one_f_one_b(3, 5), eager_one_f_one_b(3, 5), zero_bubble(3, 5)):
        assert lanes(run(with_transfers(schedule), *works)) == lanes(run(schedule, *works))


def test_a_send_listed_late_leaves_late() -> None:
    """0SEND_F0 after 0F1: it leaves at 2 instead of 1. 1F0 3-4, 1B0 4-5."""
    text = "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    timeline = run(parse(text, 2), work(1, 1, 1), work(1, 1))
    assert rows(timeline.lanes[0].transfers[:2]) == "0SEND_F0@2-3 0SEND_F1@3-4"


def test_listed_transfers_block_one_by_one() -> None:
    """The same list, blocking. 0SEND_F0 2-3, and 0SEND_F1 only when stage 1 comes to it, after 1SEND_B0, which waits
    for 0RECV_B0, which comes after 0SEND_F1: a circle."""
    text = "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    with pytest.raises(ValueError, match=r"0SEND_F1 for 1RECV_F1 of rank 1.* 1SEND_B0 for 0RECV_B0 of rank 0"):
        run(parse(text, 2), work(1, 1, 1), work(1, 1), blocking=True)
    # With 0RECV_B0 before 0SEND_F1: send 2-3, 1F0 3-4, 1B0 4-5, back 5-6, 0SEND_F1 6-7, 0B0 7-8; 1F1 7-8, 1B1 8-9, 10,
    # 0B1 10-11.
    text = text.replace("0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1")
    assert lanes(run(parse(text, 2), work(1, 1, 1), work(1, 1), blocking=True)) == [
        "0F0@0-1 0F1@1-2 0B0@7-8 0B1@10-11",
        "1F0@3-4 1B0@4-5 1F1@7-8 1B1@8-9",
    ]


def test_a_blocking_send_keeps_its_rank_from_updating() -> None:
    """F = B = 1, transfers of 1 s, m = 1: 1B0 ends at 4, its gradient moves 4-5, and only then stage 1 updates, 5-6."""
    works = work(1, 1, 1, update_s=1), work(1, 1, update_s=1)
    assert lanes(run(one_f_one_b(2, 1), *works)) == ["0F0@0-1 0B0@5-6 0UPDATE@6-7", "1F0@2-3 1B0@3-4 1UPDATE@4-5"]
    timeline = run(one_f_one_b(2, 1), *works, blocking=True)
    assert lanes(timeline) == ["0F0@0-1 0B0@5-6 0UPDATE@6-7", "1F0@2-3 1B0@3-4 1UPDATE@5-6"]
    assert timeline.lanes[1].idle.transfer_s == 2


def test_what_a_rank_sends_and_receives_together_can_lock_up_too() -> None:
    """Interleaved, two ranks: each has a gradient to send that the other receives only after its own. The order of
    `with_transfers` has none of that."""
    works = [work(1, 2, 0.5)] * 4
    with pytest.raises(ValueError, match=r"circle: .* waits at 2SEND_B0 for 1RECV_B0 of rank 1; .* waits at 3SEND_B1"):
        run(interleaved(2, 2, 4), *works, blocking=True)
    assert run(with_transfers(interleaved(2, 2, 4)), *works, blocking=True).iteration_s > 24


def test_every_schedule_with_transfers_finishes_blocking() -> None:
    """The order `with_transfers` gives never locks up, for all schedules, S and m up to 5 and 7."""
    for schedule in all_schedules(5, 7):
        works = [work(1, 2, 0.5)] * schedule.num_stages
        blocking = run(with_transfers(schedule), *works, blocking=True)
        assert blocking.iteration_s >= run(schedule, *works).iteration_s - 1e-9


# Reductions and updates.


def reduce_of(count: int, *reductions: Reduction, works: Sequence[StageWork] = ()) -> Timeline:
    """`count` pipelines of one stage, F = 1 and B = 2 s: all gradients are there at 3 s."""
    each = works or [work(1, 2)] * count
    return play(Workload(pipelines=tuple((ONE, (work,)) for work in each), reductions=reductions))


def between(*pipelines: int, seconds: float = 1.0, block: str = "", **others: object) -> Reduction:
    members = tuple((p, 0) for p in pipelines)
    return Reduction(block=block or str(members), seconds=seconds, members=members, **others)  # type: ignore[arg-type]


def spans(timeline: Timeline) -> dict[int, tuple[float, float]]:
    return {event.action.index: (event.start_s, event.end_s) for lane in timeline.lanes for event in lane.reductions}  # type: ignore[misc]


def test_blocks_side_by_side_are_as_slow_as_the_most_loaded_port() -> None:
    """Three blocks of 1 s over {0, 2}, {0, 3}, {1, 3}: ports 0 and 3 carry two each, half speed, all end after 2 s.

    The middle one has half of port 0 and half of port 3; the outer two have half of one port and all of another.
    """
    timeline = reduce_of(4, between(0, 2), between(0, 3), between(1, 3))
    assert spans(timeline) == {0: (3, 5), 1: (3, 5), 2: (3, 5)}
    assert timeline.exposed_sync_s == 2


def test_blocks_on_different_ports_run_side_by_side() -> None:
    """{0, 1} and {2, 3}: 1 s each, both from 3 to 4."""
    assert spans(reduce_of(4, between(0, 1), between(2, 3))) == {0: (3, 4), 1: (3, 4)}


def test_a_shorter_block_leaves_its_part_to_the_longer_one() -> None:
    """1 s and 3 s over the same ports: at half speed the first ends at 5, then 2 of 3 s are left at full speed: 7."""
    assert spans(reduce_of(2, between(0, 1, block="a"), between(0, 1, seconds=3, block="b"))) == {0: (3, 5), 1: (3, 7)}


def test_chunks_of_a_block_run_one_after_another() -> None:
    """1 s and 3 s of one block: 3-4, 4-7."""
    timeline = reduce_of(2, between(0, 1), between(0, 1, seconds=3))
    assert spans(timeline) == {0: (3, 4), 1: (4, 7)}
    assert path(timeline) == "0F0@0-1 0B0@1-3 0REDUCE_GRAD0@3-4 0REDUCE_GRAD1@4-7"


def test_a_port_wider_than_the_ring_carries_two() -> None:
    """Rank 0 could run each ring in half a second, its peers 1 and 2 cannot: both at full speed, 3-4.

    At 0.75 s per ring the port gives 1 / (2 x 0.75) = 2/3 of full speed: 1.5 s.
    """

    def end(port_s: float) -> float:
        return max(spans(reduce_of(3, *(between(0, p, port_s=(port_s, 1)) for p in (1, 2)))).values())[1]

    assert end(0.5) == 4
    assert end(0.75) == pytest.approx(4.5)
    assert end(1.0) == 5


def test_ranks_that_share_a_network_port_share_it_for_reductions() -> None:
    """Pipelines 0 and 1 in node x, behind one port: {0, 2} and {1, 3} of 1 s end after 2 s; inside the node {0, 1} runs
    on their own ports beside {2, 3}."""
    works = [work(1, 2, node=node, ports=(node,)) for node in ("x", "x", "y", "z")]
    assert spans(reduce_of(4, between(0, 2), between(1, 3), works=works)) == {0: (3, 5), 1: (3, 5)}
    assert spans(reduce_of(4, between(0, 1), between(0, 2), works=works)) == {0: (3, 4), 1: (3, 4)}


def test_reductions_start_inside_the_last_backward() -> None:
    """Gradients ready after a quarter of the last backward (2 s from 1): 1.5; of the other member after a half: 2.

    Overlapped: 2-2.5, nothing exposed. At its end: 3-3.5.
    """
    timeline = reduce_of(2, between(0, 1, seconds=0.5, ready=(0.25, 0.5)))
    assert spans(timeline) == {0: (2, 2.5)}
    assert timeline.exposed_sync_s == 0
    assert path(timeline) == "0F0@0-1 0B0@1-3"
    late = reduce_of(2, between(0, 1, seconds=0.5))
    assert spans(late) == {0: (3, 3.5)}
    assert late.exposed_sync_s == 0.5


def test_the_critical_path_leaves_a_backward_where_gradients_are_ready() -> None:
    """Ready at half of the backward, 4 s long: 0B0 counts from 1 to 2 only."""
    timeline = reduce_of(2, between(0, 1, seconds=4, ready=(0.5, 0.5)))
    assert path(timeline) == "0F0@0-1 0B0@1-2 0REDUCE_GRAD0@2-6"


def test_a_rank_joins_its_reductions_in_one_order() -> None:
    """Reduction 0 is ready at 3 on pipeline 0, reduction 1 at 1.5: rank 0 joins 1 only after 0, so it starts at 3."""
    timeline = reduce_of(3, between(0, 1), between(0, 2, ready=(0.25, 0.25)))
    assert spans(timeline) == {0: (3, 5), 1: (3, 5)}
    # The list of every rank may have it the other way round: 1 from 1.5 alone, done at 2.5.
    ranks = ["0F0 0B0 0REDUCE_GRAD1 0REDUCE_GRAD0", "0F0 0B0 0REDUCE_GRAD0", "0F0 0B0 0REDUCE_GRAD1"]
    load = Workload(
        pipelines=tuple((parse(text, 1), (work(1, 2),)) for text in ranks),
        reductions=(between(0, 1), between(0, 2, ready=(0.25, 0.25))),
    )
    assert spans(play(load)) == {0: (3, 4), 1: (1.5, 2.5)}


def test_a_split_backward_has_its_gradients_after_the_last_w() -> None:
    """F, I, W of 1 s, m = 1: ready at half of W: 2.5."""
    load = Workload(
        pipelines=((zero_bubble(1, 1), (work(1, 2),)), (zero_bubble(1, 1), (work(1, 2),))),
        reductions=(between(0, 1, ready=(0.5, 0.5)),),
    )
    assert spans(play(load)) == {0: (2.5, 3.5)}


def test_stages_that_finish_early_reduce_during_the_cool_down() -> None:
    """Two equal pipelines of two stages, F = B = 1, m = 1: stage 1 is done at 3, its 1 s ring ends at 4 as 0B0 does.

    Stage 0 is done at 4, its ring of 2 s ends at 6: exposed 2 s.
    """
    load = Workload(
        pipelines=((one_f_one_b(2, 1), (work(1, 1), work(1, 1))),) * 2,
        reductions=(
            Reduction(block="late", seconds=1, members=((0, 1), (1, 1))),
            Reduction(block="early", seconds=2, members=((0, 0), (1, 0))),
        ),
    )
    timeline = play(load)
    assert spans(timeline) == {0: (3, 4), 1: (4, 6)}
    assert (timeline.exposed_sync_s, timeline.iteration_s) == (2, 6)
    assert timeline.lanes[1].idle.sync_s == 1
    assert timeline.lanes[1].idle.end_s == 2


def test_a_transfer_has_its_port_to_itself() -> None:
    """Stage 1 of both pipelines reduces from 3 on, and sends its gradient (3-5) first: the ring of 1 s runs 5-6.

    F = B = 1, m = 1, nothing there, 2 s back: 0F0 0-1, 1F0 1-2, 1B0 2-3, back 3-5, 0B0 5-6.
    """
    load = Workload(
        pipelines=((one_f_one_b(2, 1), (work(1, 1, 0, send_back_s=2), work(1, 1))),) * 2,
        reductions=(Reduction(block="late", seconds=1, members=((0, 1), (1, 1))),),
    )
    assert spans(play(load)) == {0: (3, 6)}


def test_a_reduction_that_runs_stops_for_a_transfer() -> None:
    """A ring of 1 s ready at 2.5, in the middle of the last backward; the gradient takes the port from 3 to 5.

    Half a second before, half after: 5.5.
    """
    load = Workload(
        pipelines=((one_f_one_b(2, 1), (work(1, 1, 0, send_back_s=2), work(1, 1))),) * 2,
        reductions=(Reduction(block="late", seconds=1, members=((0, 1), (1, 1)), ready=(0.5, 0.5)),),
    )
    assert spans(play(load)) == {0: (2.5, 5.5)}


def test_waiting_for_peers_is_not_sync() -> None:
    """Pipeline 0 is done at 3, pipeline 1 at 6: rank 0 waits 3 s for its peer, then 1 s for the ring; then 0.5 of
    update. Rank 1 waits for the ring only."""
    works = [work(1, 2, update_s=0.5), work(2, 4, update_s=1)]
    timeline = reduce_of(2, between(0, 1), works=works)
    first, second = (lane.idle for lane in timeline.lanes)
    assert (first.peers_s, first.sync_s, first.end_s) == (3, 1, 0.5)
    assert (second.peers_s, second.sync_s, second.end_s) == (0, 1, 0)
    assert lanes(timeline) == ["0F0@0-1 0B0@1-3 0UPDATE@7-7.5", "0F0@0-2 0B0@2-6 0UPDATE@7-8"]
    assert timeline.iteration_s == 8
    assert path(timeline) == "0F0@0-2 0B0@2-6 0REDUCE_GRAD0@6-7 0UPDATE@7-8"


def test_a_rank_updates_its_stages_one_after_another() -> None:
    """Two stages on one rank, (F, B) = (1, 1), m = 1: 0F0 1F0 1B0 0B0 end at 4, updates of 1 and 2 s."""
    timeline = run(interleaved(1, 2, 1), work(1, 1, update_s=1), work(1, 1, update_s=2))
    assert lanes(timeline) == ["0F0@0-1 1F0@1-2 1B0@2-3 0B0@3-4 0UPDATE@4-5 1UPDATE@5-7"]


def test_a_reduction_of_one_pipeline_ties_two_of_its_stages() -> None:
    """Stages 0 and 1 of one pipeline share weights: the ring of 1 s starts when both are done, at 4."""
    load = Workload(
        pipelines=((one_f_one_b(2, 1), (work(1, 1), work(1, 1))),),
        reductions=(Reduction(block="tied", seconds=1, members=((0, 0), (0, 1))),),
    )
    assert spans(play(load)) == {0: (4, 5)}


def test_reductions_that_nothing_is_sent_for_take_no_time() -> None:
    """A ring of 0 s is no event, and the next of its block starts as if it were not there."""
    assert spans(reduce_of(2, between(0, 1, seconds=0), between(0, 1))) == {1: (3, 4)}


# Memory.


def test_memory_over_time_by_category() -> None:
    """1F1B, stage 0 of two, m = 2: two micro-batches of 10 and 1 bytes in flight, 5 of workspace while computing.

    F = B = 1: F0 0-1, F1 1-2, B0 3-4 (1F0 1-2, 1B0 2-3), B1 5-6 (1F1 3-4, 1B1 4-5). 100 bytes are held throughout.
    """
    need = StageBytes(weights=60, gradients=20, optimizer=20, activations=10, logits=1, workspace=5, capacity=200)
    timeline = run(one_f_one_b(2, 2), work(1, 1, memory=need), work(1, 1, memory=StageBytes(activations=7)))
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert memory.times_s == (0, 1, 2, 3, 4, 5, 6)
    assert memory.activations == (10, 20, 20, 20, 10, 10, 0)
    assert memory.logits == (1, 2, 2, 2, 1, 1, 0)
    assert memory.workspace == (5, 5, 0, 5, 0, 5, 0)
    assert memory.totals == (116, 127, 122, 127, 111, 116, 100)
    assert memory.peak_bytes == 127
    assert (memory.peak("activations"), memory.peak("weights"), memory.peak("workspace")) == (20, 60, 5)
    assert memory.levels("optimizer") == (20,) * 7
    assert memory.capacity == 200


def test_bytes_are_freed_before_others_are_taken() -> None:
    """The last stage of 1F1B ends B0 as it starts F1: it never holds two."""
    timeline = run(one_f_one_b(1, 3), work(1, 1, memory=StageBytes(activations=7)))
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert memory.activations == (7, 0)  # one span: freed and taken at the same instants
    assert memory.times_s == (0, 6)


def test_i_frees_nothing() -> None:
    """F, I, W of 1 s, m = 2 in flight: held until W ends. 0F0 0I0 0F1 0I1 0W0 0W1, or as the list has it."""
    timeline = run(parse("0F0 0I0 0F1 0I1 0W0 0W1", 2), work(1, 2, memory=StageBytes(activations=3)))
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert memory.times_s == (0, 2, 5, 6)
    assert memory.activations == (3, 6, 3, 0)
    assert timeline.peak_in_flight(0, 0) == 2


def test_memory_of_a_rank_is_that_of_all_its_stages() -> None:
    """Interleaved on one rank, m = 1: 0F0 0-1 holds 10, 1F0 1-2 20 more, 1B0 2-3, 0B0 3-4; weights 1 + 2."""
    needs = StageBytes(weights=1, activations=10), StageBytes(weights=2, activations=20)
    timeline = run(interleaved(1, 2, 1), *(work(1, 1, memory=need) for need in needs))
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert memory.activations == (10, 30, 10, 0)
    assert memory.weights == 3


def test_in_flight_is_what_the_schedules_promise() -> None:
    """min(m, S - s) under 1F1B, min(m, 2(S - 1 - s) + 1) when eager, the stated depths, m under GPipe."""
    draw = random.Random(3)
    for num_stages, m in itertools.product(range(1, 6), (1, 3, 8)):
        works = [work(draw.uniform(1, 3), draw.uniform(1, 3), draw.choice((0.0, 0.5))) for _ in range(num_stages)]
        stated = [4 + 3 * (num_stages - s) for s in range(num_stages)]
        for schedule, expected in (
            (one_f_one_b(num_stages, m), [num_stages - s for s in range(num_stages)]),
            (eager_one_f_one_b(num_stages, m), [2 * (num_stages - 1 - s) + 1 for s in range(num_stages)]),
            (depths(num_stages, m, stated), stated),
            (gpipe(num_stages, m), [m] * num_stages),
        ):
            timeline = run(schedule, *works)
            for s in range(num_stages):
                assert timeline.peak_in_flight(0, s) == min(m, expected[s])


# Laws.


def all_schedules(most_stages: int, most_micro_batches: int) -> Iterator[Schedule]:
    for num_stages, m in itertools.product(range(1, most_stages + 1), range(1, most_micro_batches + 1)):
        yield gpipe(num_stages, m)
        yield one_f_one_b(num_stages, m)
        yield eager_one_f_one_b(num_stages, m)
        yield depths(num_stages, m, [3 * (num_stages - s) for s in range(num_stages)])
        yield zero_bubble(num_stages, m)
        yield from (interleaved(r, num_stages // r, m) for r in range(1, num_stages) if num_stages % r == 0)


def drawn(draw: random.Random, uneven: float, transfers: float) -> tuple[list[float], list[float], list[float], int]:
    """As in benchmarks/fidelity_formula: F, B and transfers of 1 to 8 stages, and m."""
    num_stages = draw.randint(2, 8)
    forward = [draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)]
    backward = [2 * draw.uniform(1 - uneven, 1 + uneven) for _ in range(num_stages)]
    return forward, backward, [transfers] * (num_stages - 1), draw.randint(num_stages, 4 * num_stages + 8)


def played(
    forward: Sequence[float], backward: Sequence[float], hand_over: Sequence[float], schedule: Schedule
) -> Timeline:
    return run(schedule, *(work(*each) for each in zip(forward, backward, [*hand_over, 0.0], strict=True)))


def test_equal_stages_with_free_links_are_exact() -> None:
    """(m + S - 1)(F + B), bubble (S - 1) / (m + S - 1), for GPipe and 1F1B; F = 1, B = 2, S and m up to 8."""
    for num_stages, m in itertools.product(range(1, 9), range(1, 9)):
        for schedule in (gpipe(num_stages, m), one_f_one_b(num_stages, m), eager_one_f_one_b(num_stages, m)):
            timeline = run(schedule, *[work(1, 2)] * num_stages)
            assert timeline.iteration_s == 3 * (m + num_stages - 1)
            assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / (m + num_stages - 1), abs=1e-12)


def test_zero_bubble_of_equal_stages_saves_two_thirds_of_the_bubble() -> None:
    """F = I = W = 1, m >= S: a stage works 3 m, and of the S - 1 steps of fill and drain only the F of the fill are
    left: 3 m + S - 1, where 1F1B has 3 (m + S - 1)."""
    for num_stages in range(1, 7):
        for m in (2 * num_stages, 3 * num_stages):
            timeline = run(zero_bubble(num_stages, m), *[work(1, 2)] * num_stages)
            assert timeline.iteration_s == 3 * m + num_stages - 1


def test_interleaving_divides_the_bubble() -> None:
    """R ranks, v equal stages of F = 1, B = 2 each, R divides m: 3 v m + 3 (R - 1)."""
    for num_ranks, chunks in itertools.product((1, 2, 3, 4), (1, 2, 3)):
        m = 2 * num_ranks
        timeline = run(interleaved(num_ranks, chunks, m), *[work(1, 2)] * (num_ranks * chunks))
        assert timeline.iteration_s == 3 * chunks * m + 3 * (num_ranks - 1)


def test_the_floor_is_never_above_the_simulation() -> None:
    """max_s (sum_{j<s} t_j + m t_s) on 80 random pipelines, with and without transfers, under three schedules."""
    draw = random.Random(11)
    for _ in range(80):
        forward, backward, hand_over, m = drawn(draw, draw.choice((0.1, 0.9)), draw.choice((0.0, 0.3, 1.0)))
        loads = [f + b for f, b in zip(forward, backward, strict=True)]
        floor_s = max(sum(loads[:s]) + m * load for s, load in enumerate(loads))
        num_stages = len(loads)
        for make in (gpipe, one_f_one_b, eager_one_f_one_b):
            assert floor_s <= played(forward, backward, hand_over, make(num_stages, m)).iteration_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("uneven", "transfers", "low", "high"),
    [(0.1, 0.0, -0.0005, 0.0005), (0.3, 0.05, -0.02, 0.005), (0.3, 0.25, -0.08, 0.03)],
)
def test_the_1f1b_form_is_within_its_stated_errors(uneven: float, transfers: float, low: float, high: float) -> None:
    """0.0 % for stages within 10 % and free links; -2.0 / +0.5 % for transfers of 5 % of F; -8 / +3 % for 25 %."""
    draw = random.Random(12)
    for _ in range(120):
        forward, backward, hand_over, m = drawn(draw, uneven, transfers)
        exact = played(forward, backward, hand_over, one_f_one_b(len(forward), m)).iteration_s
        assert low <= one_f_one_b_s(forward, backward, hand_over, m) / exact - 1 <= high


def test_idle_and_busy_fill_the_iteration_and_the_critical_path_covers_it() -> None:
    """On every schedule with random times, blocking or not: seconds add up, none is negative, the path has no hole."""
    draw = random.Random(13)
    for schedule in all_schedules(4, 5):
        works = [work(draw.choice((1, 2, 0.7)), draw.choice((1, 2, 0.7)), 0.3) for _ in range(schedule.num_stages)]
        pair = Reduction(block="a", seconds=1.5, members=((0, 0), (1, 0)), ready=(0.5, 0.5))
        for lists, blocking in ((schedule, False), (with_transfers(schedule), True)):
            load = Workload(
                pipelines=((lists, tuple(works)), (lists, tuple(replace(each, update_s=0.1) for each in works))),
                reductions=(pair, replace(pair, block="b", members=((0, schedule.num_stages - 1), (1, 0)))),
            )
            consistent(play(load, blocking=blocking))


def consistent(timeline: Timeline) -> None:
    for lane in timeline.lanes:
        assert lane.busy_s + lane.idle.total_s == pytest.approx(timeline.iteration_s, rel=1e-12)
        assert all(getattr(lane.idle, name) > -1e-9 for name in IDLE)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(lane.events))
    steps = [event for _, event in timeline.critical_path]
    assert (steps[0].start_s, steps[-1].end_s) == (0, timeline.iteration_s)
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(steps))


def test_faster_stages_and_links_do_not_lengthen_the_iteration() -> None:
    """1F1B of 2 to 5 stages, each F, B and link halved in turn: no longer, as long as no transfer waits for a port.

    A list fixes the order of all actions; if transfers start when they are ready, every start is a max of sums of
    seconds, which can only fall. Where transfers queue it may rise, as in the next test: on this grid by less than 5 %.
    """
    draw = random.Random(14)
    longer = 0
    for _ in range(80):
        num_stages, m = draw.randint(2, 5), draw.randint(1, 8)
        share = draw.choice((0.05, 0.25, 1))
        times = {
            "forward_s": [draw.choice((1, 1, 2, 3)) for _ in range(num_stages)],
            "backward_s": [draw.choice((1, 2, 2, 4)) for _ in range(num_stages)],
            "send_s": [share * draw.choice((1, 2)) for _ in range(num_stages)],
        }
        works = [work(f, b, c) for f, b, c in zip(*times.values(), strict=True)]
        before_s = run(one_f_one_b(num_stages, m), *works).iteration_s
        for s, name in itertools.product(range(num_stages), times):
            faster = [*works[:s], replace(works[s], **{name: times[name][s] / 2}), *works[s + 1 :]]
            timeline = run(one_f_one_b(num_stages, m), *faster)
            if not waiting_transfers(timeline):
                assert timeline.iteration_s <= before_s * (1 + 1e-12)
            elif timeline.iteration_s > before_s * (1 + 1e-12):
                longer += 1
                assert timeline.iteration_s < 1.05 * before_s
    assert longer < 10  # of some 800


def waiting_transfers(timeline: Timeline) -> int:
    """Transfers that started later than their producer ended."""
    waiting = 0
    for lane in timeline.lanes:
        ends = {event.action: event.end_s for event in lane.events}
        for (stage, kind, k), start_s, _ in lane.transfers:
            if kind in (Kind.SEND_F, Kind.SEND_B):
                waiting += start_s > ends[Action(stage, Kind.F if kind is Kind.SEND_F else Kind.B, k)]
    return waiting


def test_the_named_case_in_which_a_faster_stage_lengthens_the_iteration() -> None:
    """S = 3, m = 4, F = 2, 1, 1, B = 2, 1, 1, links of 1 and 2 s: 28 s; with the last backward in half the time 28.5.

    At 1 s, 2B2 ends at 16 together with 0F3, and activation 3 enters stage 1 first (16-17), gradient 2 after it. At
    0.5 s, gradient 2 is ready at 15, half a second before activation 3 (15.5), and holds the in-port of stage 1 until
    17: activation 3 comes at 18 instead of 17, and stage 1 runs F3 before B2.
    """

    def timeline(last_backward_s: float) -> Timeline:
        return run(one_f_one_b(3, 4), work(2, 2, 1), work(1, 1, 2), work(1, last_backward_s))

    slow, fast = timeline(1), timeline(0.5)
    assert (slow.iteration_s, fast.iteration_s) == (28, 28.5)
    assert "1RECV_F3@16-17 1RECV_B2@17-19" in rows(slow.lanes[1].transfers)
    assert "1RECV_B2@15-17 1RECV_F3@17-18" in rows(fast.lanes[1].transfers)


def test_times_scale() -> None:
    """All seconds times 4 (exact in binary): every start and end times 4."""
    works = work(1, 2, 0.25), work(2, 3, 0.5), work(1.5, 1)
    longer = [replace(w, forward_s=4 * w.forward_s, backward_s=4 * w.backward_s, send_s=4 * w.send_s) for w in works]
    once, four = (run(one_f_one_b(3, 5), *each) for each in (works, longer))
    for a, b in zip(once.lanes, four.lanes, strict=True):
        assert [(x, 4 * start_s, 4 * end_s) for x, start_s, end_s in a.events] == list(b.events)


def test_the_same_workload_plays_the_same() -> None:
    """Twice the same timeline, critical path and memory included."""
    works = work(1, 2, 0.3, memory=StageBytes(activations=2)), work(2, 3, 0.5, memory=StageBytes(activations=2))
    load = Workload(pipelines=((one_f_one_b(2, 5), works),) * 2, reductions=(between(0, 1),))
    assert play(load) == play(load)


# Damaged lists.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0B0\n1F0", "1B0"),
        ("0F0 0B0\n1F0 1B0 1B0", "1B0"),
        ("0B0 0F0\n1F0 1B0", "0B0"),
        ("0F0 0B0\n1F0 1B0 1F1", "1F1"),
    ],
)
def test_a_damaged_list_is_refused_by_name(text: str, said: str) -> None:
    """Missing, doubled, out of order, out of range: the pipeline and the action are named."""
    with pytest.raises(ValueError, match=f"pipeline 0: .*{said}"):
        run(parse(text, 1), work(1, 1), work(1, 1))


def test_every_list_that_validate_refuses_is_refused_in_its_words() -> None:
    """Lists of all schedules with one action dropped, doubled, moved or renamed, and a few of them."""
    draw = random.Random(15)
    refused = 0
    for schedule in all_schedules(3, 3):
        for _ in range(12):
            damaged = replace(schedule, ranks=tuple(map(tuple, damage(draw, schedule))))
            works = [work(1, 2, 0.5)] * schedule.num_stages
            try:
                validate(damaged)
            except ValueError as error:
                refused += 1
                with pytest.raises(ValueError, match=re.escape(f"pipeline 0: {error}")):
                    run(damaged, *works)
            else:
                if deadlock([damaged]) is None:
                    run(damaged, *works)
    assert refused > 300


def damage(draw: random.Random, schedule: Schedule) -> list[list[Action]]:
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(draw.randint(1, 2)):
        actions = draw.choice(ranks)
        i, j = draw.randrange(len(actions)), draw.randrange(len(actions))
        how = draw.choice(("swap", "drop", "double", "move", "kind", "index", "stage"))
        if how == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif how in ("drop", "move") and len(actions) > 1:
            action = actions.pop(i)
            if how == "move":
                draw.choice(ranks).insert(0, action)
        elif how == "double":
            actions.insert(j, actions[i])
        elif how == "kind":
            actions[i] = actions[i]._replace(kind=draw.choice((Kind.F, Kind.B, Kind.I, Kind.W)))
        elif how == "index":
            actions[i] = actions[i]._replace(index=draw.randint(-1, schedule.num_micro_batches))
        elif how == "stage":
            actions[i] = actions[i]._replace(stage=draw.randint(-1, schedule.num_stages))
    return ranks


def test_lists_that_wait_in_a_circle_are_refused_with_the_circle() -> None:
    """Rank 0 wants B0 before it sends F1, rank 1 wants F1 before it makes B0."""
    with pytest.raises(ValueError, match=r"circle: pipeline 0 rank 0 waits at 0B0 for 1SEND_B0 of rank 1; "):
        run(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2), work(1, 1), work(1, 1))


def test_reductions_listed_by_those_they_do_not_concern_are_refused() -> None:
    """A rank lists exactly the reductions it is a member of."""
    lists = parse("0F0 0B0 0REDUCE_GRAD1", 1)
    load = Workload(pipelines=((lists, (work(1, 1),)), (ONE, (work(1, 1),))), reductions=(between(0, 1),))
    with pytest.raises(ValueError, match="pipeline 0: rank 0 does not list REDUCE_GRAD 0, which it is a member of"):
        play(load)


def test_reductions_in_contrary_orders_are_refused() -> None:
    """Two ranks share two reductions and join them in opposite orders: each waits for the other."""
    lists = [parse(f"0F0 0B0 0REDUCE_GRAD{i} 0REDUCE_GRAD{1 - i}", 1) for i in (0, 1)]
    load = Workload(
        pipelines=tuple((each, (work(1, 1),)) for each in lists),
        reductions=(between(0, 1, block="a"), between(0, 1, block="b")),
    )
    with pytest.raises(ValueError, match="REDUCE_GRAD"):
        play(load)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: work(-1, 1), "forward_s: -1"),
        (lambda: work(1, math.inf), "backward_s: inf"),
        (lambda: work(1, 1, weight_s=2), "weight_s: 2 is more than the backward_s 1"),
        (lambda: between(0, 1, ready=(0.5,)), "ready: 1 values for 2 members"),
        (lambda: between(0, 1, ready=(0.5, 1.5)), "ready: 1.5"),
        (lambda: between(), "has none"),
        (lambda: Workload(pipelines=()), "there is none"),
        (lambda: Workload(pipelines=((ONE, ()),)), "0 stages for the 1"),
        (lambda: Workload(pipelines=((ONE, (work(1, 1),)),), reductions=(between(1),)), "pipeline 1 stage 0"),
        (lambda: Workload(pipelines=((ONE, (work(1, 1),)),), reductions=(between(0, 0),)), "a member twice"),
    ],
)
def test_bad_numbers_are_refused(build: object, said: str) -> None:
    """Each names the field and the value."""
    with pytest.raises(ValueError, match=said):
        build()  # type: ignore[operator]


# Measured runs.


def test_a_measured_run_becomes_a_timeline() -> None:
    """Events in any order, with gaps as they were: idle by reason, memory, in-flight; the critical path is left out.

    Rank 0: F0 0-1, B0 4-6 after 3 s for the gradient, ring 6.5-7.5 after 0.5 s for its peers, update 7.5-8.
    """
    load = Workload(
        pipelines=((one_f_one_b(2, 1), (work(1, 2, 0.5, memory=StageBytes(activations=3)), work(1, 1))),),
        reductions=(Reduction(block="tied", seconds=1, members=((0, 0), (0, 1))),),
    )
    first = "0UPDATE@7.5-8 0REDUCE_GRAD0@6.5-7.5 0F0@0-1 0B0@4-6 0SEND_F0@1-1.5 0RECV_B0@3.5-4"
    second = "1F0@1.5-2.5 1B0@2.5-3.5 1REDUCE_GRAD0@6.5-7.5"
    timeline = lay_out(load, {(0, 0): events(first), (0, 1): events(second)})
    assert lanes(timeline) == ["0F0@0-1 0B0@4-6 0UPDATE@7.5-8", "1F0@1.5-2.5 1B0@2.5-3.5"]
    assert timeline.iteration_s == 8
    assert timeline.pipelines_s == (6,)
    assert timeline.exposed_sync_s == 1.5
    idle = timeline.lanes[0].idle
    assert (idle.gradient_s, idle.peers_s, idle.sync_s, idle.end_s) == (3, 0.5, 1, 0)
    assert timeline.lanes[1].idle.end_s == 0.5
    memory = timeline.lanes[0].memory
    assert memory is not None
    assert memory.activations == (3, 0)
    assert timeline.critical_path == ()


def events(text: str) -> list[Event]:
    parts = [each.replace("@", "-").split("-") for each in text.split()]
    return [Event(Action.parse(name), float(start), float(end)) for name, start, end in parts]


def test_what_was_played_can_be_laid_out_again() -> None:
    """The events of a timeline give the same timeline, but for the critical path."""
    works = tuple(work(1, 2, 0.3, update_s=0.1, memory=StageBytes(activations=2)) for _ in range(3))
    load = Workload(
        pipelines=((one_f_one_b(3, 4), works),) * 2,
        reductions=tuple(Reduction(block=str(s), seconds=0.4, members=((0, s), (1, s))) for s in (2, 1, 0)),
    )
    timeline = play(load)
    again = lay_out(
        load,
        {(lane.pipeline, lane.rank): [*lane.transfers, *lane.reductions, *lane.events] for lane in timeline.lanes},
    )
    assert again == replace(timeline, critical_path=())


def test_measured_actions_that_overlap_are_refused() -> None:
    """One rank computes one thing at a time."""
    load = Workload(pipelines=((ONE, (work(1, 1),)),))
    with pytest.raises(ValueError, match=r"pipeline 0 rank 0: an action begins at 0\.5 s"):
        lay_out(load, {(0, 0): events("0F0@0-1 0B0@0.5-2")})
    with pytest.raises(ValueError, match="pipeline 0 rank 0: no compute actions"):
        lay_out(load, {})


# Plans.


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Cluster]:
    """Two pipelines of unequal stages with tied ends."""
    profile = factories.profile(num_layers=8, ends=True, tied=True, update_s=0.001, logits_bytes=10_000_000)
    cluster = factories.cluster({"fast": 4, "slow": 4}, per_node=2, memory_bytes=10 * factories.GB)
    return plan(profile, cluster, Job(global_batch=32, precision="fp32")), cluster


def test_a_plan_plays_as_its_numbers_say(planned: tuple[Plan, Cluster]) -> None:
    """Stage times, transfers, devices, and the memory the plan reserved, reached to the byte."""
    found, cluster = planned
    timeline = simulate(found, cluster)
    consistent(timeline)
    assert len(timeline.lanes) == len(found.stages)
    for lane in timeline.lanes:
        stage = found.pipelines[lane.pipeline].stages[lane.rank]
        forward, backward = (next(e for e in lane.events if e.action.kind is kind) for kind in (Kind.F, Kind.B))
        assert forward.seconds == pytest.approx(stage.forward_s)
        assert backward.seconds == pytest.approx(stage.backward_s + stage.recompute_s)
        assert lane.devices == stage.devices
        assert lane.device_type == stage.device_type
        assert timeline.peak_in_flight(lane.pipeline, lane.rank) == stage.in_flight
        assert lane.memory is not None
        slack = 2 * stage.in_flight  # bytes per micro-batch are whole
        assert stage.memory.total - slack <= lane.memory.peak_bytes <= stage.memory.total
        assert lane.memory.limit == math.floor((1 - found.job.memory_margin) * stage.memory.capacity)
    floor_s = found.predicted.floor_s
    assert floor_s <= max(timeline.pipelines_s) * (1 + 1e-9)


def test_reductions_of_a_plan_are_those_that_are_launched(planned: tuple[Plan, Cluster]) -> None:
    """Index, members and bytes as `schedule.action_lists` has them; seconds and bytes of a block add up."""
    found, cluster = planned
    load = workload(found, cluster)
    _, groups = action_lists(found)
    members = {i: {(p, s) for p, s in each.members} for i, each in enumerate(load.reductions)}
    assert members == {i: set(each) for i, each in groups.items()}  # stage = rank in a plan
    blocks = [*found.blocks, *found.tied_blocks]
    assert sum(each.nbytes for each in load.reductions) == sum(block.gradient_bytes for block in blocks)
    total_s = math.fsum(each.seconds for each in load.reductions)
    assert total_s == pytest.approx(math.fsum(block.reduce_s for block in blocks))
    assert [each.block for each in load.reductions][-1] == "tied layers 0, 7"


def test_gradients_of_a_block_are_ready_layer_by_layer(planned: tuple[Plan, Cluster]) -> None:
    """A block of layers [4, 8) on a stage of layers [2, 8), two chunks: the upper half is there after 2 of 6 layers,
    the lower after 4; on a stage of exactly these layers after 2 and 4 of 4. Exposed: at the end."""
    found, _ = planned
    one = found.pipelines[0]
    stage, other = one.stages[0], one.stages[1]
    pipelines = tuple(
        replace(one, stages=(replace(stage, layers=(0, cut)), replace(other, layers=(cut, 8)))) for cut in (2, 4)
    )
    blocks = (
        Block(layers=(0, 2), owners=(0, 0), gradient_bytes=10, num_chunks=0),
        Block(layers=(2, 4), owners=(1, 0), gradient_bytes=10, num_chunks=0),
        Block(layers=(4, 8), owners=(1, 1), gradient_bytes=16, num_chunks=2, reduce_s=1.0),
    )
    job = replace(found.job, sync_chunk_bytes=8)
    made = replace(found, pipelines=pipelines, blocks=blocks, tied_blocks=(), job=job)
    reductions = workload(made).reductions
    assert [each.ready for each in reductions] == [(pytest.approx(2 / 6), 2 / 4), (pytest.approx(4 / 6), 1.0)]
    assert [each.seconds for each in reductions] == [0.5, 0.5]
    late = workload(replace(made, job=replace(job, sync="exposed"))).reductions
    assert [each.ready for each in late] == [(), ()]


@pytest.mark.parametrize(
    ("granularity", "change", "said"),
    [
        ("block", {"num_chunks": 9}, r"blocks\[0\].num_chunks: 9, its 16 bytes take 2"),
        ("block", {"gradient_bytes": 0}, r"blocks\[0\].num_chunks: 2, its 0 bytes take 0"),
        ("layer", {"gradient_bytes": 0}, r"blocks\[0\].num_chunks: 2 calls for 0 bytes"),
    ],
)
def test_calls_without_bytes_are_refused(
    planned: tuple[Plan, Cluster], granularity: str, change: dict[str, int], said: str
) -> None:
    """16 bytes in chunks of 8 are two calls; a call reduces something."""
    found, _ = planned
    whole = replace(found.pipelines[0], stages=(replace(found.pipelines[0].stages[0], layers=(0, 8)),))
    block = replace(Block(layers=(0, 8), owners=(0, 0), gradient_bytes=16, num_chunks=2, reduce_s=1.0), **change)
    job = replace(found.job, sync_chunk_bytes=8, sync_granularity=granularity)
    with pytest.raises(ValueError, match=said):
        workload(replace(found, pipelines=(whole, whole), blocks=(block,), tied_blocks=(), job=job))


def test_overlapped_sync_is_not_slower_than_exposed(planned: tuple[Plan, Cluster]) -> None:
    """The same plan, its reductions during or after the backward."""
    found, cluster = planned
    overlapped = simulate(found, cluster)
    exposed = simulate(replace(found, job=replace(found.job, sync="exposed")), cluster)
    model = simulate(found, cluster, granularity="model")
    assert overlapped.iteration_s <= exposed.iteration_s
    assert overlapped.pipelines_s == exposed.pipelines_s == model.pipelines_s
    assert overlapped.exposed_sync_s < model.exposed_sync_s


def test_granularity_of_the_job_is_the_default(planned: tuple[Plan, Cluster]) -> None:
    """The seconds of the blocks, worked out again from the links of the cluster, are those of the plan."""
    found, cluster = planned
    assert found.job.sync_granularity == "block"
    again = workload(found, cluster, granularity="block").reductions
    for a, b in zip(workload(found, cluster).reductions, again, strict=True):
        assert (a.block, a.members, a.ready, a.nbytes) == (b.block, b.members, b.ready, b.nbytes)
        assert b.seconds == pytest.approx(a.seconds)
    layers = workload(found, cluster, granularity="layer").reductions
    assert len({each.block for each in layers}) == len({each.block for each in again})
    with pytest.raises(ValueError, match="granularity: 'tensor' is not among block, layer, model"):
        workload(found, cluster, granularity="tensor")
    with pytest.raises(ValueError, match="needs the cluster"):
        workload(found, granularity="layer")


def test_devices_of_a_node_share_its_network_ports(planned: tuple[Plan, Cluster]) -> None:
    """With one port per node instead of one per device: ranks of a node name the same port, and nothing is faster."""
    found, cluster = planned
    narrow = replace(cluster, nodes=tuple(replace(node, nics=1) for node in cluster.nodes))
    ports = {port for _, works in workload(found, narrow).pipelines for each in works for port in each.ports}
    assert len(ports) == len(cluster.nodes)
    own = {port for _, works in workload(found, cluster).pipelines for each in works for port in each.ports}
    assert len(own) == len(found.devices)
    assert simulate(found, narrow).iteration_s >= simulate(found, cluster).iteration_s


def test_a_fast_port_carries_several_slow_rings(planned: tuple[Plan, Cluster]) -> None:
    """Between fast nodes 10 GB/s, to and between slow ones 1 GB/s. A ring of 1 GB over a fast and a slow rank takes
    2 x 1 x 0.5 = 1 s; the port of the fast one alone would take 0.1 s."""
    speeds = {("fast", "fast"): 10 * factories.GB, ("fast", "slow"): factories.GB, ("slow", "slow"): factories.GB}
    cluster = factories.cluster({"fast": 2, "slow": 2}, across={**speeds}, alpha_s=0.0)
    found, _ = planned
    stages = [replace(found.stages[0], layers=(0, 8), devices=(name,)) for name in ("fast-0:0", "slow-0:0")]
    made = replace(
        found,
        pipelines=tuple(replace(found.pipelines[0], stages=(stage,)) for stage in stages),
        blocks=(Block(layers=(0, 8), owners=(0, 0), gradient_bytes=10**9, num_chunks=1, reduce_s=1.0),),
        tied_blocks=(),
        job=replace(found.job, sync_chunk_bytes=10**9),
    )
    (reduction,) = workload(made, cluster).reductions
    assert reduction.port_s == pytest.approx((0.1, 1.0))
    assert workload(made).reductions[0].port_s == ()


def test_schedules_are_given_by_name_or_as_lists(planned: tuple[Plan, Cluster]) -> None:
    """GPipe by name and by hand are the same; a list that does not match the plan is refused."""
    found, cluster = planned
    made = [gpipe(len(p.stages), p.num_micro_batches) for p in found.pipelines]
    assert simulate(found, cluster, schedule=made) == simulate(found, cluster, schedule="gpipe")
    with pytest.raises(ValueError, match="'gpip' is not among"):
        simulate(found, schedule="gpip")
    with pytest.raises(ValueError, match="schedule: 1 given"):
        simulate(found, schedule=made[:1])
    with pytest.raises(ValueError, match=r"schedule\[1\]: '1f1b' has 2 stages"):
        simulate(found, schedule=[made[0], one_f_one_b(2, 3)])
    with pytest.raises(ValueError, match="weight_share: 2"):
        simulate(found, schedule="zero-bubble", weight_share=2)


def test_complete_lists_of_a_plan_play_like_its_schedule(planned: tuple[Plan, Cluster]) -> None:
    """What an executor runs, transfers, reductions and updates listed, gives the same times."""
    found, cluster = planned
    lists, _ = action_lists(found)
    assert simulate(found, cluster, schedule=lists).lanes == simulate(found, cluster).lanes


def test_recomputation_is_part_of_i(planned: tuple[Plan, Cluster]) -> None:
    """B of 2 s and 1 s of recomputation, weights a quarter of B: I takes 2.5 s, W 0.5."""
    found, _ = planned
    stage = replace(found.stages[0], layers=(0, 8), backward_s=2.0, recompute_s=1.0)
    made = replace(found, pipelines=(replace(found.pipelines[0], stages=(stage,)),), blocks=(), tied_blocks=())
    lane = simulate(made, schedule="zero-bubble", weight_share=0.25).lanes[0]
    seconds = {event.action.kind: event.seconds for event in lane.events}
    assert seconds[Kind.I] == pytest.approx(2.5)
    assert seconds[Kind.W] == pytest.approx(0.5)
