"""A plan for what is left, and what every device has to fetch: bytes, sources, seconds."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import factories
import pytest

from planner import cli
from planner.cli import elastic
from planner.cluster import Cluster
from planner.job import Job
from planner.plans import Infeasible, Plan
from planner.profile import ModelProfile
from planner.replan import CHECKPOINT, Move, Replanned, assign, replan
from planner.search import plan as search

GB = factories.GB
JOB = Job(global_batch=16)


def model(**fields: object) -> ModelProfile:
    """Eight layers of 50 M parameters or so."""
    return factories.profile(num_layers=8, **fields)  # type: ignore[arg-type]


def deep(cluster: Cluster, profile: ModelProfile, job: Job = JOB) -> Plan:
    """A plan whose devices hold part of the model each."""
    found = search(profile, cluster, job, judge="formula")
    assert max(len(pipeline.stages) for pipeline in found.pipelines) > 1
    return found


def small(count: int = 6, **fields: object) -> Cluster:
    """Devices that hold half of the model or so: layers take 50 M x 16 bytes = 0.8 GB and activations."""
    return factories.cluster({"fast": count}, memory_bytes=7 * GB, **fields)  # type: ignore[arg-type]


def state_bytes(plan: Plan, profile: ModelProfile) -> dict[str, dict[int, int]]:
    """Weights and optimizer state of each layer, by the device that holds it (no tensor parallelism, nothing tied)."""
    per_parameter = plan.job.state.weights + plan.job.state.optimizer
    return {
        name: {l: profile.kind_of(l).parameters * per_parameter for l in range(*stage.layers)}
        for stage in plan.stages
        for name in stage.devices
    }


@pytest.fixture(scope="module")
def found() -> tuple[Plan, ModelProfile, Cluster, Replanned]:
    """Six devices of which one is lost."""
    profile, cluster = model(), small()
    old = deep(cluster, profile)
    return old, profile, cluster, replan(old, profile, cluster, without=["fast-2"])


def test_the_new_plan_is_that_of_the_cluster_without_the_node(
    found: tuple[Plan, ModelProfile, Cluster, Replanned],
) -> None:
    """The same as planning for what is left; it passes the audit, and knows what it replaces."""
    old, profile, cluster, new = found
    left = cluster.without("fast-2")
    assert new.plan == search(profile, left, JOB)
    new.plan.check(profile, left)
    assert new.without == ("fast-2:0",)
    assert new.old_s == old.predicted.simulated_s


def test_every_device_fetches_what_it_lacks(found: tuple[Plan, ModelProfile, Cluster, Replanned]) -> None:
    """Bytes of each device: state of its new layers less those it holds; from devices that hold them, or nowhere."""
    old, profile, _, new = found
    held, needed = state_bytes(old, profile), state_bytes(new.plan, profile)
    del held["fast-2:0"]
    fetched: dict[str, int] = defaultdict(int)
    for move in new.moves:
        fetched[move.device] += move.nbytes
        assert set(move.layers) <= set(needed[move.device]) - set(held.get(move.device, {}))
        if move.source != CHECKPOINT:
            assert set(move.layers) <= set(held[move.source])
    for name, layers in needed.items():
        assert fetched[name] == sum(size for l, size in layers.items() if l not in held.get(name, {})), name
    assert new.moved_bytes > 0
    anywhere = {l for layers in held.values() for l in layers}
    assert new.lost == tuple(l for l in range(8) if l not in anywhere)
    assert new.state_bytes == sum(size for layers in needed.values() for size in layers.values())


def test_the_only_holder_is_lost() -> None:
    """One pipeline: the layers of the lost device are in the checkpoint only, the others are not."""
    profile, cluster = model(), small(3)
    old = deep(cluster, profile)
    assert len(old.pipelines) == 1
    new = replan(old, profile, cluster, without=[old.stages[1].devices[0]])
    assert new.lost == tuple(range(*old.stages[1].layers))
    for move in new.moves:
        assert (move.source == CHECKPOINT) == (set(move.layers) <= set(new.lost))
    assert new.checkpoint_bytes > 0
    assert "are in the checkpoint only: the run goes back to it" in str(new)


def test_parts_are_dealt_to_the_holder_that_is_done_first() -> None:
    """Two holders of six parts for two others: three each; a holder four times as slow gets one of five."""
    needed = {"c": "pqr", "d": "stu"}
    held = {"a": "pqrstu", "b": "pqrstu"}
    got = list(assign(needed, held, lambda *_: 1.0))
    assert [who for who, _, _ in got] == ["c"] * 3 + ["d"] * 3
    assert [giver for _, giver, _ in got] == ["a", "b", "a", "b", "a", "b"]
    got = list(assign({"c": "pqrst"}, held, lambda _, giver, __: {"a": 1.0, "b": 4.0}[giver]))
    assert [giver for _, giver, _ in got] == ["a", "a", "a", "a", "b"]  # ends at 1, 2, 3, 4 (b: 4, the first wins), 4


def test_what_is_held_is_not_fetched_and_what_nobody_can_give_is_said() -> None:
    """A part of one's own; a part of nobody; a part behind a missing link."""
    got = list(assign({"c": "pqr"}, {"c": "p", "a": "pr"}, lambda part, *_: math.inf if part == "r" else 1.0))
    assert got == [("c", None, "q"), ("c", None, "r")]


def test_seconds_are_those_of_the_busiest_port(found: tuple[Plan, ModelProfile, Cluster, Replanned]) -> None:
    """Each port sends or receives one message after another: an alpha of 10 us and 2 GB/s each."""
    new = found[3]
    load: dict[tuple[str, str], float] = defaultdict(float)
    for move in new.moves:
        for port in (("in", move.device), ("out", move.source)):
            load[port] += move.nbytes / (2 * GB) + 1e-5
    assert new.move_s == pytest.approx(max(load.values()))


def test_devices_behind_one_network_port_share_it() -> None:
    """Two devices of a node with one port fetch one after the other: twice the time of two ports."""
    from planner.replan import _busiest_s

    def seconds(nics: int) -> float:
        base = factories.cluster({"fast": 4}, per_node=2)
        cluster = replace(base, nodes=tuple(replace(node, nics=nics) for node in base.nodes))
        moves = [Move(device=f"fast-0:{n}", source=f"fast-1:{n}", layers=(0,), nbytes=2 * GB) for n in (0, 1)]
        return _busiest_s(moves, cluster)

    assert seconds(2) == pytest.approx(1.0 + 1e-5)
    assert seconds(1) == pytest.approx(2.0 + 2e-5)


def test_a_tied_tensor_is_not_fetched_by_who_has_its_other_end() -> None:
    """Before: layers 0-3 > 4-7 beside 0-7. Without the first device the second runs all; it has the tensor of layer 0
    as that of layer 7, and layer 0 is nothing else, so it fetches layers 1 to 3: 2 + 12 bytes per parameter."""
    profile = model(ends=True, tied=True, parameters=20_000_000)
    cluster = factories.cluster({"fast": 3}, memory_bytes=12 * GB)
    old = search(profile, cluster, JOB, judge="formula")
    assert [stage.layers for stage in old.stages] == [(0, 4), (4, 8), (0, 8)]
    new = replan(old, profile, cluster, without=["fast-0"])
    assert [stage.layers for stage in new.plan.stages] == [(0, 8), (0, 8)]
    nbytes = 14 * sum(profile.kind_of(l).parameters for l in (1, 2, 3))
    assert new.moves == (Move(device="fast-1:0", source="fast-2:0", layers=(1, 2, 3), nbytes=nbytes),)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("trainable", [True, False], ids=["", "frozen"])
def test_a_device_without_state_fetches_what_its_stage_holds(degree: int, trainable: bool) -> None:
    """By the plan's own account of memory: weights and optimizer state, tied or frozen, whole or cut by tp."""
    profile = model(ends=True, tied=True, tps=(1, 2), parameters=20_000_000)
    kinds = tuple(replace(kind, trainable=trainable or "block" not in kind.name) for kind in profile.kinds)
    profile = replace(profile, kinds=kinds)
    few, many = (factories.cluster({"fast": n}, per_node=2, memory_bytes=4 * GB) for n in (4, 6))
    old = replace(search(profile, few, replace(JOB, tp=(1,))), job=replace(JOB, tp=(degree,)))
    new = replan(old, profile, many, without=["fast-1"])
    fresh = [(stage, name) for stage in new.plan.stages for name in stage.devices if name not in old.devices]
    assert len(fresh) == 2
    for stage, name in fresh:
        got = sum(move.nbytes for move in new.moves if move.device == name)
        assert got == pytest.approx(stage.memory.weights + stage.memory.optimizer, abs=len(new.moves))


def test_sharded_optimizer_state_is_in_the_checkpoint_only(
    found: tuple[Plan, ModelProfile, Cluster, Replanned],
) -> None:
    """Each of two owners keeps half of the moments, and one is lost: every device reads what its stage holds."""
    _, profile, cluster, _ = found
    old = search(profile, cluster, replace(JOB, shard_optimizer=True))
    assert len(old.pipelines) > 1
    new = replan(old, profile, cluster, without=["fast-2"])
    assert {move.source for move in new.moves} == {CHECKPOINT}
    assert new.lost == tuple(range(8))
    assert new.checkpoint_bytes == pytest.approx(new.state_bytes, abs=8)
    assert new.move_s == 0


def test_a_device_of_a_node_keeps_the_names_of_the_others() -> None:
    """fast-0:0 is lost, fast-0:1 stays: the plan is one of the whole cluster that leaves the lost one idle."""
    profile, cluster = model(), small(6, per_node=2)
    old = deep(cluster, profile)
    new = replan(old, profile, cluster, without=["fast-0:0"])
    assert "fast-0:1" in new.plan.devices
    assert "fast-0:0" in new.plan.idle_devices
    assert new.plan.problems(profile, cluster) == ()
    assert new.plan.predicted.iteration_s == pytest.approx(
        search(profile, small(5), JOB).predicted.iteration_s, rel=0.2
    )


def test_what_is_left_may_be_too_little(found: tuple[Plan, ModelProfile, Cluster, Replanned]) -> None:
    """Says what the model state takes and what there is, and what the search says."""
    old, profile, cluster, _ = found
    gone = [f"fast-{n}" for n in range(5)]
    with pytest.raises(Infeasible) as caught:
        replan(old, profile, cluster, without=gone)
    total = sum(profile.kind_of(l).parameters for l in range(8)) * 18  # mixed precision Adam: 2 + 4 + 12
    room = 0.95 * 7 * GB - (1 << 30)
    text = str(caught.value)
    assert text.startswith("without fast-0, fast-1, fast-2, fast-3 and 1 more 1 device has room for ")
    assert f"{room / 2**30:.2f} GiB, the model state takes {total / 2**30:.2f} GiB: the model does not fit" in text
    assert caught.value.short_bytes is not None
    with pytest.raises(Infeasible, match="no device is left"):
        replan(old, profile, cluster, without=[node.name for node in cluster.nodes])


def test_bad_names_and_foreign_inputs_are_refused(found: tuple[Plan, ModelProfile, Cluster, Replanned]) -> None:
    """One error each: an unknown node, nothing named, a profile of other layers, a cluster of other devices."""
    old, profile, cluster, _ = found
    for arguments, message in (
        ((profile, cluster, ["fast-9"]), r"without: 'fast-9' is not among .*did you mean 'fast-\d'"),
        ((profile, cluster, []), "without: no node and no device named"),
        ((factories.profile(num_layers=5), cluster, ["fast-0"]), "has 5 layers, the plan 8"),
        ((profile, small(3), ["fast-0"]), r"device 'fast-\d:0' of the plan is not in cluster"),
        (
            (profile, factories.cluster({"slow": 6}), ["slow-0"]),
            r"device 'fast-\d:0' of the plan is not in cluster",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            replan(old, arguments[0], arguments[1], without=arguments[2])  # type: ignore[arg-type]


# The command


@pytest.fixture
def here(found: tuple[Plan, ModelProfile, Cluster, Replanned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with plan, profile and cluster, as the working directory."""
    old, profile, cluster, _ = found
    old.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    cluster.save(tmp_path / "cluster.yaml")
    monkeypatch.chdir(tmp_path)
    groups = cli.GROUPS if "elastic" in cli.GROUPS else (*cli.GROUPS, elastic.__name__.rpartition(".")[2])
    monkeypatch.setattr(cli, "GROUPS", groups)
    return tmp_path


COMMAND = ["replan", "plan.json", "cluster.yaml", "--profile", "profile.json", "--without"]


def test_the_command_prints_moves_and_plan(
    here: Path, found: tuple[Plan, ModelProfile, Cluster, Replanned], capsys: pytest.CaptureFixture[str]
) -> None:
    """What changed, a row per device and source, the new plan; `-o` writes it, `--left` the cluster it is for."""
    *_, new = found
    assert cli.main([*COMMAND, "fast-2", "-o", "new.json", "--left", "left.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{new}\n"
    assert err == "wrote new.json\nwrote left.yaml\n"
    assert out.startswith("without     fast-2:0\niteration   ")
    assert str(new.plan) in out
    Plan.load(here / "new.json").check(ModelProfile.load(here / "profile.json"), Cluster.load(here / "left.yaml"))


def test_the_command_as_json(
    here: Path, found: tuple[Plan, ModelProfile, Cluster, Replanned], capsys: pytest.CaptureFixture[str]
) -> None:
    """Reads back as the value."""
    assert cli.main([*COMMAND, "fast-2", "--json"]) == 0
    assert Replanned.from_dict(json.loads(capsys.readouterr().out)) == found[3]


def test_the_command_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes 2 for bad input and 3 where nothing fits, one line each."""
    assert cli.main([*COMMAND, "fast-9"]) == 2
    assert capsys.readouterr().err.startswith("hpp: without: 'fast-9' is not among")
    many = [word for n in range(5) for word in ("--without", f"fast-{n}")][1:]
    assert cli.main([*COMMAND, *many]) == 3
    assert capsys.readouterr().err.startswith(
        "hpp: no plan: without fast-0, fast-1, fast-2, fast-3 and 1 more 1 device"
    )
