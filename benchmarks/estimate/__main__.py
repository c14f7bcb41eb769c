"""How far estimated profiles are off measured ones: layer by layer and step by step, as they are and calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks import common, estimate
from benchmarks.common import data_folder, figure, percent, table
from benchmarks.estimate import Half, Measured, errors, mean, shares, steps
from planner import cost
from planner.estimate import EFFICIENCY, Run, profile, tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model on a device: mean signed errors over its micro-batch sizes, largest absolute error of a step."""

    model: str
    device: str
    precision: str
    half: Half
    micro_batches: tuple[int, ...]
    block_forward: float | None
    block_backward: float | None
    head_forward: float | None
    head_backward: float | None
    activation: float | None
    step: float | None
    worst_step: float | None
    factor: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.parser("estimate", __doc__)
    parser.add_argument("--no-fit", action="store_true", help="do not fit the shares anew")
    parser.set_defaults(runs=1)
    options = parser.parse_args(arguments)
    load_before = common.load()
    measured = estimate.measurements()
    alone = estimate.comparable(measured)
    halves = estimate.halves(alone)
    names = common.chosen([" ".join(pair) for pair in halves], options.cases)
    rows = [_row(pair, [each for each in alone if each.pair == pair], halves[pair]) for pair in halves]
    rows = [row for row in rows if f"{row.model} {row.device}" in names]
    timed = [each for each in alone if each.kind != "embedding"]
    fits = [] if options.no_fit else _fits(timed, halves)
    calibrations, parallel, runs = _calibrated(alone, halves), _parallel(measured), _runs()
    text = _text(rows, timed, halves, calibrations, parallel, runs, fits)
    where = common.environment(load_before)
    common.finish(
        "estimate",
        options,
        where,
        text,
        results=[asdict(row) for row in rows],
        calibrations=calibrations,
        tensor_parallel=parallel,
        runs=runs,
        fits=fits,
    )
    return 0


def _row(pair: tuple[str, str], rows: Sequence[Measured], half: Half) -> Row:
    def part(kind: str, index: int) -> float | None:
        ratios = [(row.estimated()[index], (row.forward_s, row.backward_s, row.activation_bytes)[index]) for row in rows
                  if row.kind == kind]
        return mean(guess / truth - 1 for guess, truth in ratios if truth)

    of_step = [guess / truth - 1 for guess, truth in steps(rows).values()]
    return Row(
        model=pair[0],
        device=pair[1],
        precision=estimate.precision(*pair),
        half=half,
        micro_batches=tuple(sorted({row.micro_batch for row in rows})),
        block_forward=part("block", 0),
        block_backward=part("block", 1),
        head_forward=part("head", 0),
        head_backward=part("head", 1),
        activation=part("block", 2),
        step=mean(of_step),
        worst_step=max(of_step, key=abs),
        factor=_factor(rows),
    )


def _factor(rows: Iterable[Measured]) -> float:
    """What the step of the largest micro-batch was measured at, over its estimate: the one number of a user."""
    found = steps(rows)
    guess, truth = found[max(found, key=lambda key: key[2])]
    return truth / guess


def _calibrated(rows: Sequence[Measured], halves: dict[tuple[str, str], Half]) -> list[dict[str, object]]:
    """Errors with factors taken from elsewhere, beside those of the same rows without a factor."""
    out: list[dict[str, object]] = []
    pairs = {pair: [row for row in rows if row.pair == pair] for pair in halves}
    factors = {pair: _factor(found) for pair, found in pairs.items()}

    def add(how: str, chosen: Iterable[tuple[tuple[str, str], float]], own: bool = False) -> None:
        times, plain, whole, rough = [], [], [], []
        for pair, factor in chosen:
            largest = max(row.micro_batch for row in pairs[pair])
            left = [row for row in pairs[pair] if not own or row.micro_batch < largest]
            timed = [row for row in left if row.kind != "embedding"]
            times += errors(timed, factor=factor)
            plain += errors(timed)
            whole += [factor * guess / truth - 1 for guess, truth in steps(left).values()]
            rough += [guess / truth - 1 for guess, truth in steps(left).values()]
        out.append(
            {"factor from": how, "times": len(times), "mean abs": mean(times, abs), "without": mean(plain, abs),
             "steps": len(whole), "step mean abs": mean(whole, abs), "step without": mean(rough, abs),
             "step worst": max(whole, key=abs), "step worst without": max(rough, key=abs)}
        )

    add("the same model and device, largest micro-batch", factors.items(), own=True)
    add("another model on the device", [(b, factors[a]) for a in pairs for b in pairs if a[1] == b[1] and a != b])
    add("the model on another device", [(b, factors[a]) for a in pairs for b in pairs if a[0] == b[0] and a != b])
    return out


def _parallel(rows: Sequence[Measured]) -> list[dict[str, object]]:
    """Blocks of Sailor with tp: the estimate plus two all-reduces each way over the links it measured in a node."""
    from planner.importers import sailor

    out: list[dict[str, object]] = []
    blocks = [row for row in rows if row.source == "Sailor" and row.kind == "block" and row.tp > 1]
    for device in sorted({row.device for row in blocks}):
        for tp in sorted({row.tp for row in blocks if row.device == device}):
            found = [row for row in blocks if (row.device, row.tp) == (device, tp)]
            nodes = sailor.cluster(data_folder() / "sailor", {device: tp}).nodes
            link = nodes[0].link
            if len(nodes) > 1 or link is None:  # across machines
                continue
            forward, backward, share = [], [], []
            for row in found:
                layer = next(each for each in estimate.layers(row.model) if each.kind == "block")
                nbytes = 2.0 * row.setting.tokens(layer) * layer.width * row.setting.element
                extra = float(cost.ring_all_reduce_s(nbytes, tp, [link]))
                guess = row.estimated()
                forward.append((guess[0] + extra) / row.forward_s - 1)
                backward.append((guess[1] + extra) / row.backward_s - 1)
                share.append(2 * extra / (guess[0] + guess[1] + 2 * extra))
            out.append(
                {"device": device, "tp": tp, "blocks": len(found), "forward": mean(forward), "backward": mean(backward),
                 "mean abs": mean([*forward, *backward], abs), "communication": mean(share)}
            )
    return out


# Whole training steps of others, in 16 bit, that no share was fitted to. Megatron-LM, tests/functional_tests,
# gpt3_7b_tp1_pp4_memory_speed: 8 devices, flash attention; OneFlow, DLPerf GPT, one V100, recompute.
_SEVEN = {  # layer norms, rotary positions, eight key-value heads, an MLP four times as wide
    "model_type": "starcoder2",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 131073,
    "tie_word_embeddings": False,
}
_MEGATRON = Run(stages=4, pipelines=2, micro_batch=1, num_micro_batches=4)


def _runs() -> list[dict[str, object]]:
    small = {"model_type": "gpt2", "n_positions": 2048, "vocab_size": 50304, "n_head": 16}
    cases = [
        ("Megatron-LM GPT 7B, pp 4, dp 2", device, _SEVEN, 8192, "bf16", "flash", _MEGATRON, seconds)
        for device, seconds in (("A100-80-SXM", 2.94236), ("H100-SXM", 1.15047), ("GB200", 0.78721))
    ] + [
        (f"OneFlow GPT {hidden} x {depth}, recompute", "V100-16-SXM",
         small | {"n_embd": hidden, "n_layer": depth, "n_head": heads}, 2048, "fp16", "fused-softmax",
         Run(micro_batch=batch, recompute=True), seconds)
        for hidden, depth, heads, batch, seconds in ((1536, 16, 16, 2, 0.40616), (768, 12, 12, 8, 0.52521))
    ]
    out: list[dict[str, object]] = []
    for name, device, config, sequence, dtype, attention, run, seconds in cases:
        guess = profile(
            config, [device], sequence_length=sequence, dtype=dtype, attention=attention,
            micro_batches=(run.micro_batch or 1,), tp=(1,),
        )
        samples = run.pipelines * run.num_micro_batches * (run.micro_batch or 1)
        estimated = samples * sequence / tokens_per_s(guess, run)
        out.append({"run": name, "device": device, "estimated s": estimated, "measured s": seconds,
                    "error": estimated / seconds - 1})
    return out


def _fits(rows: Sequence[Measured], halves: dict[tuple[str, str], Half]) -> list[dict[str, object]]:
    """The shares in use, and those fitted to each half, with their errors on both."""
    split = {half: [row for row in rows if halves[row.pair] == half] for half in ("fitted", "held out")}
    found = {"in use": EFFICIENCY} | {f"fitted to the {half} half": estimate.fit(split[half]) for half in split}
    return [
        {"shares": how, **shares(efficiency)}
        | {f"error, {half}": mean(errors(split[half], efficiency), abs) for half in split}
        for how, efficiency in found.items()
    ]


def _text(
    rows: Sequence[Row],
    timed: Sequence[Measured],
    halves: dict[tuple[str, str], Half],
    calibrations: Sequence[dict[str, object]],
    parallel: Sequence[dict[str, object]],
    runs: Sequence[dict[str, object]],
    fits: Sequence[dict[str, object]],
) -> str:
    parts = ["Estimate / measurement - 1, mean over the micro-batch sizes.", table([_line(row) for row in rows])]
    for half in ("fitted", "held out"):
        found = errors([row for row in timed if halves[row.pair] == half])
        parts.append(
            f"Forward and backward times of blocks and heads, {half} half: {len(found)}, off by"
            f" {percent(mean(found, abs))} on average (mean {percent(mean(found))})."
        )
    title = "Scaled by one measured step; `without`: the same rows unscaled."
    parts += [title, table([_shown(each) for each in calibrations])]
    title = "Blocks with tensor parallelism, all-reduces over the measured links:"
    parts += [title, table([_shown(each) for each in parallel])]
    parts += ["Whole steps that nothing was fitted to:", table([_shown(each) for each in runs])]
    if fits:
        parts += ["Shares of the peaks:", table([_shown(each) for each in fits])]
    return "\n\n".join(parts)


def _line(row: Row) -> dict[str, str]:
    sizes = row.micro_batches
    return {
        "model": row.model,
        "device": row.device,
        "precision": row.precision,
        "half": row.half,
        "micro-batch": str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}",
        "block forward": percent(row.block_forward),
        "block backward": percent(row.block_backward),
        "head forward": percent(row.head_forward),
        "head backward": percent(row.head_backward),
        "activations": percent(row.activation),
        "step": percent(row.step),
        "worst step": percent(row.worst_step),
        "factor": figure(row.factor),
    }


def _shown(row: dict[str, object]) -> dict[str, str]:
    """Whole numbers and words as they are, seconds and shares in digits, errors in per cent."""
    plain = ("estimated s", "measured s", *estimate.FITTED)

    def show(key: str, value: object) -> str:
        if key == "launch_s" and isinstance(value, float):
            return f"{1e6 * value:.1f} us"
        if isinstance(value, float):
            return figure(value) if key in plain else percent(value)
        return "-" if value is None else str(value)

    return {key: show(key, value) for key, value in row.items()}


if __name__ == "__main__":
    raise SystemExit(main())
