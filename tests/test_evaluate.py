"""Configurations of others, priced as they are: against the search's own plans, by hand, and through every format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from factories import GB, cluster, profile

from planner import exporters, search
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.evaluate import evaluate, parse
from planner.exporters.launch import read_ranks
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.job import Job
from planner.plans import Plan
from planner.profile import Conditions

# An embedding, 8 decoder layers, a head.
MODEL = profile(num_layers=10, distinct=False, ends=True, num_heads=8, micro_batches=(1, 2), tps=(1, 2))
PAIR = cluster({"fast": 2}, per_node=2)
FOUR = cluster({"fast": 4}, per_node=4)


def shape(*counts: int, tp: int = 1, m: int | None = 4, b: int | None = 1) -> PipelineLayout:
    """Stages of so many decoder layers, the ends with the outermost ones."""
    return PipelineLayout(
        stages=tuple(
            StageLayout(blocks=n, embedding=s == 0, head=s + 1 == len(counts), tp=tp) for s, n in enumerate(counts)
        ),
        micro_batch=b,
        num_micro_batches=m,
    )


# The figures.


@pytest.mark.parametrize(
    ("model", "devices", "job"),
    [
        (profile(num_layers=6), cluster({"fast": 2, "slow": 2}), Job(global_batch=8)),
        (
            profile(num_layers=6, ends=True, tied=True, tps=(1, 2), micro_batches=(1, 2)),
            cluster({"fast": 4, "slow": 2}, per_node=2),
            Job(global_batch=16),
        ),
        (
            profile(num_layers=6, activation_bytes=2 * GB),  # recomputes
            cluster({"fast": 2, "slow": 2}, memory_bytes=9 * GB),
            Job(global_batch=8),
        ),
    ],
    ids=["plain", "tied tp", "recompute"],
)
def test_a_plan_evaluates_to_itself(model, devices: Cluster, job: Job) -> None:
    """Stages, devices, times and bytes of a plan of the search come out as they went in; it still checks."""
    made = search.plan(model, devices, job)
    priced = evaluate(model, devices, Layout.of_plan(made), job)
    assert priced.pipelines == made.pipelines
    assert priced.blocks == made.blocks
    assert priced.tied_blocks == made.tied_blocks
    assert priced.predicted == made.predicted
    assert priced.idle_devices == made.idle_devices
    assert not priced.problems(model, devices)
    assert any("nothing was searched" in each for each in priced.restrictions)
    assert priced.lower_bound_s <= priced.predicted.iteration_s


def test_by_hand() -> None:
    """3:5 with 4 micro-batches: embedding 3 ms, blocks 30 ms, head 45 ms, a hand-over of c = 10 us + 4 MB / 50 GB/s.

    Stage 0: 3 + 3 x 30 = 93 ms, stage 1: 5 x 30 + 45 = 195 ms, each + 0.09 ms:
    T = 93.09 + 195.09 + 3 x 195.09 = 873.45 ms. Stage 0 holds min(4, 2) = 2 micro-batches.
    """
    made = evaluate(MODEL, PAIR, Layout(pipelines=(shape(3, 5),)))
    assert made.predicted.pipeline_s == pytest.approx(0.87345)
    assert [each.layers for each in made.pipelines[0].stages] == [(0, 4), (4, 10)]
    assert [each.in_flight for each in made.pipelines[0].stages] == [2, 1]
    # 100 MB per block and micro-batch are kept, and the 4 MB that arrive at stage 1.
    assert [each.memory.activations for each in made.pipelines[0].stages] == [600_000_000, 504_000_000]
    assert made.predicted.simulated_s is not None
    assert not made.problems(MODEL, PAIR)


def test_recompute_is_taken_as_given() -> None:
    """The first two blocks of stage 0 again: + 2 x 10 ms, and 2 x 2 x (100 - 4) MB less activations."""
    plain = evaluate(MODEL, PAIR, Layout(pipelines=(shape(3, 5),))).pipelines[0].stages[0]
    given = shape(3, 5)
    again = replace(given, stages=(replace(given.stages[0], recompute=(0, 1)), given.stages[1]))
    made = evaluate(MODEL, PAIR, Layout(pipelines=(again,)), Job(recompute=False))
    stage = made.pipelines[0].stages[0]
    assert stage.recompute == (1, 2)
    assert stage.recompute_s == pytest.approx(0.020)
    assert stage.memory.activations == plain.memory.activations - 2 * 2 * 96_000_000
    assert not made.problems(MODEL, PAIR)


def test_deeper_warm_up_is_taken_as_given() -> None:
    """A stage that holds four micro-batches instead of two has twice the activations."""
    given = shape(3, 5)
    deep = replace(given, stages=(replace(given.stages[0], in_flight=4), given.stages[1]))
    made = evaluate(MODEL, PAIR, Layout(pipelines=(deep,)))
    assert [each.in_flight for each in made.pipelines[0].stages] == [4, 1]
    assert made.pipelines[0].stages[0].memory.activations == 1_200_000_000
    assert not made.problems(MODEL, PAIR)


def test_what_does_not_fit_is_priced_and_named() -> None:
    """Devices of 8 GB: stage 1 needs more than 95 % of that; the plan says where and by how much, and prints."""
    small = cluster({"fast": 2}, per_node=2, memory_bytes=8 * GB)
    made = evaluate(MODEL, small, Layout(pipelines=(shape(3, 5),)))
    stage = made.pipelines[0].stages[1]
    short = stage.memory.total - 0.95 * 8 * GB
    assert short > 0
    (warning,) = [each for each in made.warnings if "does not fit" in each]
    assert "pipeline 0 stage 1 (fast tp 1 on fast-0:1)" in warning
    assert f"{short / 2**30:.2f} GiB short" in warning
    assert "!!!!!!!!!!" in str(made)
    assert made.predicted == evaluate(MODEL, PAIR, Layout(pipelines=(shape(3, 5),))).predicted
    assert [each for each in made.problems(MODEL, small) if "does not fit" not in each] == []


# Devices.


def test_ranks_meet_devices_in_either_order() -> None:
    """Two pipelines of two stages on four devices: stage by stage 0 2 | 1 3, pipeline by pipeline 0 1 | 2 3."""
    found = {}
    for order in ("stage", "pipeline"):
        layout = Layout(pipelines=(shape(3, 5, m=None),), copies=None, global_batch=8, order=order)
        made = evaluate(MODEL, FOUR, layout)
        found[order] = [[each.devices[0][-1] for each in one.stages] for one in made.pipelines]
        assert [one.num_micro_batches for one in made.pipelines] == [4, 4]
    assert found == {"stage": [["0", "2"], ["1", "3"]], "pipeline": [["0", "1"], ["2", "3"]]}


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (Layout(pipelines=(shape(3, 4),)), "its stages hold 7 decoder layers, the profile has 8"),
        (Layout(pipelines=(shape(3, 5, 0, 0),), copies=1), "pipeline 0 stage 2 is empty"),
        (Layout(pipelines=(shape(2, 2, 2, 1, 1),)), "5 devices in use, there are 4 of cluster"),
        (Layout(pipelines=(shape(2, 3, 3, m=None),), copies=None), "4 devices are no multiple of the 3"),
        (
            Layout(pipelines=(shape(3, 5, m=None),), copies=None, global_batch=9),
            "9 samples are no multiple of 2 pipelines",
        ),
        (Layout(pipelines=(shape(3, 5, m=None, b=3),), global_batch=8), "8 samples per pipeline are no multiple of 3"),
        (Layout(pipelines=(shape(8, b=4),)), "no times of fast at tp 1 and micro-batch 4; measured are tp 1, 2"),
        (Layout(pipelines=(shape(8, tp=4),)), "no times of fast at tp 4 and micro-batch 1"),
        (
            Layout(
                pipelines=(
                    PipelineLayout(
                        stages=(
                            StageLayout(layers=(0, 4), devices=("fast-0:1",)),
                            StageLayout(layers=(4, 10), devices=("fast-0:1",)),
                        ),
                        micro_batch=1,
                        num_micro_batches=1,
                    ),
                )
            ),
            "fast-0:1 is used by more than one stage",
        ),
        (
            Layout(
                pipelines=(
                    PipelineLayout(
                        stages=(StageLayout(layers=(0, 4), devices=(9,)), StageLayout(layers=(4, 10), devices=(1,))),
                        micro_batch=1,
                        num_micro_batches=1,
                    ),
                )
            ),
            "pipeline 0 stage 0: device 9 does not exist, there are 4 of cluster",
        ),
        (
            Layout(
                pipelines=(
                    PipelineLayout(
                        stages=(StageLayout(layers=(0, 4)), StageLayout(layers=(5, 10))),
                        micro_batch=1,
                        num_micro_batches=1,
                    ),
                )
            ),
            r"stages of layers \[0, 4\), \[5, 10\) are not all 10 layers",
        ),
    ],
)
def test_what_does_not_add_up_is_named(layout: Layout, problem: str) -> None:
    """Layers, devices, batch, measurements: one error with the numbers."""
    with pytest.raises(ValueError, match=problem):
        evaluate(MODEL, FOUR, layout)


def test_a_tp_group_stays_in_a_node_and_divides_the_heads() -> None:
    """Ranks 1 and 2 are on two nodes; three ranks do not divide eight heads."""
    spread = cluster({"fast": 4}, per_node=2)
    stages = (StageLayout(layers=(0, 10), tp=2, devices=(1, 2)),)
    with pytest.raises(ValueError, match=r"tp group fast-0:1, fast-1:0 is of 2 nodes"):
        evaluate(MODEL, spread, Layout(pipelines=(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=1),)))
    odd = profile(num_layers=10, distinct=False, ends=True, num_heads=8, tps=(3,))
    with pytest.raises(ValueError, match="tp 3 does not divide the model's 8 heads"):
        evaluate(odd, FOUR, Layout(pipelines=(shape(8, tp=3),)))


def test_ends_that_were_not_measured_cannot_stand_alone() -> None:
    """A stage of the embedding alone needs an embedding in the profile."""
    bare = profile(num_layers=8, distinct=False)
    stages = (StageLayout(embedding=True), StageLayout(blocks=8, head=True))
    layout = Layout(pipelines=(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=2),))
    with pytest.raises(ValueError, match="stage 0 runs the embedding alone, which is no layer of the profile"):
        evaluate(bare, PAIR, layout)


# Megatron.


def megatron(text: str) -> Layout:
    return parse(text, "megatron")


def test_a_layout_string_alone_takes_the_batch_of_the_job() -> None:
    """As many stages as bars say, one pipeline per so many devices."""
    made = evaluate(MODEL, FOUR, megatron("Et*3|t*5L"), Job(global_batch=12))
    assert len(made.pipelines) == 2
    assert [each.num_micro_batches for each in made.pipelines] == [6, 6]


@pytest.mark.parametrize(
    ("flags", "blocks"),
    [
        ('--num-layers 8 --pipeline-model-parallel-layout "Et*3|t*5L"', [3, 5]),
        ("--num-layers 8", [4, 4]),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 3", [3, 5]),
        ("--num-layers 8 --decoder-last-pipeline-num-layers=2", [6, 2]),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split", [3, 4]),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [3, 3]),
        ("--num_layers 8 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5", [3, 5]),
    ],
)
def test_megatron_splits(flags: str, blocks: list[int]) -> None:
    """Layout, even split, uneven ends, ends that count as a layer."""
    layout = megatron(f"--pipeline-model-parallel-size 2 {flags}")
    (pipeline,) = layout.pipelines
    assert [each.blocks for each in pipeline.stages] == blocks
    assert [(each.embedding, each.head) for each in pipeline.stages] == [(True, False), (False, True)]


def test_megatron_sizes_recompute_and_order() -> None:
    """From a shell fragment: tp, micro-batch, batch, world size, recompute of the first layers, rank order."""
    layout = megatron(
        """torchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py \\
            --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2  # two stages
            --num-layers 8 --micro-batch-size 2 --global-batch-size 64 --use-tp-pp-dp-mapping
            --recompute-granularity full --recompute-method block --recompute-num-layers 3"""
    )
    assert (layout.world_size, layout.global_batch, layout.order) == (8, 64, "pipeline")
    (pipeline,) = layout.pipelines
    assert pipeline.micro_batch == 2
    assert [(each.tp, each.recompute) for each in pipeline.stages] == [(2, (0, 1, 2)), (2, (0, 1, 2))]
    every = megatron("--num-layers 4 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert every.pipelines[0].stages[0].recompute == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--pipeline-model-parallel-size 2", "--num-layers: missing"),
        ("--num-layers 7 --pipeline-model-parallel-size 2", "7 layers do not split into 2 stages"),
        ("--num-layers $L", r"--num-layers: '\$L' is not a whole number"),
        ("--num-layers 8 --context-parallel-size 2", "--context-parallel-size: 2: the planner does not model it"),
        ("--num-layers 8 --num-virtual-stages-per-pipeline-rank 2", "no interleaving"),
        (
            '--pipeline-model-parallel-layout "Et|tL" --num-layers 3 --pipeline-model-parallel-size 2',
            "2 decoder layers",
        ),
        (
            '--pipeline-model-parallel-layout "Et|t|t|tL" --pipeline-model-parallel-size 2',
            "4 stages on 2 ranks: the planner prices one stage per rank",
        ),
        ("--num-layers 8 --recompute-granularity full --recompute-method some", "'some' is not among uniform, block"),
        ("--num-layers '8", "not a command line"),
        ("Et*3|x", "position 5"),
    ],
)
def test_damaged_megatron_text_names_the_flag(text: str, problem: str) -> None:
    """One error, naming the flag or the position."""
    with pytest.raises(ValueError, match=problem):
        megatron(text)


def test_what_megatron_shards_or_selects_is_a_warning() -> None:
    """What the planner does not model is said on the plan."""
    layout = megatron(
        "--num-layers 8 --pipeline-model-parallel-size 2 --use-distributed-optimizer --recompute-activations "
        "--global-batch-size 8"
    )
    made = evaluate(MODEL, PAIR, layout)
    assert any("--use-distributed-optimizer" in each for each in made.warnings)
    assert any("selective recompute" in each for each in made.warnings)


# Other formats.


def test_galvatron_json() -> None:
    """Uneven division, chunks and batch; GPipe holds all micro-batches; layers counted from the stage's first."""
    data = {
        "pp_deg": 2,
        "tp_sizes_enc": "1,1,1,1,1,1,1,1",
        "checkpoint": "1,0,0,0,1,0,0,0",
        "global_bsz": 16,
        "chunks": 4,
        "pp_division": "3,5",
        "pipeline_type": "gpipe",
    }
    layout = parse(json.dumps(data), "galvatron")
    made = evaluate(MODEL, FOUR, layout)
    assert [(each.micro_batch, each.num_micro_batches) for each in made.pipelines] == [(2, 4), (2, 4)]
    stages = made.pipelines[0].stages
    assert [each.layers for each in stages] == [(0, 4), (4, 10)]
    assert [each.recompute for each in stages] == [(1,), (5,)]
    assert [each.in_flight for each in stages] == [4, 4]
    even = parse(json.dumps(data | {"pp_division": None}), "galvatron")
    assert [each.blocks for each in even.pipelines[0].stages] == [4, 4]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pp_deg": "two"}, "pp_deg: 'two' is not a number"),
        ({"chunks": 0}, "chunks: 0 is not"),
        ({"tp_sizes_enc": "1,1,x"}, "tp_sizes_enc: 'x' is not a whole number"),
        ({"tp_sizes_enc": "1,2,1"}, "tp_sizes_enc: the planner prices 1 for every layer alone"),
        ({"use_sp": "1,1,1"}, "use_sp: the planner prices 0"),
        ({"pp_division": "1,1"}, r"pp_division: \[1, 1\] is not 2 stages of 3 layers"),
        ({"checkpoint": "1"}, "checkpoint: 1 entries for 3 layers"),
    ],
)
def test_damaged_galvatron_json_names_the_key(change: dict[str, object], problem: str) -> None:
    """One error with the key."""
    data = {"pp_deg": 2, "tp_sizes_enc": "1,1,1", "global_bsz": 8, "chunks": 4, "pp_division": "1,2"}
    with pytest.raises(ValueError, match=problem):
        parse(json.dumps(data | change), "galvatron")


def test_truncated_json_names_line_and_column(tmp_path: Path) -> None:
    """As text and as a file."""
    text = '{"pp_deg": 2,\n "chunks": '
    with pytest.raises(ValueError, match="galvatron: line 2 column 12"):
        parse(text, "galvatron")
    path = tmp_path / "g.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"g\.json: line 2 column 12"):
        parse(path, "galvatron")


HETU = (
    '--hetero_stages "[2,3]" --micro_batch_num_list "[5,3]" --micro_batch_size 1 --tp 1 --unused_rank "[]" '
    '--rank_to_device_mapping "{0:0,1:1,2:3,3:2,4:4}" --recompute_layers "[[1],[]]" '
)


@pytest.mark.parametrize("layers", ["3,5,2,3,3", '"[[3,5],[2,3,3]]"'])
def test_hetu_flags_of_either_version(layers: str) -> None:
    """One list with the number of stages, or nested lists; the mapping names devices, recompute the layers."""
    layout = parse(f"{HETU} --hetero_layers {layers}", "hetu")
    made = evaluate(MODEL, cluster({"fast": 2, "slow": 3}, per_node=2), layout)
    assert [[each.devices[0] for each in one.stages] for one in made.pipelines] == [
        ["fast-0:0", "fast-0:1"],
        ["slow-0:1", "slow-0:0", "slow-1:0"],
    ]
    assert [each.num_micro_batches for each in made.pipelines] == [5, 3]
    assert made.pipelines[0].stages[0].recompute == (2,)  # decoder layer 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--hetero_layers 3,5", "--micro-batch-num-list: missing"),
        ('--micro_batch_num_list "[5]"', "--hetero-layers: missing, and there is no --ds_parallel_config"),
        ('--micro_batch_num_list "[5]" --hetero_layers 3,5', "--hetero-stages: missing"),
        (
            '--micro_batch_num_list "[5]" --hetero_layers 3,5 --hetero_stages "[3]"',
            "--hetero-layers: 2 entries for 3 stages",
        ),
        (
            '--micro_batch_num_list "[5,3]" --hetero_layers "[[8]]" --tp 1',
            "--micro-batch-num-list: 2 entries for 1 pipelines",
        ),
        ('--micro_batch_num_list "[5]" --hetero_layers "[[x]]"', r"'\[\[x\]\]' is not a list of numbers"),
        ('--micro_batch_num_list "[5]" --hetero_layers "[[8]]" --tp 2 --unused_rank "[0,1]"', "without a device"),
        ('--micro_batch_num_list "[5]" --cp_list "[2]" --hetero_layers "[[8]]"', "context parallelism"),
        ('{"zero": false}', "the JSON has no micro-batches; give the trainer's flags"),
    ],
)
def test_damaged_hetu_flags_name_the_flag(text: str, problem: str) -> None:
    """One error with the flag."""
    with pytest.raises(ValueError, match=problem):
        parse(text, "hetu")


def test_hexiscale_flags_with_python_lists_and_padding() -> None:
    """Lists may multiply; missing chunks repeat the last; GPipe, its default, holds all micro-batches."""
    layout = parse(
        '--hetero_configs "[[1] * 2] * 2" --layer_partitions "[[3, 5]] * 2" --chunks 4 --global_bsz_size 8', "hexiscale"
    )
    made = evaluate(MODEL, FOUR, layout)
    assert [(each.micro_batch, each.num_micro_batches) for each in made.pipelines] == [(2, 4), (2, 4)]
    assert [each.in_flight for each in made.pipelines[0].stages] == [4, 4]
    placed = parse(
        '--hetero_configs "[[1,1]]" --layer_partitions "[[3,5]]" --chunks 4 --global_bsz_size 4 --pipeline-type 1F1B '
        '--pp_layouts "[[[1],[0]]]" --checkpoint-layers',
        "hexiscale",
    )
    stages = evaluate(MODEL, PAIR, placed).pipelines[0].stages
    assert [each.devices for each in stages] == [("fast-0:1",), ("fast-0:0",)]
    assert stages[0].recompute == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('--layer_partitions "[[8]]"', "--hetero-configs: missing"),
        ('--hetero_configs "[[1]]" --layer_partitions "[[8]]"', "--chunks: missing"),
        (
            '--hetero_configs "[[1]]" --layer_partitions "[[4,4]]" --chunks 1 --global_bsz_size 1',
            "pipeline 0: 2 stages, --hetero-configs 1",
        ),
        (
            '--hetero_configs "[[1]]" --layer_partitions "[[8]]" --chunks 3 --global_bsz_size 4',
            "4 samples in 3 micro-batches",
        ),
        ('--hetero_configs "[[1]]" --layer_partitions 8 --chunks 1 --global_bsz_size 1', "is not a list of lists"),
        ('--hetero_configs "[[1] * 10**9]" --layer_partitions "[[8]]"', "--hetero-configs: .* is not a list"),
    ],
)
def test_damaged_hexiscale_flags_name_the_flag(text: str, problem: str) -> None:
    """One error with the flag."""
    with pytest.raises(ValueError, match=problem):
        parse(text, "hexiscale")


def test_a_layout_file_of_our_own(tmp_path: Path) -> None:
    """YAML with counts of decoder layers; a wrong key is named."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema: hpp-layout/1\n"
        "pipelines:\n"
        "- micro_batch: 1\n"
        "  num_micro_batches: 4\n"
        "  stages:\n"
        "  - {blocks: 3, embedding: true, devices: [fast-0:1]}\n"
        "  - {blocks: 5, head: true, devices: [0]}\n"
    )
    made = evaluate(MODEL, PAIR, parse(path, "layout"))
    assert [each.devices for each in made.pipelines[0].stages] == [("fast-0:1",), ("fast-0:0",)]
    path.write_text(path.read_text().replace("blocks: 3", "block: 3"))
    with pytest.raises(ValueError, match=r"mine\.yaml: pipelines\[0\]\.stages\[0\]: key 'block' is not among"):
        parse(path, "layout")


def test_unknown_format_and_empty_text() -> None:
    """Both are said."""
    with pytest.raises(ValueError, match=r"format 'megatrom' is not among .*did you mean 'megatron'"):
        parse("Et|tL", "megatrom")
    with pytest.raises(ValueError, match="megatron: the text is empty"):
        parse(" \n", "megatron")


# There and back.


def whole(devices: Cluster) -> Plan:
    """3:5 with five micro-batches beside 2:3:3 with three, some layers recomputed."""
    names = [device.name for device in devices.devices]
    counts, used = ((3, 5), (2, 3, 3)), iter(names)
    pipelines = []
    for p, (split, m) in enumerate(zip(counts, (5, 3))):
        stages = tuple(
            StageLayout(
                blocks=n,
                embedding=s == 0,
                head=s + 1 == len(split),
                devices=(next(used),),
                recompute=(0,) if (p, s) == (0, 1) else (),
            )
            for s, n in enumerate(split)
        )
        pipelines.append(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=m))
    return evaluate(MODEL, devices, Layout(pipelines=tuple(pipelines)))


@pytest.mark.parametrize("name", ["run", "hetu", "plan"])
def test_whole_plans_come_back_equal(name: str, tmp_path: Path) -> None:
    """Out in a format and in again: the same pipelines, devices, recomputed layers, and so the same figures."""
    devices = cluster({"fast": 2, "slow": 3}, per_node=2)
    made = whole(devices)
    if name == "plan":
        made.save(tmp_path / "plan.json")
        layout = parse(tmp_path / "plan.json", "plan")
    else:
        done = exporters.export(made, name, profile=MODEL, cluster=devices)
        done.save(tmp_path / "out")
        layout = parse(tmp_path / "out" / {"run": "run.json", "hetu": "trainer.args"}[name], name)
    again = evaluate(MODEL, devices, layout)
    assert again.pipelines == made.pipelines
    assert again.predicted == made.predicted


def test_hexiscale_comes_back_but_for_single_recomputed_layers() -> None:
    """It recomputes all or nothing; a plan without is the same again."""
    devices = cluster({"fast": 2, "slow": 3}, per_node=2)
    layout = Layout.of_plan(whole(devices))
    bare = replace(
        layout,
        pipelines=tuple(
            replace(one, stages=tuple(replace(each, recompute=()) for each in one.stages)) for one in layout.pipelines
        ),
    )
    made = evaluate(MODEL, devices, bare)
    text = exporters.export(made, "hexiscale", profile=MODEL).text("hexiscale.args")
    assert evaluate(MODEL, devices, parse(text, "hexiscale")).pipelines == made.pipelines


@pytest.mark.parametrize("name", ["megatron", "galvatron"])
@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_one_shape_comes_back_equal(name: str, recompute: tuple[int, ...]) -> None:
    """Two pipelines of 3:5, tp 2, micro-batches of two, on eight devices, stage by stage."""
    devices = cluster({"fast": 8}, per_node=8)
    given = shape(3, 5, tp=2, m=4, b=2)
    given = replace(given, stages=tuple(replace(each, recompute=recompute) for each in given.stages))
    made = evaluate(MODEL, devices, Layout(pipelines=(given,), copies=2, order="stage"))
    done = exporters.export(made, name, profile=MODEL, cluster=devices)
    assert not done.warnings
    text = done.text({"megatron": "megatron.args", "galvatron": "galvatron.json"}[name])
    again = evaluate(MODEL, devices, parse(text, name))
    assert again.pipelines == made.pipelines
    assert again.predicted == made.predicted


@pytest.mark.parametrize("name", ["hexiscale", "hetu", "megatron", "galvatron"])
def test_a_rank_map_brings_the_devices_back(name: str, tmp_path: Path) -> None:
    """Slow devices first, the others in reverse: without the map of the export these would be others.

    Two pipelines of 3:5 on two slow and two fast devices of a cluster that lists two more fast ones first.
    """
    devices = cluster({"fast": 4, "slow": 2}, per_node=2)
    given = replace(shape(3, 5), stages=(StageLayout(blocks=3, embedding=True), StageLayout(blocks=5, head=True)))
    names = [device.name for device in devices.devices]
    both = tuple(
        replace(given, stages=tuple(replace(s, devices=(names[-1 - 2 * n - p],)) for n, s in enumerate(given.stages)))
        for p in range(2)
    )
    made = evaluate(MODEL, devices, Layout(pipelines=both))
    exporters.export(made, name, profile=MODEL).save(tmp_path)
    files = {"hexiscale": "hexiscale.args", "hetu": "trainer.args", "galvatron": "galvatron.json"}
    layout = parse(tmp_path / files.get(name, "megatron.args"), name)
    again = evaluate(MODEL, devices, layout, ranks=read_ranks(tmp_path / "ranks.csv"))
    assert again.pipelines == made.pipelines
    assert not any("rank map" in each for each in again.warnings)
    unmapped = layout if layout.copies == 1 else replace(layout, copies=2)
    assert any("no rank map was given" in each for each in evaluate(MODEL, devices, unmapped).warnings)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rank,dev\n0,n0:0\n", r"ranks.csv: line 1: column 'device' is missing; there are rank, dev"),
        ("rank,device\n0,n0:0\n2,n0:1\n", r"ranks.csv: line 3: rank: '2' is not one of the ranks 0-1"),
        ("rank,device\n0,n0:0\n0,n0:1\n", r"ranks.csv: line 3: rank: '0' is not a rank of its own"),
        ("rank,device\nx,n0:0\n", r"ranks.csv: line 2: rank: 'x' is not one of the ranks 0-0"),
        ("", r"ranks.csv: the file is empty"),
    ],
)
def test_damaged_rank_maps_name_the_line(text: str, problem: str, tmp_path: Path) -> None:
    """Every rank once, from 0 on."""
    (tmp_path / "ranks.csv").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_ranks(tmp_path / "ranks.csv")


def test_a_rank_map_beside_named_devices_is_refused() -> None:
    """A plan names its devices: a map would change nothing."""
    made = evaluate(MODEL, PAIR, Layout(pipelines=(shape(3, 5),)))
    with pytest.raises(ValueError, match="ranks: no effect, the configuration names its devices"):
        evaluate(MODEL, PAIR, Layout.of_plan(made), ranks=["fast-0:0", "fast-0:1"])
    with pytest.raises(ValueError, match="device 'n9:0' is not among"):
        evaluate(MODEL, PAIR, Layout(pipelines=(shape(3, 5),)), ranks=["n9:0", "fast-0:1"])


def test_exporting_a_configuration_of_others_translates_it() -> None:
    """A Megatron string becomes Colossal-AI's list: what is read can be written in any format."""
    made = evaluate(MODEL, PAIR, megatron("Et*3|t*5L"), Job(global_batch=4))
    assert "num_layers_per_stage=[3, 5]" in exporters.export(made, "colossalai", profile=MODEL).text("plugin.py")


def test_evaluation_on_one_device_type_of_two() -> None:
    """Devices that are not used are idle, and their types need no measurements."""
    link = Link(bytes_per_s=1e10)
    mixed = Cluster(
        name="mixed",
        device_types=(
            DeviceType(name="fast", memory_bytes=16 * GB),
            DeviceType(name="unknown", memory_bytes=16 * GB),
        ),
        nodes=(Node(name="n", devices=("fast", "fast", "unknown"), link=link),),
        links=(),
    )
    model = profile(
        num_layers=10,
        distinct=False,
        ends=True,
        speeds={"fast": 1.0},
        conditions=Conditions(sequence_length=128),
    )
    made = evaluate(model, mixed, Layout(pipelines=(shape(3, 5),)))
    assert made.idle_devices == ("n:2",)
    assert any("unknown: not in the profile" in each for each in made.warnings)
