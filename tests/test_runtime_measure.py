"""Layers and links are measured as they are: bytes against counts by hand, seconds against a run under a plan."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Clock, start
from torch import Tensor, nn

from planner import cli
from planner.cluster import Cluster, DeviceType, Link, Node
from planner.evaluate import evaluate
from planner.exporters.layout import Layout, PipelineLayout, StageLayout
from planner.job import Job
from planner.plans import Plan
from planner.profile import Cell, ModelProfile
from planner.schedule import Kind
from planner.search import plan as search
from runtime import Model, Trainer, given, links, measure
from runtime.chain import Layer, Meter, Stack, scan, shorten
from runtime.emulate import Network
from runtime.model import Stage

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import decoder  # noqa: E402

TINY = decoder.Config(
    vocab_size=32, hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, length=8,
)  # fmt: skip


def counted(model: Any, inputs: Any, targets: Any = None, **options: Any) -> ModelProfile:
    """A profile without times."""
    return measure.memory(model, inputs, targets, **{"copies": 2, **options})


def cell(profile: ModelProfile, kind: str, b: int = 1) -> Cell:
    return next(each for each in profile.cells if each.kind == kind and each.micro_batch == b)


def sum_of(out: Tensor, _: Any) -> Tensor:
    """A loss that keeps nothing."""
    return out.sum()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """The clock is that of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Kinds


def test_equal_layers_share_a_kind() -> None:
    """Embedding, equal blocks, head; of one class, layers of other shapes are another kind."""
    profile = counted(decoder.decoder(TINY), decoder.counting(TINY))
    assert profile.layers == ("embedding", *["block"] * 3, "head")
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6), nn.Linear(6, 3)]
    profile = counted(layers, torch.rand(2, 4))
    # the first takes data, to which no gradient flows; the last runs with the loss
    assert profile.layers == ("linear", "tanh", "linear-2", "tanh-2", "linear-3", "linear-4")


class Window(nn.Module):
    """Equal parameters; what it does depends on a plain number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out, self.width = nn.Linear(4, 4), width

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) if self.width == 0 else self.out(x.cumsum(-1))


def test_layers_of_equal_parameters_that_compute_something_else_are_another_kind() -> None:
    """Windows 1 and 2 do the same operations, window 0 fewer."""
    layers = [nn.Linear(4, 4), Window(0), Window(1), Window(2), Window(0), nn.Linear(4, 4)]
    assert counted(layers, torch.rand(1, 4)).layers[1:5] == ("window", "window-2", "window-2", "window")


NO_LAYER = Layer(title="", kind="", parameters=0, trained=0, num_tensors=0, tied=0, dtype=None, leaves="")


def chain(text: str) -> list[Layer]:
    """Layers ``aBb``: a kind per letter; lower case returns what it takes, upper case changes to its own shape."""
    found, shape = [], ""
    for letter in text:
        shape = letter if letter.isupper() else shape
        found.append(replace(NO_LAYER, kind=letter, leaves=shape))
    return found


@pytest.mark.parametrize(
    ("text", "copies", "kept"),
    [
        ("Eaaaaaah", 2, "Eaah"),
        ("Eaaaaaah", 9, "Eaaaaaah"),
        ("Eabababab", 2, "Eabab"),
        ("EUDUDUDUDH", 1, "EUDH"),  # up and down: only pairs of them can be left out
        ("h", 3, "h"),
    ],
)
def test_a_stack_has_few_layers_of_every_kind_and_is_a_chain(text: str, copies: int, kept: str) -> None:
    """Runs of layers that return the shape they take are left out once there are enough of their kinds."""
    assert "".join(text[l] for l in shorten(chain(text), copies)) == kept


# Bytes


@pytest.mark.parametrize("b", [1, 3])
def test_kept_bytes_of_a_linear_and_gelu_stack(b: int) -> None:
    """Counted by hand, exactly."""

    # Of a layer Linear(d, 4 d), GELU, Linear(4 d, d) backward needs the inputs of all three: d + 4 d + 4 d floats of
    # each of t tokens. No layer keeps its own output, so each keeps all its input. d = 6, t = 5: 9 x 6 x 5 x 4 = 1080.
    def layer(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))

    model = Model(num_layers=4, layer=layer, loss=sum_of)
    profile = counted(model, torch.rand(2, 5, 6), torch.zeros(2), micro_batches=(b,))
    assert {each.activation_bytes for each in profile.cells} == {1080 * b}
    assert profile.kinds[0].output_bytes == 6 * 5 * 4 and profile.kinds[-1].output_bytes == 0
    assert all(kind.logits_bytes == 0 and kind.parameters == 6 * 24 + 24 + 24 * 6 + 6 for kind in profile.kinds)


def test_bytes_that_two_layers_keep_count_once() -> None:
    """A Tanh keeps what it returns, which the Linear behind it takes: together two tensors, not three."""
    # Linear(6, 6), Tanh as one layer: keeps its input (24 bytes per sample) and the output of Tanh (24). The input of
    # every layer but the first is the output of the one before, kept already.
    model = Model(num_layers=4, layer=lambda _: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), loss=sum_of)
    profile = counted(model, torch.rand(2, 6), torch.zeros(2))
    assert profile.layers == ("sequential", "sequential-2", "sequential-2", "sequential-3")
    assert [each.activation_bytes for each in profile.cells] == [48, 24, 24]


def test_kept_bytes_of_a_decoder_block() -> None:
    """Counted by hand, exactly; and with the kept bytes of the loss apart."""
    # t = 64 tokens of d = 128, 2 of 4 heads' keys and values g = 64, f = 352 inside; 4 bytes an element.
    # A norm keeps x, 1 / rms (one number a token), and x / rms; the projections behind it keep what it returns.
    # Attention keeps rotated q (d), k and v (g each), what it returns (d), and a log-sum-exp for each of 4 heads.
    # The MLP keeps gate(x), its silu, up(x), and the product of the two (f each).
    # Together t (2 (3 d + 1) + 2 d + 2 g + 4 + 4 f) 4 = 656,896.
    config = decoder.Config(num_hidden_layers=3)
    profile = counted(decoder.decoder(config), decoder.counting(config), micro_batches=(1, 2))
    assert cell(profile, "block").activation_bytes == 656_896
    assert cell(profile, "block", 2).activation_bytes == 2 * 656_896
    # The loss keeps log-probabilities (512 fp32), targets (8 bytes) and, once, the number of tokens (4 bytes).
    head = next(kind for kind in profile.kinds if kind.name == "head")
    assert head.logits_bytes == 64 * (512 * 4 + 8) + 2  # 4 bytes over 2 samples, the smallest share of any size
    # The head keeps a norm and what it returns; what is left of the 4 bytes stands here.
    assert cell(profile, "head").activation_bytes == 64 * (3 * 128 + 1) * 4 + 2
    assert cell(profile, "head", 2).activation_bytes == 2 * 64 * (3 * 128 + 1) * 4


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_kept_bytes_are_what_is_allocated_after_a_forward_pass(padded: bool) -> None:
    """An oracle that looks at storages alone: every byte that is left belongs to some layer, or to the loss."""
    config = replace(TINY, padded=padded)
    model, batch = decoder.decoder(config), decoder.counting(config)
    profile = counted(model, batch, micro_batches=(2,))
    stage = Stage(model, (0, model.num_layers))
    inputs, targets = batch(0, range(2))
    with Meter() as meter:
        loss = model.loss(stage(*(inputs if padded else (inputs,))), targets)
        allocated = meter.live - loss.untyped_storage().nbytes()
    kept = sum(cell(profile, kind, 2).activation_bytes for kind in profile.layers) + 2 * profile.kinds[-1].logits_bytes
    tokens = 2 * TINY.length
    assert kept - allocated == 8 * tokens + 8 * tokens  # tokens and targets were there before


@pytest.mark.parametrize(("dtype", "padded"), [(None, False), (torch.bfloat16, True)], ids=["fp32", "bf16 padded tied"])
def test_fake_tensors_tell_the_bytes_of_real_ones(dtype: torch.dtype | None, padded: bool) -> None:
    """Kinds, kept bytes, logits and workspace are equal, whether anything runs or not."""
    config = replace(TINY, padded=padded, tied=padded)
    model, batch = decoder.decoder(config), decoder.counting(config)
    options: dict[str, Any] = {"micro_batches": (1, 2), "dtype": dtype, "copies": 2}  # of three blocks
    fake, real = counted(model, batch, **options), measure.profile(model, batch, runs=1, warm_up=0, **options)
    assert fake.kinds == real.kinds and fake.layers == real.layers
    for a, b in zip(fake.cells, real.cells, strict=True):
        assert (a.label, a.activation_bytes, a.workspace_bytes) == (b.label, b.activation_bytes, b.workspace_bytes)
        assert b.forward_s > 0 and b.backward_s > 0 and b.update_s > 0
    assert real.conditions.dtype == ("bf16" if dtype else "fp32") and real.conditions.sequence_length == TINY.length


def test_workspace_of_a_linear_layer() -> None:
    """By hand: gradients of output and weight while the weight's is added, which is more than at any other time."""
    # Linear(8, 8) without bias on t = 2 tokens, fp32. Backward: the gradient that arrives (64 bytes), the weight's
    # (256), and then the input's (64): 384. Forward: the output (64).
    model = Model(num_layers=3, layer=lambda _: nn.Linear(8, 8, bias=False), loss=sum_of)
    profile = counted(model, torch.rand(1, 2, 8), torch.zeros(1), copies=3)
    assert cell(profile, "linear-2").workspace_bytes == 64 + 256 + 64
    assert cell(profile, "linear").workspace_bytes == 64 + 256  # data gets no gradient


def test_no_memory_is_needed_to_count_bytes() -> None:
    """Blocks of 45 billion parameters."""
    config = replace(TINY, hidden_size=65_536, intermediate_size=180_224, num_attention_heads=512)
    profile = counted(decoder.decoder(config), decoder.counting(config), dtype=torch.bfloat16)
    assert profile.kinds[1].parameters > 4.4e10
    assert all(each.extrapolated for each in profile.cells) and "not measured" in profile.warnings[0]


def test_sizes_of_what_is_trained_tied_and_handed_on() -> None:
    """Adapters beside frozen weights, a tied head, a mask that travels beside the activations."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[0].requires_grad_(False)
    layers[2].weight.requires_grad_(False)
    profile = counted(layers, torch.rand(2, 4))
    first, second, third, _ = profile.kinds
    frozen = cell(profile, first.name)
    assert not first.trainable and frozen.backward_s == frozen.activation_bytes == 0
    assert (second.trained, second.num_tensors) == (20, 2)
    assert (third.trainable_parameters, third.num_tensors) == (4, 1)
    config = replace(TINY, tied=True, padded=True)
    profile = counted(decoder.decoder(config), decoder.counting(config))
    assert (profile.kinds[-1].tied_to, profile.kinds[-1].tied_parameters) == ("embedding", 32 * 16)
    assert profile.kinds[1].output_bytes == 8 * 16 * 4 + 8  # and one truth value per token
    shared = [nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)]
    shared[2].weight = shared[0].weight
    profile = counted(shared, torch.zeros(1, 3, dtype=torch.int64))
    assert profile.kinds[-1].tied_to == "embedding" and profile.parameters == 20 + 20


class FirstUse(torch.autograd.Function):
    """As libraries do: takes a workspace of 64 KiB at its first backward pass, and holds it."""

    workspace: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if FirstUse.workspace is None:
            FirstUse.workspace = torch.ones(1 << 14)
        return gradient.clone()


class Library(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(FirstUse.apply(x))


def test_what_a_library_takes_at_its_first_call_is_no_workspace_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one pass goes before those that are counted; fake tensors and a CPU need none."""
    monkeypatch.setattr(measure, "_CudaMeter", lambda device: Meter())  # what a GPU's allocator would say
    model = Model(num_layers=2, layer=lambda l: nn.Linear(4, 4) if l == 0 else Library(), loss=sum_of)
    data = given.batches(torch.rand(1, 4), torch.zeros(1))(1)
    found = {}
    for device in ("cpu", "cuda"):
        FirstUse.workspace = None
        stack = Stack(model, scan(model, data, None, device="cpu"), 1)
        FirstUse.workspace = None
        found[device] = measure.count(stack, data, torch.device(device))
        # two micro-batches in flight to see what is kept, one pass for the workspace
        assert stack.layers[1].calls == 3 + (device == "cuda")
    gpu, cpu = found["cuda"][1], found["cpu"][1]
    assert cpu.workspace >= 1 << 16 and gpu.workspace < 1 << 10
    assert (gpu.kept, gpu.handed_on) == (cpu.kept, cpu.handed_on)


# Seconds


def test_figures_of_runs_and_their_spread() -> None:
    """Of 1, 1.1, 1.2 and 9 the least is 1, and half lie within 15 % of it; what hardly counts is not warned of."""
    least = measure._Statistic("min", 4)
    assert least([1.2, 1.0, 9.0, 1.1], "block") == 1.0
    assert least([0.001, 0.002, 0.003, 0.004], "small") == 0.001
    assert "block" in least.words and "15 %" in least.words and not least.warnings
    middle = measure._Statistic("median", 3)
    assert middle([1.0, 3.0, 2.0], "block") == 2.0
    assert middle.warnings == (
        "times vary: half of the runs of block are more than 50 % off the figure; measure on an idle machine, or with"
        " more runs",
    )


def run(rank: int, plan: Plan, model: Model, batch: decoder.Batch, steps: int) -> list[tuple[Kind, float]]:
    """Seconds of this rank's actions, first step left out; of processor time, as the profile's are."""
    time.perf_counter = time.thread_time
    found = []
    with Trainer(plan, model, timeout_s=20.0) as trainer:
        trainer.tracing = True
        for step in range(steps):
            inputs, targets = batch(step, trainer.samples)
            trainer.step(inputs if trainer.is_first else None, targets if trainer.is_last else None)
            found += [(each.action.kind, each.end_s - each.start_s) for each in trainer.trace if step]
    return found


def host(devices: int) -> Cluster:
    return Cluster(
        name="host",
        device_types=(DeviceType(name="cpu", memory_bytes=1 << 30),),
        nodes=(Node(name="host", devices=("cpu",) * devices, link=Link(alpha_s=2e-4, bytes_per_s=1e9)),),
    )


JOB = Job(global_batch=8, precision="fp32", recompute=False, context_bytes=0)


def test_a_plan_of_a_measured_profile_runs_as_predicted() -> None:
    """Stages of 2, 2 and 4 layers on three ranks: each pass takes about what the profile says, and in its order.

    In processor time of one thread, which waiting and other work on the machine do not lengthen.
    """
    config = decoder.Config(hidden_size=192, intermediate_size=512, num_hidden_layers=6, length=96)
    model, batch = decoder.decoder(config), decoder.counting(config)
    profile = measure.profile(model, batch, micro_batches=(2,), runs=8, device_type="cpu")
    cuts = ((0, 2), (2, 4), (4, 8))
    stages = tuple(StageLayout(layers=layers, devices=(n,)) for n, layers in enumerate(cuts))
    shape = PipelineLayout(stages=stages, micro_batch=2, num_micro_batches=4)
    plan = evaluate(profile, host(3), Layout(pipelines=(shape,)), JOB)
    assert profile.conditions.timer == "time.thread_time, minimum of 8 runs"
    ranks = start(3, run, plan, model, batch, 4)
    for kind in (Kind.F, Kind.B):
        measured = [min(seconds for each, seconds in rank if each == kind) for rank in ranks]
        predicted = [stage.forward_s if kind == Kind.F else stage.backward_s for stage in plan.pipelines[0].stages]
        assert measured[0] < measured[1] < measured[2]  # 1 block, 2 blocks, 3 blocks and the head
        for a, b in zip(measured, predicted, strict=True):
            assert 0.4 < a / b < 2.5  # caches and frequency are shared with other work


def test_a_measured_profile_is_planned_for() -> None:
    """The search takes it as it is, with micro-batch sizes measured and the tied weights said."""
    config = replace(TINY, tied=True)
    profile = measure.profile(
        decoder.decoder(config), decoder.counting(config), micro_batches=(1, 2), runs=2, warm_up=0, device_type="cpu"
    )
    found = search(profile, host(2), JOB)
    assert not found.problems(profile, host(2), JOB)


class Reads(nn.Module):
    """Looks at values, which fake tensors have not."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * (2.0 if x.sum().item() > 0 else 3.0)


def test_layers_that_read_values_are_measured_by_running_them() -> None:
    """And refused where nothing shall run."""
    layers = [nn.Linear(4, 4), Reads(), Reads(), nn.Linear(4, 4)]
    profile = measure.profile(layers, torch.rand(2, 4), runs=1, warm_up=0)
    assert profile.layers == ("linear", "reads", "reads", "linear-2")
    assert "fake tensors would not do" in profile.conditions.notes[0]
    with pytest.raises(ValueError, match=r"layer 1 \(Reads\): does not take \[1, 4\] float32: "):
        counted(layers, torch.rand(2, 4))


def shares(rank: int, config: decoder.Config) -> ModelProfile:
    from torch.distributed.device_mesh import DeviceMesh

    return measure.profile(
        decoder.decoder(config), decoder.counting(config), runs=1, warm_up=0, copies=2, device_type="cpu",
        mesh=DeviceMesh("cpu", [0, 1]),
    )  # fmt: skip


def test_a_tp_group_measures_its_shards() -> None:
    """Two ranks: both have one profile, of half a block's matrices each; it merges with that of one device."""
    config = replace(TINY, num_key_value_heads=2)
    first, second = start(2, shares, config)
    assert first == second
    matrices, norms = 4 * 16 * 16 + 3 * 16 * 40, 2 * 16
    assert first.kinds[1].shard_parameters == ((2, matrices // 2 + norms),)
    alone = measure.profile(
        decoder.decoder(config), decoder.counting(config), runs=1, warm_up=0, copies=2, device_type="cpu"
    )
    assert cell(first, "block").activation_bytes < cell(alone, "block").activation_bytes
    merged = measure.merge([alone, first])
    assert merged.degrees("cpu") == (1, 2) and merged.kinds[1].shard(2) == matrices // 2 + norms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; its twin on a CPU is the run as predicted, above")
def test_a_gpu_is_measured() -> None:
    """Times of all kinds; what is kept differs from a CPU's count by what its attention kernel keeps."""
    config = decoder.Config(hidden_size=1024, intermediate_size=2816, num_attention_heads=16, length=512)
    model, batch = decoder.decoder(config), decoder.counting(config)
    options: dict[str, Any] = {"micro_batches": (1, 4), "dtype": torch.bfloat16, "device_type": "gpu"}
    real, fake = measure.profile(model, batch, device="cuda", **options), counted(model, batch, **options)
    assert "CUDA events, median" in real.conditions.timer
    for a, b in zip(real.cells, fake.cells, strict=True):
        assert a.forward_s > 0 and a.backward_s > 0 and a.update_s > 0
        assert a.activation_bytes == pytest.approx(b.activation_bytes, rel=0.1)
    assert cell(real, "block", 4).forward_s > cell(real, "block", 1).forward_s


# Merging


@pytest.fixture(scope="module")
def slow() -> ModelProfile:
    return counted(decoder.decoder(TINY), decoder.counting(TINY), device_type="slow", name="tiny")


def test_profiles_of_several_devices_become_one(slow: ModelProfile) -> None:
    """Cells of both, what is said of both, and no more."""
    fast = replace(slow, cells=tuple(replace(each, device_type="fast") for each in slow.cells))
    merged = measure.merge([slow, fast])
    assert merged.device_types == ("fast", "slow") and merged.cells == slow.cells + fast.cells
    assert merged.kinds == slow.kinds and merged.warnings == slow.warnings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p, "b: kind 'embedding' on 'slow', tp 1, micro-batch 1 is in a too"),
        (lambda p: replace(p, name="other"), "b: name: 'other', expected 'tiny' as in a"),
        (lambda p: replace(p, layers=p.layers[:-2] + p.layers[-1:]), "b: layers: 4, expected 5 as in a"),
        (
            lambda p: replace(p, kinds=(replace(p.kinds[0], parameters=9), *p.kinds[1:])),
            "b: kinds: parameters of 'embedding': 9, expected 512 as in a",
        ),
        (
            lambda p: replace(p, conditions=replace(p.conditions, dtype="bf16")),
            "b: conditions.dtype: 'bf16', expected 'fp32' as in a",
        ),
    ],
)
def test_profiles_that_do_not_belong_together_are_refused(slow: ModelProfile, change: Any, message: str) -> None:
    """One error, which names the file, the key and both values."""
    with pytest.raises(ValueError) as error:
        measure.merge([slow, change(slow)], ["a", "b"])
    assert message in str(error.value)


# What is refused


class Dictionary(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"hidden": x}


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, None


X = torch.rand(2, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ([], X, "model: it has no layers"),
        (nn.Linear(4, 4), X, "model: of type Linear is no sequence of layers; expected an nn.Sequential, a list of"),
        (
            lambda l: nn.Linear(4, 4),
            X,
            "model: of type function is no sequence of layers; if it is a function that builds layer l, say how many"
            " layers there are: give the pair (function, number), or runtime.Model(num_layers=number, layer=function)",
        ),
        ((lambda l: nn.Linear(4, 4), X), X, "model: a pair of a function and a value of type Tensor; expected the"),
        ((lambda l: nn.Linear(4, 4), True), X, "model: a pair of a function and a value of type bool; expected the"),
        ((lambda l: nn.Linear(4, 4), 0), X, "model: it has no layers"),
        ((lambda l: 3, 2), X, "layer 0: the model builds a layer of type int, expected an nn.Module"),
        ([nn.Linear(4, 4), 3], X, "model: layer 1 is of type int, expected an nn.Module"),
        ([nn.Linear(4, 4), Dictionary()], X, "layer 1 (Dictionary): returns a value of type dict, expected a tensor"),
        ([nn.Linear(4, 4), Nothing()], X, "layer 1 (Nothing): returns a value a tuple of Tensor, NoneType"),
        ([nn.Linear(4, 4), nn.Linear(5, 4)], X, "layer 1 (Linear): does not take [1, 4] float32: RuntimeError: "),
        ([nn.Linear(4, 4).requires_grad_(False)], X, "model: nothing is trained"),
        ([nn.Linear(4, 4)], torch.rand(0, 4), "inputs: a tensor of shape [0, 4], expected samples"),
        ([nn.Linear(4, 4)], {"x": X}, "inputs: of type dict, expected a tensor or several"),
        ([nn.Linear(4, 4)], lambda step: X, "inputs: the function returns of type Tensor, expected a pair"),
        ([nn.Linear(4, 4)] * 3, X, "model: layers share 2 parameters ('weight' of layer 0, 'weight' of layer 1"),
        (Model(num_layers=1, layer=lambda l: None), X, "layer 0: the model builds a layer None"),  # type: ignore[arg-type]
        (Model(num_layers=1, layer=lambda l: nn.Linear(4, 4), loss=sum_of), X, "targets: missing"),
        (
            Model(num_layers=2, layer=lambda l: nn.Linear(4, 4), tied=((0, "weigth"), (1, "weight"))),
            X,
            "layer 0 (Linear): parameter 'weigth' of Model.tied is not among weight, bias; did you mean 'weight'?",
        ),
    ],
)
def test_what_is_no_chain_of_layers_is_refused(model: Any, inputs: Any, message: str) -> None:
    """One error: which layer, what it is, what it should be; whether it runs or not."""
    for call in (counted, measure.profile):
        with pytest.raises(ValueError) as error:
            call(model, inputs)
        assert message in str(error.value)


def test_settings_are_checked() -> None:
    """Sizes, runs and statistics that make no sense."""
    layers = [nn.Linear(4, 4)]
    for options, message in (
        ({"micro_batches": ()}, "micro_batches: \\[\\], expected whole numbers"),
        ({"runs": 0}, "runs: 0 is less than 1"),
        ({"warm_up": -1}, "warm_up: -1 is less than 0"),
        ({"statistic": "mean"}, "statistic: 'mean' is not among min, median"),
        ({"mesh": type("Mesh", (), {"size": lambda _: 2})()}, "tp: 2, and the model says no way to shard its layers"),
    ):
        with pytest.raises(ValueError, match=message):
            measure.profile(layers, X, **options)


# The command line


@pytest.fixture
def hpp(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cli, "GROUPS", tuple(dict.fromkeys((*cli.GROUPS, "measure"))))
    return lambda *arguments: cli.main(["measure", *map(str, arguments)])


def test_profiles_are_counted_and_merged_from_the_command_line(hpp: Any, tmp_path: Path, capsys: Any) -> None:
    """Two devices, one model, one profile."""
    task = f"{EXAMPLES / 'decoder.py'}:build_padded"
    for device in ("fast", "slow"):
        options = ("--memory-only", "--micro-batch", "1,2", "--device", device, "--copies", "1")
        assert hpp(task, *options, "-o", tmp_path / f"{device}.json") == 0
    assert hpp("--merge", tmp_path / "fast.json", tmp_path / "slow.json", "-o", tmp_path / "both.json") == 0
    profile = ModelProfile.load(tmp_path / "both.json")
    assert profile.name == "decoder:build_padded" and profile.device_types == ("fast", "slow")
    assert "block on slow" in capsys.readouterr().out


def test_a_file_of_ones_own_is_measured(hpp: Any, tmp_path: Path) -> None:
    """A function that returns layers, inputs and targets."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def layers():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(5, 4),"
        " torch.tensor([0, 1, 2, 0, 1])\n"
    )
    output = tmp_path / "mine.yaml"
    options = ("--runs", "2", "--on", "cpu", "--micro-batch", "2,7", "-o", output)
    assert hpp(f"{tmp_path / 'mine.py'}:layers", *options) == 0
    profile = ModelProfile.load(output)
    assert profile.layers == ("linear", "relu", "linear-2") and profile.micro_batches("cpu", 1) == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py:build"], "none.py: no such file; expected FILE.py:FUNCTION such as train.py:build"),
        (["{0}/bad.py:biuld"], "bad.py: function 'biuld' is not among build, fails, text; did you mean 'build'?"),
        (["{0}/bad.py:build"], "bad.py:build: returned a tuple of int, expected a model and"),
        (["{0}/bad.py:fails"], "bad.py:fails: RuntimeError: out of luck"),
        (["{0}/broken.py"], "broken.py: SyntaxError: "),
        (["{0}/bad.py:text"], "model: of type str is no sequence of layers"),
        ([], "measure: nothing given, expected exactly one of FILE:FUNCTION, --links, --merge"),
        (["--links", "--merge", "a.json"], "measure: --links and --merge given, expected exactly one"),
        (["--links"], "--links: expected torchrun"),
        (["{0}/bad.py:text", "--tp", "2"], "--tp: 2: expected torchrun"),
    ],
)
def test_bad_input_is_one_clear_error(
    hpp: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """Exit code 2 and one line that says what is wrong, where, and what would be right."""
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "bad.py").write_text(
        "from pathlib import Path\n"
        "def build():\n    return 1\n"
        "def fails():\n    raise RuntimeError('out of luck')\n"
        "def text():\n    return 'model', 2\n"
        "def _hidden(): ...\n"
    )
    assert hpp(*(each.format(tmp_path) for each in arguments), "-o", tmp_path / "out.json") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# Links


def line(alpha_s: float, bytes_per_s: float, noise: float = 0.0, burst: int = 0) -> dict[int, float]:
    """Times of a link whose first `burst` bytes take none."""
    draw = random.Random(7)
    return {n: (alpha_s + max(n - burst, 0) / bytes_per_s) * (1 + draw.uniform(-noise, noise)) for n in links.SIZES}


@pytest.mark.parametrize(("alpha_s", "bytes_per_s"), [(1e-5, 12.5e9), (2e-4, 1e9), (3e-3, 2e6)])
def test_alpha_and_beta_of_a_link_are_found(alpha_s: float, bytes_per_s: float) -> None:
    """Exactly without noise; within 5 % where times are 3 % off."""
    found = links.fit(line(alpha_s, bytes_per_s))
    assert (found.alpha_s, found.bytes_per_s) == pytest.approx((alpha_s, bytes_per_s), rel=1e-9)
    found = links.fit(line(alpha_s, bytes_per_s, noise=0.03))
    assert (found.alpha_s, found.bytes_per_s) == pytest.approx((alpha_s, bytes_per_s), rel=0.05)
    assert found.least_bytes == links.SIZES[0] and 0 < found.error < 0.07


def test_messages_that_pass_a_shaper_are_left_out() -> None:
    """A bucket of 16 kB at 6.25 MB/s: what fits it takes an alpha, and says nothing of the rate."""
    times = line(3e-4, 6.25e6, burst=16_384)
    for found, error in ((links.fit(times), 0.06), (links.fit(times, burst_bytes=1 << 18), 0.03)):
        assert found.least_bytes > 16_384
        assert found.bytes_per_s == pytest.approx(6.25e6, rel=error) and found.error < links.ERROR
    assert links.as_link(times).table is None


def test_a_link_without_a_line_is_a_table() -> None:
    """Bandwidth that falls by 30 beyond 1 MiB: the table returns the times it was made from."""
    times = {n: 1e-5 + n / (3e9 if n <= 1 << 20 else 1e8) for n in links.SIZES}
    link = links.as_link(times)
    assert link.table is not None
    for n, seconds in times.items():
        assert link.seconds(n) == pytest.approx(seconds)


def test_too_few_sizes_make_no_link() -> None:
    """Two points at least."""
    with pytest.raises(ValueError, match="times: of 1 message sizes of at least 20 bytes, expected 2 or more"):
        links.fit({10: 1.0, 30: 2.0}, burst_bytes=20)


@pytest.mark.parametrize(
    ("world", "sizes", "burst_bytes", "message"),
    [
        (1, links.SIZES, 0, "links: one process runs, expected two or more"),
        (2, (4096,), 0, r"sizes: \[4096\], expected two message sizes or more"),
        (2, links.SIZES, -5, "burst: -5 bytes, expected 0 to 4194304, the last message size but one"),
        (2, links.SIZES, 1 << 23, "burst: 8388608 bytes, expected 0 to 4194304"),
    ],
)
def test_what_cannot_be_measured_is_told_before(
    world: int, sizes: tuple[int, ...], burst_bytes: int, message: str
) -> None:
    """Before any message is sent, and before any process is started for it."""
    links.check(2, links.SIZES, 1 << 22)
    with pytest.raises(ValueError, match=message):
        links.check(world, sizes, burst_bytes)


def spread(factor: float, *pairs: tuple[int, int]) -> dict[links.Pairs, links.Times]:
    """Times of pairs, of which the last's are `factor` times as long."""
    base = line(1e-4, 1e9)
    return {(pair,): {n: t * (factor if pair == pairs[-1] else 1.0) for n, t in base.items()} for pair in pairs}


def hosts(*names: str) -> list[links.Host]:
    """Ranks on nodes ``a1``: of device type ``A`` on node 1."""
    return [links.Host(name=name, device_type=name[0].upper(), memory_bytes=10 + n) for n, name in enumerate(names)]


def test_links_that_are_alike_become_one_by_device_type() -> None:
    """Nodes of one device: links of 10 % difference are one link between types, of 100 % one per pair of nodes."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    alike = links.assemble("c", hosts("a1", "a2", "a3"), spread(1.1, *pairs), {})
    assert [each.between for each in alike.links] == [("A", "A")] and alike.device_types[0].memory_bytes == 10
    apart = links.assemble("c", hosts("a1", "a2", "a3"), spread(2.0, *pairs), {})
    assert [each.between for each in apart.links] == [("a1", "a2"), ("a1", "a3"), ("a2", "a3")]
    a, b, c = (apart.link(apart.devices[i], apart.devices[j]).seconds(1e6) for i, j in pairs)
    assert a == b == pytest.approx(c / 2)


def test_devices_of_a_node_that_are_joined_faster_form_groups() -> None:
    """Two pairs three times as fast as the rest of four devices: NVLink pairs, say."""
    base, fast = line(1e-4, 1e9), line(1e-4 / 3, 3e9)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    times: dict[links.Pairs, links.Times] = {(pair,): fast if pair in ((0, 1), (2, 3)) else base for pair in pairs}
    node = links.assemble("c", hosts("a1", "a1", "a1", "a1"), times, {}).nodes[0]
    assert node.groups == ((0, 1), (2, 3)) and node.link is not None and node.group_link is not None
    assert node.group_link.bytes_per_s == pytest.approx(3e9) and node.link.bytes_per_s == pytest.approx(1e9)
    node = links.assemble("c", hosts("a1", "a1", "a1"), spread(1.5, (0, 1), (0, 2), (1, 2)), {}).nodes[0]
    assert node.groups == () and node.group_link is None


def test_what_several_devices_get_at_once_stands_beside_what_one_gets() -> None:
    """Two nodes of two devices that share a port: half the rate each when both send."""
    one, both = line(1e-4, 1e9), line(1e-4, 5e8)
    inside = line(1e-5, 1e10)
    times: dict[links.Pairs, links.Times] = {
        ((0, 1),): inside, ((2, 3),): inside, ((0, 2),): one, ((0, 2), (1, 3)): both,
    }  # fmt: skip
    found = links.assemble("c", hosts("a1", "a1", "b1", "b1"), times, {})
    assert [(each.between, each.devices) for each in found.links] == [(("A", "B"), 1), (("A", "B"), 2)]
    a, b = found.devices[0], found.devices[2]
    assert found.link(a, b, 2).bandwidth(1e6) == pytest.approx(found.link(a, b).bandwidth(1e6) / 2)


class Wires:
    """A torch.distributed whose messages take alpha + n / beta seconds of a clock; the first of a size 50 ms more."""

    def __init__(self, clock: Clock, alpha_s: float, bytes_per_s: float) -> None:
        self.clock, self.alpha_s, self.bytes_per_s = clock, alpha_s, bytes_per_s
        self.sent: list[int] = []

    def get_rank(self) -> int:
        return 0

    def barrier(self) -> None:
        self.clock.sleep(3.0)  # nobody's time

    broadcast = staticmethod(lambda tensor, root: None)

    def send(self, message: Tensor, to: int) -> None:
        assert to == 1
        if message.dtype == torch.uint8:  # the others say whether to go on
            self.pass_(message)

    def recv(self, message: Tensor, source: int) -> None:
        assert source == 1
        self.clock.sleep(self.alpha_s + message.numel() / self.bytes_per_s)

    def all_reduce(self, message: Tensor) -> None:
        self.pass_(message)

    def pass_(self, message: Tensor) -> None:
        nbytes = message.numel() * message.element_size()
        self.clock.sleep(self.alpha_s + nbytes / self.bytes_per_s + (0.050 if nbytes not in self.sent else 0.0))
        self.sent.append(nbytes)


def test_times_of_messages_are_the_best_of_several_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round trip of a size does not count; half of the best other does; no size after one of 100 ms."""
    sizes = [1 << k for k in range(10, 20)]
    for bytes_per_s, last in ((1e9, 19), (2e6, 18), (1e5, 14)):
        # 256 KiB at 2 MB/s take 0.13 s, more than 0.1 s: the last. At 0.1 MB/s 16 KiB do, the fifth, and five are sent
        clock = Clock()
        wires = Wires(clock, 1e-3, bytes_per_s)
        monkeypatch.setattr(links, "time", clock)
        monkeypatch.setattr(links, "dist", wires)
        expected = {n: 1e-3 + n / bytes_per_s for n in sizes if n <= 1 << last}
        assert links.ping_pong(0, 1, torch.device("cpu"), sizes) == pytest.approx(expected)
        assert wires.sent == [n for n in expected for _ in range(links.REPEATS + 1)]
        wires.sent.clear()
        assert links.all_reduce(torch.device("cpu"), sizes) == pytest.approx(expected)
        assert wires.sent == [n for n in expected for _ in range(links.REPEATS + 1)]


def loopback(rank: int) -> Cluster:
    return links.cluster(
        device_type="fast" if rank < 2 else "slow", host="one" if rank < 2 else "two", sizes=(4096, 65536, 1 << 20)
    )


def test_links_over_loopback_are_measured() -> None:
    """Three ranks that say they are two nodes: all get one cluster, with a link wherever there are two devices."""
    found = start(3, loopback)
    assert found[0] == found[1] == found[2]
    first = found[0]
    assert [node.devices for node in first.nodes] == [("fast", "fast"), ("slow",)] and first.complete
    for link in (first.nodes[0].link, *(each.link for each in first.links)):
        assert link is not None and link.seconds(1 << 20) > 1e-6  # which nothing passes in less
    assert Cluster.from_dict(first.to_dict()) == first and "all-reduce over 3 ranks" in first.notes[1]


@pytest.mark.skipif(Network.refusal() is not None, reason=f"links cannot be shaped here: {Network.refusal()}")
def test_the_rate_of_a_shaped_link_is_measured() -> None:
    """Two ports of 50 and 25 MB/s in network namespaces: large messages get no more than the slower one's rate.

    Less, if other work on the machine holds them up. A line may miss by `ERROR` what was measured, a burst passes.
    """
    with Network([50e6, 25e6]) as network:
        found = start(2, shaped, network=network)[0]
    assert found.links[0].link.seconds(1 << 21) >= (1 - links.ERROR) * ((1 << 21) - 65_536) / 25e6


def shaped(rank: int) -> Cluster:
    return links.cluster(host=f"node{rank}", sizes=(4096, 1 << 18, 1 << 20, 1 << 21), burst_bytes=1 << 17)


# Given


def test_micro_batches_of_any_size() -> None:
    """Rows come round again; functions of a step, or of a step and samples, are called for as many as are needed."""
    x = torch.arange(6).reshape(3, 2)
    data = given.batches((x, x + 1), x[:, 0])(5)
    assert data.inputs[0][:, 0].tolist() == [0, 2, 4, 0, 2] and data.targets.tolist() == [0, 2, 4, 0, 2]
    assert given.batches(lambda step, samples: (x[list(samples)], None))(2).inputs[0].tolist() == [[0, 1], [2, 3]]
    assert len(given.batches(lambda step: (x, x))(4).inputs[0]) == 4


def test_a_model_may_be_given_in_several_forms(hpp: Any, tmp_path: Path) -> None:
    """A sequence, a list, a function of the layer and how many there are, the same in a `Model`: one profile."""

    def layer(l: int) -> nn.Module:
        return nn.Linear(4, 6) if l == 0 else nn.Linear(6, 6)

    layers = [layer(l) for l in range(4)]
    forms = (nn.Sequential(*layers), nn.ModuleList(layers), layers, tuple(layers), (layer, 4))
    expected = counted(Model(num_layers=4, layer=layer), X)
    assert expected.layers == ("linear", "linear-2", "linear-2", "linear-3")
    assert all(counted(form, X) == expected for form in forms)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def layer(l):\n    return nn.Linear(4, 6) if l == 0 else nn.Linear(6, 6)\n"
        "def build():\n    return (layer, 4), torch.rand(2, 4)\n"
    )
    assert hpp(f"{tmp_path / 'mine.py'}:build", "--memory-only", "-o", tmp_path / "mine.json") == 0
    assert ModelProfile.load(tmp_path / "mine.json").kinds == expected.kinds


def test_a_stack_trains_as_the_model_does() -> None:
    """Going through it layer by layer gives the gradients of the whole."""
    model, batch = decoder.decoder(TINY), decoder.counting(TINY)
    data = given.batches(batch)(2)
    layers = scan(model, data, None)
    stack = Stack(model, layers, 99)
    stack.play(data, measure._Used(stack, Meter()))
    stage = Stage(model, (0, model.num_layers))
    model.loss(stage(*data.inputs), data.targets).backward()
    for l, layer in enumerate(stack.layers):
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, stage.layers[str(l)].get_parameter(name).grad), name  # type: ignore[arg-type]
