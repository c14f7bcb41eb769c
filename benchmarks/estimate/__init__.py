"""Layers that others measured, beside the estimate of the same layer of the same model on the same device."""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import data_folder
from planner import architecture, catalogue, estimate
from planner.architecture import Layer
from planner.estimate import EFFICIENCY, Efficiency, Setting

FITTED = ("tensor", "vector", "bandwidth", "launch_s", "score_passes_forward", "score_passes_backward")
Half = Literal["fitted", "held out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as it was measured: a config that gives exactly its parameters, and how it ran.

    `head` is False where the measured head has no vocabulary product, so that it cannot be compared.
    """

    config: dict[str, Any]
    sequence_length: int
    attention: Literal["eager", "fused-softmax"]
    head: bool = True


def _opt(hidden: int, num_layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2046,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    }


def _gpt(hidden: int, num_layers: int, heads: int, vocabulary: int, **others: Any) -> dict[str, Any]:
    sizes = {"n_embd": hidden, "n_layer": num_layers, "n_head": heads, "n_positions": 2048, "vocab_size": vocabulary}
    return {"model_type": "gpt2", **sizes, **others}


# Sailor's models are not those of the same name in every detail (its Llama has no grouped queries, an MLP of 16384 and
# biases): the configs here give the parameters that it lists for each layer.
MODELS = {
    "OPT-350": Model(config=_opt(1024, 24, 16), sequence_length=2048, attention="eager"),
    "OPT-30": Model(config=_opt(7168, 48, 56), sequence_length=2048, attention="eager"),
    "GPT-Neo-2.7": Model(
        config=_gpt(2560, 32, 20, 50304, attn_pdrop=0.0), sequence_length=2048, attention="eager", head=False
    ),
    "LLAMA-3-8": Model(
        config={
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50304,
            "attention_bias": True,
            "mlp_bias": True,
        },
        sequence_length=8192,
        attention="eager",
    ),
} | {
    f"GPT-{size}": Model(config=_gpt(hidden, depth, heads, 51200), sequence_length=2048, attention="fused-softmax")
    for size, hidden, depth, heads in (
        ("350M", 1024, 24, 16),
        ("1.3B", 2048, 24, 32),
        ("2.6B", 2560, 32, 32),
        ("6.7B", 4096, 32, 32),
        ("13B", 5120, 40, 40),
    )
}
DEVICES = {
    "A100-40": "A100-40-SXM",
    "A100-80": "A100-80-SXM",
    "V100-16": "V100-16-SXM",
    "V100-32": "V100-32-SXM",
    "GH-96": "GH200-96",
    "RTX-2080": "RTX-2080-Ti",  # 11 GB
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
}


@functools.cache
def layers(model: str) -> tuple[Layer, ...]:
    """The layers of a model."""
    return architecture.read(MODELS[model].config).layers


def precision(model: str, device: str) -> str:
    """fp16 for Aceso. Sailor does not say whether TF32 was on; the rate of a block forward does, where it is above the
    fp32 peak of the device: A100 with OPT-350 (34 to 39 of 19.5 TFLOP/s) and GPT-Neo (74), GH200 (79 to 154 of 67).

    A100 stays below with OPT-30 (18.2) and, with tp, Llama (13): off. V100 and Turing have no TF32. RTX 3090 cannot be
    told, both its peaks are equal.
    """
    if MODELS[model].attention == "fused-softmax":
        return "fp16"
    on = device in ("GH-96", "RTX-3090") or (device.startswith("A100") and model in ("OPT-350", "GPT-Neo-2.7"))
    return "tf32" if on else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A layer that was measured: seconds of a micro-batch, bytes kept per rank (logits apart)."""

    source: str
    model: str
    device: str
    tp: int
    micro_batch: int
    kind: str
    forward_s: float
    backward_s: float
    activation_bytes: float

    @property
    def pair(self) -> tuple[str, str]:
        return self.model, self.device

    @property
    def setting(self) -> Setting:
        model = MODELS[self.model]
        return Setting(
            dtype=precision(self.model, self.device),
            attention=model.attention,
            tp=self.tp,
            micro_batch=self.micro_batch,
            sequence_length=model.sequence_length,
        )

    def estimated(self, efficiency: Efficiency = EFFICIENCY) -> tuple[float, float, int]:
        """Forward seconds, backward seconds and activation bytes of the estimate."""
        setting = self.setting
        layer = next(layer for layer in layers(self.model) if layer.kind == self.kind)
        device = catalogue.device(DEVICES[self.device])
        forward = estimate.seconds(estimate.forward(layer, setting, efficiency), device, setting.dtype, efficiency)
        backward = estimate.seconds(estimate.backward(layer, setting, efficiency), device, setting.dtype, efficiency)
        return forward, backward, estimate.activation_bytes(layer, setting)


# The measurements ---------------------------------------------------------------------------------------------------


def measurements() -> list[Measured]:
    """All layers of the models above, at every tp degree and micro-batch size, on every device."""
    return [*_sailor(data_folder() / "sailor"), *_aceso(data_folder() / "aceso" / "profiled-time-eurosys")]


def _sailor(folder: Path) -> Iterable[Measured]:
    from planner.importers import sailor

    for profile in sailor.profiles(folder):
        for cell in profile.cells:
            if profile.name in MODELS and cell.kind in ("embedding", "block", "head"):
                yield Measured(
                    source="Sailor",
                    model=profile.name,
                    device=cell.device_type,
                    tp=cell.tp,
                    micro_batch=cell.micro_batch,
                    kind=cell.kind,
                    forward_s=cell.forward_s,
                    backward_s=cell.backward_s,
                    activation_bytes=cell.activation_bytes,
                )


def _aceso(folder: Path) -> Iterable[Measured]:
    """Operators summed into layers, at tp 1; microseconds, MiB. Logits (fp16 and, in the loss, fp32) taken out."""
    for name in (name for name in MODELS if name.startswith("GPT-") and name != "GPT-Neo-2.7"):
        for path in sorted(folder.glob(f"gpt_{name[4:].replace('.', '_')}_mbs*_tp1_algo0.csv")):
            micro_batch = int(path.name.split("_mbs")[1].split("_")[0])
            with path.open(encoding="utf-8") as file:
                operators = list(csv.DictReader(file))
            for kind, starts in (("embedding", "encoder-emb"), ("block", "enc-"), ("head", ("final", "gpt-post"))):
                rows = [row for row in operators if row["op_name"].startswith(starts)]
                forward, backward, kept = (
                    math.fsum(float(row[key]) for row in rows)
                    for key in ("forward-compute", "backward-compute", "activations")
                )
                logits = 4 * micro_batch * 2048 * 51200 if kind == "head" else 0
                yield Measured(
                    source="Aceso",
                    model=name,
                    device="V100-32",
                    tp=1,
                    micro_batch=micro_batch,
                    kind=kind,
                    forward_s=forward / 1e6,
                    backward_s=backward / 1e6,
                    activation_bytes=kept * 2**20 - logits,
                )


def comparable(rows: Iterable[Measured]) -> list[Measured]:
    """Rows without tp whose layer does the same in both."""
    return [row for row in rows if row.tp == 1 and (row.kind != "head" or MODELS[row.model].head)]


def halves(rows: Iterable[Measured]) -> dict[tuple[str, str], Half]:
    """Pairs of model and device in alphabetical order, every second one, from the second, fitted to."""
    pairs = sorted({row.pair for row in rows})
    return {pair: "fitted" if i % 2 else "held out" for i, pair in enumerate(pairs)}


# Errors -------------------------------------------------------------------------------------------------------------


def errors(rows: Iterable[Measured], efficiency: Efficiency = EFFICIENCY, factor: float = 1.0) -> list[float]:
    """Estimate / measurement - 1 of every forward and backward time; what was not measured (0) is left out."""
    out = []
    for row in rows:
        forward, backward, _ = row.estimated(efficiency)
        pairs = ((forward, row.forward_s), (backward, row.backward_s))
        out += [factor * guess / truth - 1 for guess, truth in pairs if truth]
    return out


def fit(rows: Sequence[Measured], start: Efficiency = EFFICIENCY) -> Efficiency:
    """The shares that make the mean absolute logarithmic error least; shares of a peak stay below 1.

    Steps along one share at a time, by ever smaller factors: deterministic, and good to 1 %.
    """

    def cost(efficiency: Efficiency) -> float:
        return statistics.fmean(abs(math.log1p(error)) for error in errors(rows, efficiency))

    best, least, step = start, cost(start), 0.2
    while step > 0.004:
        moved = False
        for name in FITTED:
            for factor in (math.exp(step), math.exp(-step)):
                value = getattr(best, name) * factor
                if name in ("tensor", "vector", "bandwidth") and value > 1:
                    continue
                tried = replace(best, **{name: value})
                if (now := cost(tried)) < least - 1e-9:
                    best, least, moved = tried, now, True
        step = step if moved else step / 2
    return best


def steps(
    rows: Iterable[Measured], efficiency: Efficiency = EFFICIENCY
) -> dict[tuple[str, str, int], tuple[float, float]]:
    """(model, device, micro-batch) -> estimated and measured seconds of one forward and backward pass of all layers."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in rows:
        number = sum(layer.kind == row.kind for layer in layers(row.model))
        forward, backward, _ = row.estimated(efficiency)
        pair = number * (forward + backward * bool(row.backward_s)), number * (row.forward_s + row.backward_s)
        found.setdefault((row.model, row.device, row.micro_batch), []).append(pair)
    return {key: (sum(a for a, _ in pairs), sum(b for _, b in pairs)) for key, pairs in found.items()}


def mean(values: Iterable[float], of: Callable[[float], float] = lambda value: value) -> float | None:
    """Mean of `of` over the values; None for none."""
    found = [of(value) for value in values]
    return statistics.fmean(found) if found else None


def shares(efficiency: Efficiency) -> dict[str, float]:
    """The fitted shares by name."""
    return {each.name: getattr(efficiency, each.name) for each in fields(efficiency) if each.name in FITTED}
