"""Golden texts of every format for the plan 3:5 + 2:3:3, layout strings both ways, refusals, launch lines.

The syntaxes are facts about the other systems; what they would do with the texts is not tried here.
"""

from __future__ import annotations

import itertools
import json
import sys
import tomllib
import types
from dataclasses import replace

import pytest
import yaml
from factories import cluster, profile
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import exporters, files
from planner.exporters import NotExpressible, export
from planner.exporters.hexiscale import export as to_hexiscale
from planner.exporters.layers import NAMES, model_layers
from planner.exporters.megatron import check_layout, layout_string, parse_layout
from planner.exporters.run import Run
from planner.job import Job
from planner.plans import Block, Pipeline, Plan, Predicted, Provenance, Stage, StageMemory, TiedBlock
from planner.profile import Cell, LayerKind, ModelProfile

GIB = 1 << 30
# An embedding, 8 decoder layers, a head.
MODEL = profile(num_layers=10, distinct=False, ends=True, num_heads=8, micro_batches=(1, 2))


def stage(
    layers: tuple[int, int],
    *devices: str,
    kind: str = "A100",
    recompute: tuple[int, ...] = (),
    in_flight: int = 1,
) -> Stage:
    memory = StageMemory(
        weights=GIB,
        gradients=GIB,
        optimizer=GIB,
        activations=GIB,
        logits=0,
        workspace=0,
        sync_buffer=0,
        context=GIB,
        capacity=40 * GIB,
    )
    return Stage(
        device_type=kind,
        tp=len(devices),
        layers=layers,
        devices=devices,
        recompute=recompute,
        in_flight=in_flight,
        forward_s=0.1,
        backward_s=0.2,
        memory=memory,
    )


def pipeline(*stages: Stage, m: int, b: int = 1, ahead: int = 0) -> Pipeline:
    """Stages that hold min(m, S - s) micro-batches, and so many more."""
    held = [min(m, len(stages) - s + ahead * (s + 1 < len(stages))) for s in range(len(stages))]
    return Pipeline(
        micro_batch=b,
        num_micro_batches=m,
        stages=tuple(replace(each, in_flight=w) for each, w in zip(stages, held, strict=True)),
        time_s=1.0,
    )


def plan(*pipelines: Pipeline, job: Job | None = None, tied: tuple[int, int] | None = None) -> Plan:
    batch = sum(each.samples for each in pipelines)
    cuts = sorted({edge for each in pipelines for s in each.stages for edge in s.layers})

    def owner(each: Pipeline, layer: int) -> int:
        return next(s for s, one in enumerate(each.stages) if one.layers[0] <= layer < one.layers[1])

    blocks = tuple(
        Block(layers=(i, j), owners=tuple(owner(each, i) for each in pipelines), gradient_bytes=100)
        for i, j in itertools.pairwise(cuts)
    )
    tied_blocks: tuple[TiedBlock, ...] = ()
    if tied is not None:
        owners = tuple(dict.fromkeys((p, owner(each, l)) for p, each in enumerate(pipelines) for l in tied))
        tied_blocks = (TiedBlock(layers=tied, owners=owners, gradient_bytes=50),)
    predicted = Predicted(
        iteration_s=1.0,
        pipeline_s=1.0,
        sync_s=0.0,
        update_s=0.0,
        bubble_fraction=0.1,
        samples_per_s=8.0,
        floor_s=0.9,
        one_f_one_b_s=1.0,
    )
    return Plan(
        profile_name="model",
        cluster_name="cluster",
        predicted=predicted,
        lower_bound_s=0.9,
        gap=1 / 9,
        pipelines=pipelines,
        blocks=blocks,
        tied_blocks=tied_blocks,
        job=job or Job(global_batch=batch),
        provenance=Provenance(profile="p", cluster="c", job="j"),
    )


A = pipeline(stage((0, 4), "big:0"), stage((4, 10), "big:1"), m=5)
B = pipeline(stage((0, 3), "s:1", kind="V100"), stage((3, 6), "s:0", kind="V100"), stage((6, 10), "t:0"), m=3)
WHOLE = plan(A, B)
# Two pipelines of two stages over two nodes, each node a pipeline.
TWICE = plan(
    pipeline(stage((0, 4), "x:0"), stage((4, 10), "x:1"), m=4),
    pipeline(stage((0, 4), "y:0"), stage((4, 10), "y:1"), m=4),
)


# Whole plans.


def test_run_has_every_rank_action_and_reduction() -> None:
    """Ranks go node by node, devices by index; actions are 1F1B; blocks are reduced last layers first."""
    run = Run.from_dict(json.loads(export(WHOLE, "run", profile=MODEL).text("run.json")))
    # Nodes in order of first use: big (0, 1), s (0, 1), t.
    assert [each.device for each in run.ranks] == ["big:0", "big:1", "s:0", "s:1", "t:0"]
    a, b = run.pipelines
    assert [each.ranks for each in a.stages] == [(0,), (1,)]
    assert [each.ranks for each in b.stages] == [(3,), (2,), (4,)]  # stage 0 is on s:1
    assert (a.first_sample, b.first_sample) == (0, 5)
    assert [each.actions for each in a.stages] == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0B4",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4",
    ]
    assert b.stages[0].actions == "0F0 0F1 0F2 0B0 0B1 0B2"
    # Cuts 4 and 3, 6: blocks [0,3) {0,0} [3,4) {0,1} [4,6) {1,1} [6,10) {1,2}.
    assert [(each.layers, each.groups) for each in run.reductions] == [
        ((6, 10), ((1, 4),)),
        ((4, 6), ((1, 2),)),
        ((3, 4), ((0, 2),)),
        ((0, 3), ((0, 3),)),
    ]
    assert run.layer_kinds[0] == "embedding"
    assert run.loss == "sum/global_tokens"


def test_run_reads_back_as_written() -> None:
    """The file is a document of its own: read and written again it is the same."""
    text = export(WHOLE, "run", profile=MODEL).text("run.json")
    assert files.dumps(Run.from_dict(json.loads(text))) == text


def test_run_slices_between_unequal_tp_degrees() -> None:
    """tp 4 against tp 2: four slices, each rank of the pair holds two of them. Tied weights come last."""
    mixed = plan(
        pipeline(stage((0, 10), "x:0", "x:1", "x:2", "x:3"), m=1),
        pipeline(stage((0, 4), "y:0", "y:1"), stage((4, 10), "y:2"), m=2),
        tied=(0, 9),
    )
    run = Run.from_dict(json.loads(export(mixed, "run").text("run.json")))
    assert [each.groups for each in run.reductions] == [
        ((0, 6), (1, 6), (2, 6), (3, 6)),  # [4, 10): y:2 is rank 6
        ((0, 4), (1, 4), (2, 5), (3, 5)),  # [0, 4)
        ((0, 4, 6), (1, 4, 6), (2, 5, 6), (3, 5, 6)),
    ]
    assert [each.tied for each in run.reductions] == [False, False, True]


def test_run_follows_the_planned_depths() -> None:
    """A stage that runs ahead has more forwards before its first backward."""
    ahead = plan(pipeline(stage((0, 4), "x:0"), stage((4, 10), "x:1"), m=4, ahead=1))
    run = Run.from_dict(json.loads(export(ahead, "run").text("run.json")))
    assert run.pipelines[0].stages[0].actions == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert run.pipelines[0].stages[0].in_flight == 3


def test_run_refuses_a_rank_used_twice() -> None:
    """A damaged file is one clear error."""
    data = json.loads(export(WHOLE, "run").text("run.json"))
    data["pipelines"][0]["stages"][0]["ranks"] = [1]
    with pytest.raises(
        ValueError, match=r"r\.json: pipelines: their stages use ranks \[1, 1, 2, 3, 4\], expected each"
    ):
        Run.from_dict(data, "r.json")


def test_hexiscale_golden() -> None:
    """Devices and decoder layers per stage, micro-batches and samples per pipeline."""
    done = export(WHOLE, "hexiscale", profile=MODEL)
    assert done.text("hexiscale.args").splitlines() == [
        '--hetero_configs "[[1,1],[1,1,1]]"',
        '--layer_partitions "[[3,5],[2,3,3]]"',
        "--total-layer-num 8",
        "--chunks 5 3",
        "--global_bsz_size 5 3",
        "--pipeline-type 1F1B",
        "--mixed_precision bf16",
    ]
    assert json.loads(done.text("hexiscale.json")) == {
        "hetero_configs": [[1, 1], [1, 1, 1]],
        "layer_partitions": [[3, 5], [2, 3, 3]],
    }
    assert any("weighs pipelines equally" in each for each in done.warnings)
    # Its ranks count pipeline by pipeline: s:1 comes before s:0.
    assert [line.split()[0] for line in done.commands] == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=1,0",
        "CUDA_VISIBLE_DEVICES=0",
    ]


def test_hexiscale_recomputes_all_or_nothing() -> None:
    """One recomputed layer turns the flag on, with a warning; all of them without."""
    some = plan(pipeline(stage((0, 4), "x:0", recompute=(1,)), stage((4, 10), "x:1"), m=2))
    every = plan(
        pipeline(stage((0, 4), "x:0", recompute=(1, 2, 3)), stage((4, 10), "x:1", recompute=(4, 5, 6, 7, 8)), m=2)
    )
    done = [export(each, "hexiscale", profile=MODEL) for each in (some, every)]
    assert all("--checkpoint-layers" in each.text("hexiscale.args") for each in done)
    assert [any("all decoder layers" in text for text in each.warnings) for each in done] == [True, False]


def test_hetu_golden() -> None:
    """Flags of generator and trainer; the mapping counts devices node by node."""
    done = export(WHOLE, "hetu", profile=MODEL)
    generator = done.text("generator.args").splitlines()
    assert generator[:6] == [
        "--num_layers 8",
        "--num_gpus 5",
        "--dp 2",
        "--tp 1",
        "--hetero_layers 3,5,2,3,3",
        '--hetero_stages "[2,3]"',
    ]
    assert '--rank_to_device_mapping "{0:0,1:1,2:3,3:2,4:4}"' in generator
    trainer = done.text("trainer.args").splitlines()
    for line in ('--micro_batch_num_list "[5,3]"', "--micro_batch_size 1", '--unused_rank "[]"', '--cp_list "[1,1]"'):
        assert line in trainer


def test_hetu_json_names_the_devices_of_every_layer() -> None:
    """Layer 2 is on device 0 in A and, as the first of stage 1, on device 2 in B; ends go with the outermost layers."""
    data = json.loads(export(WHOLE, "hetu", profile=MODEL).text("hetu.json"))
    blocks = data["llama"]["blocks"]
    assert list(blocks) == [f"blocks{l}" for l in range(8)]
    assert blocks["blocks2"]["attn"]["qkv"] == {
        "split": {"1": [1, 1]},
        "dup": [2, 2],
        "device_group_union": [[0], [2]],
        "type": "variable",
    }
    assert data["llama"]["wte"]["device_group_union"] == [[0], [3]]
    assert data["lm_head"]["device_group_union"] == [[1], [4]]
    assert "gpt" in json.loads(export(WHOLE, "hetu", profile=MODEL, names="gpt2").text("hetu.json"))


def test_hetu_counts_slots_of_the_widest_stage() -> None:
    """Stages of 2 and 1 devices: two slots each, the second slot of the narrow one unused, recompute by layer."""
    mixed = plan(pipeline(stage((0, 4), "x:0", "x:1", recompute=(1, 3)), stage((4, 10), "x:2"), m=2))
    done = export(mixed, "hetu", profile=MODEL)
    assert '--unused_rank "[3]"' in done.text("trainer.args")
    assert "--hetero_stage_gpus 2" in done.text("trainer.args")
    assert '--recompute_layers "[[0,2]]"' in done.text("generator.args")  # decoder layers 0 and 2
    assert any("unused" in each for each in done.warnings)


def test_torch_keeps_pipelines_apart() -> None:
    """A group, stage list and action file per pipeline; the blocks whose gradients are summed."""
    done = export(WHOLE, "torch", profile=MODEL)
    data = json.loads(done.text("stages.json"))
    assert [each["groups"] for each in data["pipelines"]] == [[[0, 1]], [[3, 2, 4]]]
    assert data["pipelines"][1]["stages"][2]["modules"] == [
        "model.layers.5",
        "model.layers.6",
        "model.layers.7",
        "model.norm",
        "lm_head",
    ]
    assert data["gradient_sync"][0] == {"layers": [6, 10], "stages": [1, 2], "ranks": [[1], [4]]}
    assert done.text("schedule_1.csv") == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"


# One shape.


def test_megatron_golden() -> None:
    """The layout of 3:5 and the flags around it; TWICE needs one line per node if pipelines are contiguous."""
    done = export(plan(A), "megatron", profile=MODEL)
    assert done.text("megatron.args").splitlines() == [
        "--num-layers 8",
        "--num-attention-heads 8",
        "--seq-length 1024",
        "--untie-embeddings-and-output-weights",
        "--tensor-model-parallel-size 1",
        "--pipeline-model-parallel-size 2",
        '--pipeline-model-parallel-layout "Et*3|t*5L"',
        "--micro-batch-size 1",
        "--global-batch-size 5",
        "--bf16",
        "--optimizer adam",
    ]
    assert "without layouts, the same split: --decoder-first-pipeline-num-layers 3" in done.notes
    twice = export(TWICE, "megatron", profile=MODEL)
    assert "--use-tp-pp-dp-mapping" in twice.text("megatron.args")
    assert "--global-batch-size 8" in twice.text("megatron.args")
    assert len(twice.commands) == 2


def test_megatron_layout_of_pipeline_b() -> None:
    """2:3:3 as the notes of the runtime write it; a stage with the embedding alone is E."""
    assert '"Et*2|t*3|t*3L"' in export(plan(B), "megatron", profile=MODEL).text("megatron.args")
    alone = plan(pipeline(stage((0, 1), "x:0"), stage((1, 9), "x:1"), stage((9, 10), "x:2"), m=4))
    assert '"E|t*8|L"' in export(alone, "megatron", profile=MODEL).text("megatron.args")


def test_megatron_recompute_is_one_number_for_all_stages() -> None:
    """The most any stage needs, with a warning where that is more than planned; all layers: uniform."""
    some = plan(pipeline(stage((0, 4), "x:0", recompute=(1, 2)), stage((4, 10), "x:1"), m=2))
    done = export(some, "megatron", profile=MODEL)
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 2" in done.text(
        "megatron.args"
    )
    assert any("stage 1: 2 instead of 0" in each for each in done.warnings)
    every = plan(pipeline(stage((0, 10), "x:0", recompute=tuple(range(1, 9))), m=2))
    done = export(every, "megatron", profile=MODEL)
    assert "--recompute-method uniform --recompute-num-layers 1" in done.text("megatron.args")
    assert not done.warnings


def test_torchtitan_golden() -> None:
    """The parts as TOML that parses, and as arguments; local batch = micro-batch x micro-batches."""
    done = export(plan(A), "torchtitan", profile=MODEL)
    data = tomllib.loads(done.text("torchtitan.toml"))
    assert data["parallelism"]["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5", "layers.6", "layers.7", "norm", "lm_head"],
    ]
    assert data["parallelism"]["pipeline_parallel_degree"] == 2
    assert data["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert "pipeline_parallel_schedule_csv" not in data["parallelism"]
    assert data["training"] == {"local_batch_size": 5, "global_batch_size": 5, "seq_len": 1024}
    arguments = done.text("torchtitan.args").splitlines()
    assert "--parallelism.num_pp_microbatches '5'" in arguments
    assert "--training.num_tokens_per_train_step 5120" in arguments  # 5 samples of 1024 tokens
    older = export(plan(A), "torchtitan", profile=MODEL, names="torchtitan-output").text("torchtitan.toml")
    assert tomllib.loads(older)["parallelism"]["module_fqns_per_model_part"][1][-1] == "output"


def test_torchtitan_takes_the_schedule_file_where_torch_has_no_such_1f1b() -> None:
    """Fewer micro-batches than stages, or forwards that run ahead: the actions come from the file."""
    few = plan(pipeline(stage((0, 4), "x:0"), stage((4, 10), "x:1"), m=1))
    ahead = plan(pipeline(stage((0, 4), "x:0"), stage((4, 10), "x:1"), m=4, ahead=1))
    for each in (few, ahead):
        done = export(each, "torchtitan", profile=MODEL)
        assert 'pipeline_parallel_schedule_csv = "schedule.csv"' in done.text("torchtitan.toml")
    assert done.text("schedule.csv").splitlines()[0] == "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3"


def test_deepspeed_module_cuts_at_the_planned_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The written module, run against a stand-in of DeepSpeed, gives each rank its layers."""
    bounds = {}

    class PipelineModule:
        def __init__(self, layers: list[int], loss_fn: object, topology: object, **others: object) -> None:
            self._layer_specs, self._topo, self.global_rank = layers, topology, 1
            self._partition_layers()

        def _set_bounds(self, start: int, stop: int) -> None:
            bounds[self.global_rank] = (start, stop)

    class Topology:
        def __init__(self, **sizes: int) -> None:
            self.sizes = sizes

        def get_coord(self, rank: int) -> types.SimpleNamespace:
            return types.SimpleNamespace(pipe=rank)

    for name, contents in (
        ("deepspeed", {}),
        ("deepspeed.pipe", {"PipelineModule": PipelineModule}),
        ("deepspeed.runtime", {}),
        ("deepspeed.runtime.pipe", {}),
        ("deepspeed.runtime.pipe.topology", {"PipeDataParallelTopology": Topology}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    done = export(plan(A), "deepspeed", profile=MODEL)
    scope: dict[str, object] = {}
    exec(compile(done.text("pipeline.py"), "pipeline.py", "exec"), scope)
    assert scope["PARTS"] == [0, 4, 10]
    built = scope["build"](list(range(10)), None)  # type: ignore[operator]
    assert bounds == {1: (4, 10)}
    assert built._topo.sizes == {"num_pp": 2, "num_dp": 1}
    with pytest.raises(ValueError, match="9 layer specs, the plan cuts 10"):
        scope["build"](list(range(9)), None)  # type: ignore[operator]
    assert json.loads(done.text("ds_config.json")) == {
        "train_batch_size": 5,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 5,
        "bf16": {"enabled": True},
    }


def test_colossalai_golden() -> None:
    """The keyword arguments of the plugin; recompute has a figure per stage."""
    some = plan(pipeline(stage((0, 4), "x:0", recompute=(1, 2)), stage((4, 10), "x:1"), m=5))
    text = export(some, "colossalai", profile=MODEL).text("plugin.py")
    scope = {"HybridParallelPlugin": dict, "PipelineGradientCheckpointConfig": dict}
    exec(text[text.index("plugin =") :], scope)
    assert scope["plugin"] == {
        "tp_size": 1,
        "pp_size": 2,
        "zero_stage": 0,
        "precision": "bf16",
        "num_layers_per_stage": [3, 5],
        "num_microbatches": 5,
        "microbatch_size": 1,
        "pp_style": "1f1b",
        "gradient_checkpoint_config": {"num_ckpt_layers_per_stage": [2, 0]},
    }


def test_galvatron_golden() -> None:
    """Lists are strings with an entry per decoder layer."""
    some = plan(pipeline(stage((0, 4), "x:0", recompute=(1,)), stage((4, 10), "x:1"), m=5))
    data = json.loads(export(some, "galvatron", profile=MODEL).text("galvatron.json"))
    assert data["pp_deg"] == 2
    assert data["pp_division"] == "3,5"
    assert data["chunks"] == 5
    assert data["global_bsz"] == 5
    assert data["tp_sizes_enc"] == "1,1,1,1,1,1,1,1"
    assert data["checkpoint"] == "1,0,0,0,0,0,0,0"
    assert data["pipeline_type"] == "pipedream_flush"


def test_flagscale_golden() -> None:
    """Neighbouring stages of a type and degree are one mesh; ranks go by type, then stage, then pipeline."""
    unlike = plan(
        *(
            pipeline(
                stage((0, 3), f"a{n}:0", f"a{n}:1"),
                stage((3, 6), f"a{n}:2", f"a{n}:3", recompute=(4,)),
                stage((6, 10), f"v{n}:0", kind="V100"),
                m=4,
            )
            for n in (0, 1)
        )
    )
    done = export(unlike, "flagscale", profile=MODEL)
    system = yaml.safe_load(done.text("flagscale.yaml"))["system"]
    assert system["pipeline_model_parallel_size"] == 3
    assert system["hetero"]["hetero_pipeline_layer_split"] == [2, 3, 3]
    assert system["hetero"]["hetero_process_meshes"] == [2, 1, 1, 2, 2, 1, 1, 1, 2, 1]
    assert system["hetero"]["hetero_device_types"] == ["A100", "V100"]
    assert system["recompute"]["recompute_num_layers_per_stage_micro_batch"] == [[1, 4, 0], [1, 4, 1], [1, 4, 0]]
    assert system["checkpoint"] == {"ckpt_format": "torch"}
    assert any("ckpt_format torch" in note for note in done.notes)
    assert done.text("hostfile").splitlines()[0] == "a0 slots=4 type=A100"
    assert "--hetero-current-device-type V100" in done.commands[-1]
    ranks = [line.split(",")[1] for line in done.text("ranks.csv").splitlines()[1:]]
    assert ranks == ["a0:0", "a0:1", "a1:0", "a1:1", "a0:2", "a0:3", "a1:2", "a1:3", "v0:0", "v1:0"]


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        ((("A100", "V100", "A100"),), "stages go A100, V100, A100: those of a type have to be neighbours"),
        (
            (("A100", "A100", "V100"), ("A100", "V100", "V100")),
            "stage 1 is on A100 in pipeline 0 and on V100 in pipeline 1",
        ),
    ],
)
def test_flagscale_refuses_before_launch(kinds: tuple[tuple[str, ...], ...], problem: str) -> None:
    """What FlagScale would number or assert otherwise is said now, with the place."""
    cuts = [(0, 3), (3, 6), (6, 10)]
    each = [
        pipeline(*(stage(cut, f"n{p}{s}:0", kind=kind) for s, (cut, kind) in enumerate(zip(cuts, row))), m=4)
        for p, row in enumerate(kinds)
    ]
    with pytest.raises(NotExpressible, match=problem):
        export(plan(*each), "flagscale", profile=MODEL)


def test_stages_of_unequal_tp() -> None:
    """Nodes of 4, 1, 2, 1 devices, tp as many: whole-plan formats and FlagScale take it, others name the stages."""
    counts = [4, 1, 2, 1]
    cuts = [(0, 3), (3, 5), (5, 8), (8, 10)]
    stages = [stage(cut, *(f"n{s}:{i}" for i in range(count))) for s, (cut, count) in enumerate(zip(cuts, counts))]
    wide = plan(pipeline(*stages, m=4))
    assert '"[[4,1,2,1]]"' in export(wide, "hexiscale", profile=MODEL).text("hexiscale.args")
    system = yaml.safe_load(export(wide, "flagscale", profile=MODEL).text("flagscale.yaml"))["system"]
    assert system["hetero"]["hetero_process_meshes"] == [4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert json.loads(export(wide, "run").text("run.json"))["world_size"] == 8
    with pytest.raises(NotExpressible, match="one tp degree, but stages 0 and 1 differ: tp 4 against 1"):
        export(wide, "megatron", profile=MODEL)
    with pytest.raises(NotExpressible, match="stages 0 and 1 of pipeline 0 are of tp 4 and 1"):
        export(wide, "torch", profile=MODEL)
    paired = plan(pipeline(stage((0, 4), "x:0", "x:1"), stage((4, 10), "x:2", "x:3"), m=2))
    data = json.loads(export(paired, "torch", profile=MODEL).text("stages.json"))
    assert data["pipelines"][0]["groups"] == [[0, 2], [1, 3]]


ONE_SHAPE = ("megatron", "torchtitan", "deepspeed", "colossalai", "galvatron", "flagscale")


@pytest.mark.parametrize("name", ONE_SHAPE)
@pytest.mark.parametrize(
    ("second", "difference"),
    [
        (B, "2 stages against 3"),
        (pipeline(stage((0, 5), "y:0"), stage((5, 10), "y:1"), m=5), r"4 \+ 6 layers against 5 \+ 5"),
        (pipeline(stage((0, 4), "y:0"), stage((4, 10), "y:1"), m=4), "5 micro-batches against 4"),
        (pipeline(stage((0, 4), "y:0"), stage((4, 10), "y:1"), m=5, b=2), "1 samples per micro-batch against 2"),
        (pipeline(stage((0, 4), "y:0", "y:2"), stage((4, 10), "y:1"), m=5), "1, 1 tp degrees against 2, 1"),
    ],
)
def test_one_shape_formats_name_the_first_difference(name: str, second: Pipeline, difference: str) -> None:
    """Every way in which two pipelines can differ is refused by name, with the way out."""
    with pytest.raises(NotExpressible, match=difference) as error:
        export(plan(A, second), name, profile=MODEL)
    assert "uniform" in str(error.value)


@pytest.mark.parametrize("name", ["galvatron", "hetu"])
def test_formats_that_bind_the_ends_to_decoder_layers_refuse_a_stage_without(name: str) -> None:
    """An embedding alone on a stage cannot be said where the embedding follows the first decoder layer."""
    alone = plan(pipeline(stage((0, 1), "x:0"), stage((1, 10), "x:1"), m=4))
    with pytest.raises(NotExpressible, match=r"outermost decoder layers, but .*stage 0 has none"):
        export(alone, name, profile=MODEL)


@pytest.mark.parametrize("name", [*ONE_SHAPE, "hexiscale", "hetu"])
def test_systems_of_plain_1f1b_warn_about_forwards_that_run_ahead(name: str) -> None:
    """The deeper warm-up is lost there, except for torchtitan, which reads the actions."""
    ahead = plan(pipeline(stage((0, 4), "x:0"), stage((4, 10), "x:1"), m=4, ahead=1))
    warned = any("run ahead on 1 stages" in each for each in export(ahead, name, profile=MODEL).warnings)
    assert warned == (name != "torchtitan")


# The nearest uniform plan.


@pytest.fixture(scope="module")
def uneven() -> tuple[Plan, ModelProfile, object]:
    """A plan of unlike pipelines on two fast and three slow devices."""
    from planner.evaluate import evaluate
    from planner.exporters.layout import Layout, PipelineLayout, StageLayout

    devices = cluster({"fast": 2, "slow": 3}, per_node=2)
    shapes = (((4, 6), ("fast-0:0", "fast-0:1"), 5), ((3, 3, 4), ("slow-0:0", "slow-0:1", "slow-1:0"), 3))
    pipelines = []
    for counts, names, m in shapes:
        edges = [sum(counts[:n]) for n in range(len(counts) + 1)]
        stages = tuple(
            StageLayout(layers=cut, devices=(name,)) for cut, name in zip(itertools.pairwise(edges), names, strict=True)
        )
        pipelines.append(PipelineLayout(stages=stages, micro_batch=1, num_micro_batches=m))
    return evaluate(MODEL, devices, Layout(pipelines=tuple(pipelines))), MODEL, devices


@pytest.mark.parametrize("name", ONE_SHAPE)
def test_uniform_takes_the_fastest_equal_pipelines_and_says_what_that_costs(name: str, uneven: tuple) -> None:
    """The plan in its place is sound, uniform, and no slower than the given pipelines repeated."""
    given_plan, model, devices = uneven
    done = export(given_plan, name, profile=model, cluster=devices, uniform=True)
    assert done.plan is not given_plan
    assert not done.plan.problems(model, devices)
    shapes = {
        (each.micro_batch, each.num_micro_batches, tuple(one.layers for one in each.stages))
        for each in done.plan.pipelines
    }
    assert len(shapes) == 1
    assert done.plan.job.global_batch == 8
    assert "In its place the nearest uniform plan" in done.notes[0]
    assert "%" in done.notes[0]


def test_uniform_is_the_best_of_all_uniform_plans(uneven: tuple) -> None:
    """Against enumeration: every count of pipelines of one or two stages of one type, every cut, on this cluster."""
    from planner.evaluate import evaluate
    from planner.exporters.layout import Layout, PipelineLayout, StageLayout

    given_plan, model, devices = uneven
    best = export(given_plan, "megatron", profile=model, cluster=devices, uniform=True).plan.predicted.iteration_s
    names = ["fast-0:0", "fast-0:1", "slow-0:0", "slow-0:1", "slow-1:0"]
    for copies in (1, 2):
        for cuts in ([(0, 10)], *([(0, i), (i, 10)] for i in range(1, 10))):
            for first in range(len(names) - copies * len(cuts) + 1):
                used = iter(names[first:])
                layout = Layout(
                    pipelines=tuple(
                        PipelineLayout(
                            stages=tuple(StageLayout(layers=cut, devices=(next(used),)) for cut in cuts),
                            micro_batch=1,
                            num_micro_batches=8 // copies,
                        )
                        for _ in range(copies)
                    )
                )
                priced = evaluate(model, devices, layout)
                if not any("does not fit" in each for each in priced.warnings):
                    assert best <= priced.predicted.iteration_s * (1 + 1e-9)


def test_uniform_without_effect_leaves_the_plan(uneven: tuple) -> None:
    """Where the format takes the plan, it is exported as it is."""
    given_plan, model, devices = uneven
    assert export(given_plan, "run", profile=model, cluster=devices, uniform=True).plan is given_plan


def test_uniform_needs_the_inputs_of_the_plan(uneven: tuple) -> None:
    """Without the cluster, or with another profile, it says so."""
    given_plan, model, devices = uneven
    with pytest.raises(ValueError, match="uniform: needs the cluster"):
        export(given_plan, "megatron", profile=model, uniform=True)
    with pytest.raises(ValueError, match="uniform: the profile is not the one the plan was made for"):
        export(given_plan, "megatron", profile=replace(model, name="other"), cluster=devices, uniform=True)


# Layout strings.


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*5L", ("Ettt", "tttttL")),
        ("Ettt|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("E|(t|)*3tL", ("E", "t", "t", "t", "tL")),
        ("Et||tL", ("Et", "", "tL")),
        ("E|*3tL", ("E", "", "", "tL")),
        ("E,t*0|t,*,2L", ("E", "ttL")),
    ],
)
def test_layout_strings_parse(text: str, stages: tuple[str, ...]) -> None:
    """Repeated letters, bars and groups; commas mean nothing; stages may be empty."""
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Et*3|x", "position 5: 'x' is none of"),
        ("Et|(tt|*2", r"position 3: '\(' is never closed"),
        ("Et)L", r"position 2: '\)' without '\('"),
        ("E(t)L", r"position 3: a group needs \*n"),
        ("E((t)*2)*2L", "position 2: a group inside a group"),
        ("*3tL", r"position 0: \*3 has nothing to repeat"),
        ("Et*2*3L", r"position 4: \*3 has nothing to repeat"),
        ("E()*2L", "position 2: an empty group"),
        ("Et*999999999L", "longer than 1000000"),
    ],
)
def test_damaged_layout_strings_name_the_position(text: str, problem: str) -> None:
    """One error with the place."""
    with pytest.raises(ValueError, match=problem):
        parse_layout(text)


def test_eighty_layers_on_forty_virtual_stages() -> None:
    """80 layers, PP 8, VP 5: two per stage, written short and read back; with empty stages too."""
    stages = ["Ett", *["tt"] * 38, "ttL"]
    assert layout_string(stages) == "Et*2|(t*2|)*38t*2L"
    assert parse_layout(layout_string(stages)) == tuple(stages)
    check_layout(stages, 8, 80)
    sparse = ["E", *["tt"] * 38, "", "ttttL"]
    assert parse_layout(layout_string(sparse)) == tuple(sparse)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[str], int]:
    """Valid stages for PP x VPP: decoder layers anywhere, MTP on one stage of the last round, empty ones allowed."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    count = pp * vpp
    last = draw(st.integers(max(0, count - pp), count - 1))  # the last stage with decoder layers or MTP
    sizes = [draw(st.integers(0, 4)) if s <= last else 0 for s in range(count)]
    mtp = draw(st.integers(0, 2))
    stages = ["t" * size + ("m" * mtp if s == last else "") for s, size in enumerate(sizes)]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return stages, pp


@given(splits())
def test_layouts_of_random_splits_come_back(case: tuple[list[str], int]) -> None:
    """Embedding, loss, MTP, empty and repeated stages, VPP: written, checked, parsed, equal."""
    stages, pp = case
    text = layout_string(stages)
    assert parse_layout(text) == tuple(stages)
    assert parse_layout(",".join(text.partition("|"))) == tuple(stages)
    check_layout(parse_layout(text), pp, sum(each.count("t") for each in stages))


items = st.tuples(st.sampled_from("EtmL|"), st.integers(0, 5))
groups = st.tuples(st.lists(items, min_size=1, max_size=4), st.integers(0, 3))


@given(st.lists(st.one_of(items, groups), max_size=6))
@settings(max_examples=200)
def test_any_layout_means_its_repetitions(parts: list) -> None:
    """Against the meaning: the text of random items and groups parses to them written out."""

    def spelled(item: tuple[str, int]) -> str:
        return item[0] if item[1] == 1 else f"{item[0]}*{item[1]}"

    text = flat = ""
    for part in parts:
        if isinstance(part[0], str):
            text, flat = text + spelled(part), flat + part[0] * part[1]
        else:
            text += f"({''.join(map(spelled, part[0]))})*{part[1]}"
            flat += "".join(letter * times for letter, times in part[0]) * part[1]
    assert parse_layout(text) == tuple(flat.split("|"))


@pytest.mark.parametrize(
    ("stages", "pp", "problem"),
    [
        (["Et", "t", "tL"], 2, "3 stages are no multiple"),
        (["t", "tL"], 2, "0 times E"),
        (["Et", "tLL"], 2, "2 times L"),
        (["tE", "tL"], 2, "starts with t"),
        (["Et", "tL"], 2, "2 decoder layers .* the model has 9"),
        (["Em", "tL"], 2, "after a multi-token"),
        (["Et", "m", "mL"], 3, "on 2 stages"),
        (["E", "m", "", "L"], 2, "m on stage 1, which is not the last virtual stage"),
    ],
)
def test_layouts_that_megatron_refuses(stages: list[str], pp: int, problem: str) -> None:
    """Its rules, each by name."""
    with pytest.raises(ValueError, match=problem):
        check_layout(stages, pp, 9 if stages == ["Et", "tL"] else None)


# Launch.


@pytest.mark.parametrize("nodes", [(2, 3, 3), (8, 2), (4, 1)])
def test_nodes_of_unequal_size_get_one_line_each(nodes: tuple[int, ...]) -> None:
    """Every device starts one process; a line has its own count, order and rank; ranks are consecutive."""
    names = [f"n{n}:{i}" for n, count in enumerate(nodes) for i in range(count)]
    deep = replace(MODEL, layers=("embedding", *["block"] * 18, "head"))
    edges = [n * 20 // len(names) for n in range(len(names) + 1)]
    whole = plan(pipeline(*(stage(cut, name) for cut, name in zip(itertools.pairwise(edges), names)), m=len(names)))
    done = export(whole, "torchrun", profile=deep)
    assert len(done.commands) == len(nodes)
    for n, (line, count) in enumerate(zip(done.commands, nodes)):
        devices = ",".join(map(str, range(count)))
        assert line.startswith(
            f"CUDA_VISIBLE_DEVICES={devices} torchrun --nnodes={len(nodes)} --node-rank={n} --nproc-per-node={count} "
            "--master-addr=n0 --master-port=29500 train.py"
        )
    assert done.text("ranks.csv").count("\n") == 1 + len(names)


def test_launch_prints_the_order_of_devices_that_keeps_groups_of_one_kind() -> None:
    """Four big and four small devices interleaved by id: tp groups are 0,2,4,6 and 1,3,5,7, and so is the order."""
    mixed = plan(
        pipeline(
            stage((0, 7), "n:0", "n:2", "n:4", "n:6", kind="big"),
            stage((7, 10), "n:1", "n:3", "n:5", "n:7", kind="small"),
            m=2,
        )
    )
    line = export(mixed, "megatron", profile=MODEL).commands[0]
    assert line.startswith("CUDA_VISIBLE_DEVICES=0,2,4,6,1,3,5,7 torchrun --nnodes=1")


def test_idle_devices_are_left_out_and_addresses_can_be_given() -> None:
    """Only devices in use are visible; the rendezvous is the first node or what the user says."""
    whole = plan(pipeline(stage((0, 4), "x:3"), stage((4, 10), "y:1"), m=2))
    lines = export(whole, "torchrun", master="10.0.0.7", port=1234, script="my.py --fast").commands
    assert lines == (
        "CUDA_VISIBLE_DEVICES=3 torchrun --nnodes=2 --node-rank=0 --nproc-per-node=1 --master-addr=10.0.0.7 "
        "--master-port=1234 my.py --fast  # on x: rank 0",
        "CUDA_VISIBLE_DEVICES=1 torchrun --nnodes=2 --node-rank=1 --nproc-per-node=1 --master-addr=10.0.0.7 "
        "--master-port=1234 my.py --fast  # on y: rank 1",
    )


def test_order_that_splits_a_node_takes_more_lines_and_says_so() -> None:
    """torchtitan counts stage by stage: nodes that hold a pipeline each take a line per stage."""
    done = export(TWICE, "torchtitan", profile=MODEL)
    assert len(done.commands) == 4
    assert any("x (2), y (2)" in each for each in done.warnings)


def test_accelerate_refuses_nodes_of_unequal_size() -> None:
    """Its launcher divides processes evenly; equal nodes get a configuration each."""
    with pytest.raises(NotExpressible, match=r"big: 2, s: 2, t: 1"):
        export(WHOLE, "accelerate")
    done = export(TWICE, "accelerate")
    assert yaml.safe_load(done.text("accelerate_1.yaml"))["machine_rank"] == 1


def test_wandb_config_is_plain_json() -> None:
    """Scalars by name and the stages."""
    data = json.loads(export(WHOLE, "wandb").text("config.json"))
    assert data["predicted/iteration_s"] == 1.0
    assert [len(each["stages"]) for each in data["pipelines"]] == [2, 3]


# Layers and names.


def kinds(*names: str) -> ModelProfile:
    """A profile with layers of these kinds."""
    unique = dict.fromkeys(names)
    return ModelProfile(
        name="m",
        layers=names,
        kinds=tuple(LayerKind(name=name, parameters=1, output_bytes=1) for name in unique),
        cells=tuple(
            Cell(kind=name, device_type="d", tp=1, micro_batch=1, forward_s=1.0, backward_s=1.0, activation_bytes=0)
            for name in unique
        ),
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("embedding", "block", "block", "head"), (1, 2, 0, 1)),
        (("embedding", "block-1", "block", "block", "head"), (1, 3, 0, 1)),  # a first block measured apart
        (("block", "block"), (0, 2, 0, 0)),
        (("x", "a", "a", "b", "b", "y"), (1, 4, 0, 1)),  # dense and sparse layers
        (("wte", "wpe", "a", "a", "final_norm", "lm_head"), (2, 2, 0, 2)),
        (("embedding", "dense", "moe", "moe", "head"), (1, 3, 0, 1)),
        (("embedding", "a", "a", "mtp", "head"), (1, 2, 1, 1)),
        (("b0", "b1", "b2"), (0, 3, 0, 0)),
    ],
)
def test_ends_are_told_from_decoder_layers(names: tuple[str, ...], expected: tuple[int, int, int, int]) -> None:
    """By name, by logits or ties, else by what occurs twice."""
    layers = model_layers(kinds(*names))
    assert (layers.embedding, layers.blocks, layers.mtp, layers.head) == expected


def test_a_vision_tower_is_no_decoder() -> None:
    """Layers of a tower are not counted as decoder layers, unless the user says where the ends are."""
    tower = kinds("vision_block", "vision_block", "projector", "embedding", "block", "block", "head")
    with pytest.raises(ValueError, match="layer 0 is of kind 'vision_block': not one decoder"):
        model_layers(tower)
    assert model_layers(tower, (4, 1)).blocks == 2


def test_without_the_profile_the_user_has_to_say_where_the_ends_are() -> None:
    """Refused clearly; with `ends` the layers of the plan do."""
    with pytest.raises(ValueError, match="profile: without it nothing says which layers are the embedding"):
        export(plan(A), "megatron")
    assert '"Et*3|t*5L"' in export(plan(A), "megatron", ends=(1, 1)).text("megatron.args")
    assert '"Et*4|t*6L"' in export(plan(A), "megatron", ends=(0, 0)).text("megatron.args")
    with pytest.raises(ValueError, match="ends: 5 and 5 of 10 layers leave no decoder layer"):
        export(plan(A), "megatron", ends=(5, 5))


def test_module_names_follow_the_model() -> None:
    """Templates of several model families; a stage of the embedding alone has all its modules."""
    layers = model_layers(MODEL)
    assert layers.modules((0, 2), NAMES["gpt2"]) == (
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        "transformer.h.0",
    )
    assert layers.modules((9, 10), NAMES["opt"]) == ("model.decoder.final_layer_norm", "lm_head")
    unmeasured = model_layers(None, (0, 0), 2)
    assert unmeasured.modules((0, 1), NAMES["llama"]) == ("model.embed_tokens", "model.layers.0")
    assert unmeasured.modules((1, 2), NAMES["llama"]) == ("model.layers.1", "model.norm", "lm_head")
    with pytest.raises(ValueError, match=r"names: 'lama' is not among .*did you mean 'llama'"):
        export(WHOLE, "torch", profile=MODEL, names="lama")


def test_an_end_of_several_layers_is_cut_only_where_its_modules_are_known() -> None:
    """Norm and head measured apart go to two stages; three layers of two modules cannot be cut."""
    two = kinds("embedding", "a", "a", "norm", "head")
    assert model_layers(two).modules((3, 4), NAMES["llama"]) == ("model.norm",)
    three = kinds("embedding", "a", "a", "norm", "head", "loss")
    with pytest.raises(ValueError, match="the head, 3 layers, is split between stages"):
        model_layers(three).modules((3, 4), NAMES["llama"])


def test_a_profile_of_another_model_is_refused() -> None:
    """Layer counts that do not agree are named."""
    with pytest.raises(ValueError, match="'m' has 4 layers, the plan 10"):
        export(plan(A), "megatron", profile=kinds("embedding", "a", "a", "head"))


# The value.


def test_unknown_format_suggests_one() -> None:
    """A slip gets a suggestion."""
    with pytest.raises(ValueError, match=r"format 'megatrn' is not among .*did you mean 'megatron'"):
        export(WHOLE, "megatrn")


def test_save_writes_a_directory_or_the_main_file(tmp_path) -> None:
    """A directory gets all files and launch.sh; a path with a suffix the first file; nothing temporary stays."""
    done = export(WHOLE, "hexiscale", profile=MODEL)
    written = done.save(tmp_path / "out")
    assert sorted(path.name for path in written) == ["hexiscale.args", "hexiscale.json", "launch.sh", "ranks.csv"]
    assert (tmp_path / "out" / "launch.sh").read_text().startswith("#!/bin/sh\n# ")
    done.save(tmp_path / "out")  # again, over the old one
    done.save(tmp_path / "flags.txt")
    assert (tmp_path / "flags.txt").read_text() == done.text("hexiscale.args")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flags.txt", "out"]
    with pytest.raises(ValueError, match=r"file 'launch.csh' is not among .*did you mean 'launch.sh'"):
        done.text("launch.csh")
    blocked = tmp_path / "flags.txt" / "out"
    with pytest.raises(ValueError, match="cannot be written"):
        done.save(blocked)


def test_same_plan_same_bytes() -> None:
    """Every format twice."""
    for name in exporters.FORMATS:
        subject = plan(A) if name in (*ONE_SHAPE, "accelerate") else WHOLE
        first, second = (export(subject, name, profile=MODEL) for _ in range(2))
        assert first.texts == second.texts
        assert str(first) == str(second)


def test_registry_entries_are_the_modules_own_functions() -> None:
    """`FORMATS` maps a name to a function of a request."""
    assert exporters.FORMATS["hexiscale"] is to_hexiscale
