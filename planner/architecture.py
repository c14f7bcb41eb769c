"""What a Hugging Face ``config.json`` says of a model: its layers in order, and every matrix and vector in them.

A layer is a list of matrices and vectors. Parameters, what a tensor-parallel rank holds and the FLOP of a token all
follow from that one list, so the parameter count checks the rest: it equals the published count to the last digit.
A family of models is one short function from its config to its layers (``FAMILIES``); nothing is downloaded or run.

Left out of the count, as they are no parameters of the model that is trained: buffers (rotary tables, masks), the
multi-token-prediction layers of DeepSeek-V3, and scales of quantised checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from planner import files

T = TypeVar("T")
Part = Literal["vision", "projector", "embedding", "block", "head"]
PARTS: tuple[Part, ...] = ("vision", "projector", "embedding", "block", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix that multiplies every token, or several equal ones of which a token passes some.

    Parameters
    ----------
    name
        What it does; those of attention start with ``attention.``, those of the MLP with ``mlp.``.
    inputs, outputs, bias
        Shape, and whether `outputs` further parameters are added.
    split
        What tensor parallelism divides: ``column`` the outputs, ``row`` the inputs (then the bias is on every rank),
        ``none`` nothing.
    grain
        Width that stays together when divided: a head. With more ranks than heads, ranks share one.
    copies, used
        Number of such matrices (experts), and how many of them a token passes; 0 for a table that is only looked up.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    split: Literal["column", "row", "none"] = "column"
    grain: int = 1
    copies: int = 1
    used: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * (self.inputs + self.bias) * self.outputs

    def shape(self, tp: int) -> tuple[int, int]:
        """Inputs and outputs of the part that one of `tp` ranks holds."""
        if self.split == "column":
            return self.inputs, self._share(self.outputs, tp)
        return (self._share(self.inputs, tp) if self.split == "row" else self.inputs), self.outputs

    def shard(self, tp: int) -> int:
        """Parameters that one of `tp` ranks holds."""
        inputs, outputs = self.shape(tp)
        return self.copies * (inputs + self.bias) * outputs

    def _share(self, width: int, tp: int) -> int:
        return -(-(width // self.grain) // tp) * self.grain


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What attention does between its matrices.

    Parameters
    ----------
    heads, kv_heads
        Query heads, and the key-value heads they share.
    key_width, value_width
        Width of a head in the score product and in the weighted sum.
    window
        Most tokens a token looks back on; None for all.
    causal
        Whether a token sees earlier tokens only.
    dropout
        Whether the scores pass a dropout.
    rotary
        Whether queries and keys are rotated.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    causal: bool = True
    dropout: bool = False
    rotary: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """What an MLP does between its matrices.

    Parameters
    ----------
    width
        Inner width that a token passes, over all its experts and the shared ones.
    gated
        Two branches multiplied (SwiGLU, GeGLU), or one.
    activation
        ``relu`` keeps its output alone for the backward pass; any other keeps its input too.
    experts
        Experts a token is sent to; 0 without routing.
    """

    width: int
    gated: bool
    activation: str
    experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the chain.

    Parameters
    ----------
    kind
        Name shared by equal layers.
    part
        What it belongs to, for freezing.
    width
        Width of the hidden state it hands on.
    tokens
        Tokens per sample; None for the sequence length.
    matrices, vectors
        Its parameters: matrices, and the sizes of everything else (norms, position tables), held by every rank.
    attention, mlp
        None where it has none.
    norms, rms
        Normalisations of the hidden state, and whether they are RMS norms.
    dropout
        Whether the hidden state passes a dropout behind each of attention and MLP.
    tied
        Parameters that are the embedding's.
    reduces
        All-reduces of a hidden state between tp ranks, forward and backward together over two.
    """

    kind: str
    part: Part
    width: int
    tokens: int | None = None
    matrices: tuple[Matrix, ...] = ()
    vectors: tuple[int, ...] = ()
    attention: Attention | None = None
    mlp: Mlp | None = None
    norms: int = 0
    rms: bool = True
    dropout: bool = False
    tied: int = 0
    reduces: float = 0.0

    @property
    def parameters(self) -> int:
        return sum(each.parameters for each in self.matrices) + sum(self.vectors)

    @property
    def num_tensors(self) -> int:
        """Tensors of parameters, each expert's counted."""
        return sum(each.copies * (1 + each.bias) for each in self.matrices) + len(self.vectors)

    def shard(self, tp: int) -> int:
        """Parameters that one of `tp` ranks holds."""
        return sum(each.shard(tp) for each in self.matrices) + sum(self.vectors)

    def undivided(self, tp: int) -> str | None:
        """What cannot be divided between `tp` ranks, in words, or None."""
        attention = self.attention
        if attention and attention.heads % tp:
            return f"{attention.heads} attention heads of {self.kind}"
        if attention and attention.kv_heads % tp and tp % attention.kv_heads:
            return f"{attention.kv_heads} key-value heads of {self.kind}"
        for each in self.matrices:
            width = each.inputs if each.split == "row" else each.outputs
            if each.name.startswith("mlp.") and each.split != "none" and width % tp:
                return f"MLP width {width} of {self.kind}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as a chain of layers.

    Parameters
    ----------
    family
        ``model_type`` of the config.
    layers
        First to last.
    vocabulary
        Entries of the head.
    most_tokens
        Longest sequence the config allows for; None if it does not say.
    notes
        What was assumed while reading the config.
    """

    family: str
    layers: tuple[Layer, ...]
    vocabulary: int
    most_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters of the model; a tied tensor counts once."""
        return sum(layer.parameters - layer.tied for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of the experts, those it is sent to."""
        idle = sum(
            (each.copies - each.used) * (each.inputs + each.bias) * each.outputs
            for layer in self.layers
            for each in layer.matrices
            if each.used
        )
        return self.parameters - idle

    @property
    def heads(self) -> tuple[int | None, int | None]:
        """Query and key-value heads of the decoder; None if there is no attention."""
        found = [layer.attention for layer in self.layers if layer.part == "block" and layer.attention]
        return (found[-1].heads, found[-1].kv_heads) if found else (None, None)


# Reading a config ---------------------------------------------------------------------------------------------------

# One thing, many names: the key that Llama uses, and what other families call it.
ALIASES = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_kv_heads": ("n_head_kv",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "hidden_act": ("hidden_activation", "activation_function"),
    "attention_dropout": ("attn_pdrop",),
    "hidden_dropout": ("resid_pdrop", "dropout", "residual_dropout", "resid_dropout"),
    "num_experts_per_tok": ("experts_per_token",),
    "in_channels": ("in_chans",),
}

# What a transformers config class fills in; a config inside another is stored without what equals these.
_SIGHT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {**_LARGE, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
    "mistral": {**_LARGE, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000},
    "qwen2": {**_LARGE, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936},
    "gemma": {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 256000,
    },
    "clip_vision_model": {**_SIGHT, "image_size": 224, "patch_size": 32},
    "siglip_vision_model": {**_SIGHT, "image_size": 224, "patch_size": 16},
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14},
}


# More is a slip.
MOST = {"num_hidden_layers": 10_000, "depth": 10_000}
MOST_OTHERS = 10**9


class Config:
    """A config object with the file it stands in, so that errors can name file, key and value."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.defaults: Mapping[str, int] = {}
        self._assumed: dict[str, int] = {}

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | Path) -> Config:
        """A config from its file, or from its content."""
        return cls(source, "config") if isinstance(source, Mapping) else cls(files.read(source), str(source))

    def part(self, key: str) -> Config:
        """A config inside this one."""
        data = self.data.get(key)
        if not isinstance(data, Mapping):
            raise self.wrong(key, f"{'missing' if data is None else repr(data)}, expected an object")
        inner = Config(data, self.where, f"{self.prefix}{key}.")
        inner.defaults = CLASS_DEFAULTS.get(str(data.get("model_type")), {})
        return inner

    def assumptions(self) -> tuple[str, ...]:
        """Keys that were read but not there, in words."""
        return tuple(
            f"{self.prefix}{key} is not in the config, {value} taken, the default of its class"
            for key, value in self._assumed.items()
        )

    def wrong(self, key: str, message: str) -> ValueError:
        """An error about a key."""
        return ValueError(f"{self.where}: {self.prefix}{key}: {message}")

    def get(self, key: str) -> Any:
        """The value of a key, or of what others call it; None if it is missing or null."""
        return self._find(key)[1]

    def count(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; without a default, the key must be there."""
        found, value = self._find(key)
        if value is None:
            return self._missing(key, default, least)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0 or value < least:
            raise self.wrong(found, f"{value!r}, expected a whole number of at least {least}")
        if value > (most := MOST.get(key, MOST_OTHERS)):
            raise self.wrong(found, f"{value!r}, expected at most {most}")
        return int(value)

    def optional(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None."""
        return None if self.get(key) is None else self.count(key, least=least)

    def items(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """A list of text or of whole numbers; empty if the key is missing."""
        found, value = self._find(key)
        values = [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
            raise self.wrong(found, f"{value!r}, expected a list of {'text' if kind is str else 'whole numbers'}")
        return tuple(values)

    def number(self, key: str, default: float) -> float:
        """A number of at least 0."""
        found, value = self._find(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise self.wrong(found, f"{value!r}, expected a number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, f"{value!r}, expected true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Text."""
        found, value = self._find(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(found, f"{value!r}, expected text")
        return value

    def _find(self, key: str) -> tuple[str, Any]:
        names = (key, *ALIASES.get(key, ()))
        return next(((name, self.data[name]) for name in names if self.data.get(name) is not None), (key, None))

    def _missing(self, key: str, default: int | None, least: int) -> int:
        if key in self.defaults:
            self._assumed[key] = self.defaults[key]
            return self.defaults[key]
        if default is not None:
            return default
        elsewhere = f", here or as {' or '.join(ALIASES[key])}" if key in ALIASES else ""
        family = self.data.get("model_type")
        raise self.wrong(
            key,
            f"missing, expected a whole number of at least {least}{elsewhere} (model_type {family!r};"
            f" known architectures: {', '.join(FAMILIES)})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a sample, for models that see.

    Parameters
    ----------
    per_sample
        Images in every sample.
    size
        Side in pixels; None for that of the config, or 448 where a model takes any (Qwen2-VL).
    """

    per_sample: int = 1
    size: int | None = None

    def __post_init__(self) -> None:
        for key in ("per_sample", "size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"images: {key} is {value}, expected at least 1")


def read(source: Mapping[str, Any] | str | Path, images: Images | None = None) -> Architecture:
    """The architecture that a config describes.

    Parameters
    ----------
    source
        Path of a ``config.json``, or its content.
    images
        Images per sample, for models with a vision tower.

    Raises
    ------
    ValueError
        ``<file>: <key>: ...`` if the architecture is unknown, or a key is missing or wrong.
    """
    config = Config.read(source)
    family = config.text("model_type", default="")
    if family not in FAMILIES:
        what = f"{family!r} is not among the" if family else "missing, expected one of the"
        close = files.did_you_mean(family, FAMILIES).partition("; ")[2] if family else ""
        inner = config.data.get("text_config")
        if isinstance(inner, Mapping) and str(inner.get("model_type")) in FAMILIES:
            close = "its text_config is, and can be estimated as a config of its own"
        known = ", ".join(FAMILIES) + (f"; {close}" if close else "")
        raise config.wrong("model_type", f"{what} known architectures: {known}")
    try:
        return replace(FAMILIES[family](config, images or Images()), family=family)
    except ValueError as error:
        named = str(error).startswith(f"{config.where}: ")
        raise error if named else ValueError(f"{config.where}: {error}") from None


# Decoders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """What follows attention in a block: an MLP or experts, with their matrices and vectors."""

    mlp: Mlp
    matrices: tuple[Matrix, ...]
    vectors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What the decoders of all families have: widths, and what differs as flags.

    Parameters
    ----------
    hidden, vocabulary
        Width, and entries of the vocabulary.
    attention, projections
        The attention of a block and its matrices.
    blocks
        What follows attention in every block, in order.
    windows
        Attention window of each block, repeated as often as needed; empty for none.
    norms
        Norms of a block over the hidden width.
    rms, norm_bias, weightless
        Whether norms are RMS norms; whether they have a bias; whether they have no parameters at all.
    extra
        Further vectors of a block, such as query and key norms.
    parallel
        Whether attention and MLP read the same input, so that one all-reduce does for both.
    dropout
        Whether hidden states pass a dropout.
    tied, head_bias, final_norm
        The head: its matrix is the embedding's; it has a bias; a norm stands before it.
    positions
        Learned positions.
    embedding_width
        Width of the embedding; where it is not `hidden`, a projection leads there and back.
    embedding_norm
        Whether the embedding is normalised.
    """

    hidden: int
    vocabulary: int
    attention: Attention
    projections: tuple[Matrix, ...]
    blocks: tuple[Inner, ...]
    windows: tuple[int | None, ...] = ()
    norms: int = 2
    rms: bool = True
    norm_bias: bool = False
    weightless: bool = False
    extra: tuple[int, ...] = ()
    parallel: bool = False
    dropout: bool = False
    tied: bool = False
    head_bias: bool = False
    final_norm: bool = True
    positions: int = 0
    embedding_width: int = 0
    embedding_norm: bool = False

    @property
    def norm(self) -> tuple[int, ...]:
        """Vectors of one norm."""
        return () if self.weightless else (self.hidden,) * (1 + self.norm_bias)

    def layers(self) -> tuple[Layer, ...]:
        """Embedding, blocks, head."""
        return (self._embedding(), *_named(self._blocks()), self._head())

    def _embedding(self) -> Layer:
        width = self.embedding_width or self.hidden
        table = Matrix(name="embedding", inputs=self.vocabulary, outputs=width, split="row", used=0)
        lead = Matrix(name="embedding.in", inputs=width, outputs=self.hidden, split="none")
        positions = (self.positions * self.hidden,) if self.positions else ()
        return Layer(
            kind="embedding",
            part="embedding",
            width=self.hidden,
            matrices=(table,) if width == self.hidden else (table, lead),
            vectors=positions + self.norm * self.embedding_norm,
            norms=int(self.embedding_norm),
            rms=self.rms,
            dropout=self.dropout,
            reduces=0.5,
        )

    def _blocks(self) -> list[Layer]:
        windows = self.windows or (None,)
        return [
            Layer(
                kind="block",
                part="block",
                width=self.hidden,
                matrices=self.projections + inner.matrices,
                vectors=self.norm * self.norms + self.extra + inner.vectors,
                attention=replace(self.attention, window=windows[i % len(windows)]),
                mlp=inner.mlp,
                norms=self.norms,
                rms=self.rms,
                dropout=self.dropout,
                reduces=1.0 if self.parallel else 2.0,
            )
            for i, inner in enumerate(self.blocks)
        ]

    def _head(self) -> Layer:
        width = self.embedding_width or self.hidden
        head = Matrix(name="head", inputs=width, outputs=self.vocabulary, bias=self.head_bias)
        back = Matrix(name="head.out", inputs=self.hidden, outputs=width, split="none")
        return Layer(
            kind="head",
            part="head",
            width=self.hidden,
            matrices=(head,) if width == self.hidden else (back, head),
            vectors=self.norm * self.final_norm,
            norms=int(self.final_norm),
            rms=self.rms,
            tied=head.inputs * head.outputs if self.tied else 0,
            reduces=0.5,
        )


def _named(blocks: Sequence[Layer]) -> list[Layer]:
    """Blocks that differ get names of their own: the most frequent keeps its name, the others say what differs."""
    usual = max(blocks, key=blocks.count)
    named = []
    for block in blocks:
        marks = []
        if block.mlp != usual.mlp and block.mlp is not None:
            marks.append("experts" if block.mlp.experts else "dense")
        if block.attention != usual.attention and block.attention is not None:
            marks.append("local" if block.attention.window else "global")
        named.append(replace(block, kind="-".join([block.kind, *marks])))
    return named


def _heads(
    hidden: int, attention: Attention, *, bias: bool = False, out_bias: bool = False
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Separate matrices of queries, keys, values and output."""
    wide, narrow = attention.heads * attention.key_width, attention.kv_heads * attention.key_width
    grain = attention.key_width
    return (
        Matrix(name="attention.q", inputs=hidden, outputs=wide, bias=bias, grain=grain),
        Matrix(name="attention.k", inputs=hidden, outputs=narrow, bias=bias, grain=grain),
        Matrix(name="attention.v", inputs=hidden, outputs=narrow, bias=bias, grain=grain),
        Matrix(name="attention.o", inputs=wide, outputs=hidden, bias=out_bias, split="row", grain=grain),
    )


def _mlp(hidden: int, width: int, *, gated: bool, activation: str, bias: bool = False) -> Inner:
    up = Matrix(name="mlp.up", inputs=hidden, outputs=width, bias=bias)
    down = Matrix(name="mlp.down", inputs=width, outputs=hidden, bias=bias, split="row")
    gate = (replace(up, name="mlp.gate"),) if gated else ()
    return Inner(mlp=Mlp(width=width, gated=gated, activation=activation), matrices=(*gate, up, down))


def _experts(
    config: Config,
    width: str,
    copies: str,
    *,
    shared: int = 0,
    shared_gate: bool = False,
    bias: bool = False,
    vectors: tuple[int, ...] = (),
) -> Inner:
    """Gated experts of the width and number that two keys name, and a shared one of width `shared` beside them."""
    hidden, number = config.count("hidden_size"), config.count(copies)
    used = config.count("num_experts_per_tok")
    if used > number:
        raise config.wrong("num_experts_per_tok", f"{used}, expected at most {copies}, {number}")
    one = _mlp(hidden, config.count(width), gated=True, activation=_activation(config), bias=bias)
    experts = tuple(replace(each, name=f"{each.name}.expert", copies=number, used=used) for each in one.matrices)
    router = Matrix(name="router", inputs=hidden, outputs=number, bias=bias, split="none")
    always = _mlp(hidden, shared, gated=True, activation=_activation(config)).matrices if shared else ()
    gate = (Matrix(name="shared_gate", inputs=hidden, outputs=1, split="none"),) if shared_gate else ()
    mlp = replace(one.mlp, width=used * one.mlp.width + shared, experts=used)
    return Inner(mlp=mlp, matrices=(router, *experts, *always, *gate), vectors=vectors)


def _activation(config: Config, default: str = "silu") -> str:
    return config.text("hidden_act", default=default)


def _windows(config: Config, every: int | None = None) -> tuple[int | None, ...]:
    """Attention window of every block where the config has one; each `every`-th block looks at everything."""
    window = config.optional("sliding_window", least=0)
    if not window or not config.flag("use_sliding_window", True):
        return ()
    num_layers = config.count("num_hidden_layers")
    types = config.items("layer_types", str)
    if len(types) == num_layers:
        return tuple(window if each == "sliding_attention" else None for each in types)
    every = config.optional("sliding_window_pattern") or every
    return tuple(None if every and (i + 1) % every == 0 else window for i in range(num_layers))


def _decoder(
    config: Config,
    *,
    heads: tuple[int, int] | None = None,
    head_width: int | None = None,
    latent: tuple[Attention, tuple[Matrix, ...]] | None = None,
    bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    gated: bool = True,
    activation: str = "silu",
    inner: int | None = None,
    blocks: tuple[Inner, ...] | None = None,
    rotary: bool = True,
    qk_norm: Literal["", "head", "whole"] = "",
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    tied: bool = False,
    **flags: Any,
) -> Architecture:
    """A decoder from its config: by default as Llama, the flags say what a family does otherwise.

    Parameters
    ----------
    heads
        Query and key-value heads, where they are not read from the config.
    head_width
        Width of a head that leaves no ``head_dim`` in its config, where it is not hidden / heads.
    latent
        Attention and its matrices, where they are of another form.
    bias, out_bias, mlp_bias
        Biases of queries, keys and values; of the output; of the MLP.
    inner
        Width of the MLP of a config that leaves it out.
    blocks
        What follows attention in every block, where it is not the same MLP.
    attention_dropout, dropout, tied
        Defaults of the class.
    flags
        Further fields of `Decoder`.
    """
    hidden, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    if latent is None:
        number, kv = heads or _head_counts(config)
        width = config.count("head_dim", default=head_width or hidden // number)
        if not width:
            raise config.wrong("num_attention_heads", f"{number}, expected at most hidden_size, {hidden}")
        attention = Attention(
            heads=number,
            kv_heads=kv,
            key_width=width,
            value_width=width,
            dropout=config.number("attention_dropout", attention_dropout) > 0,
            rotary=rotary,
        )
        latent = attention, _heads(hidden, attention, bias=bias, out_bias=out_bias)
    attention, projections = latent
    if blocks is None:
        act, size = _activation(config, activation), config.count("intermediate_size", default=inner)
        blocks = (_mlp(hidden, size, gated=gated, activation=act, bias=mlp_bias),) * num_layers
    norms = {"": (), "head": (attention.key_width,) * 2, "whole": tuple(m.outputs for m in projections[:2])}
    decoder = Decoder(
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        attention=attention,
        projections=projections,
        blocks=blocks,
        extra=flags.pop("extra", ()) + norms[qk_norm],
        dropout=config.number("hidden_dropout", dropout) > 0,
        tied=config.flag("tie_word_embeddings", tied),
        **flags,
    )
    return Architecture(
        family="",
        layers=decoder.layers(),
        vocabulary=decoder.vocabulary,
        most_tokens=config.optional("max_position_embeddings"),
        notes=config.assumptions(),
    )


def _head_counts(config: Config) -> tuple[int, int]:
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    return heads, kv_heads


# Families -----------------------------------------------------------------------------------------------------------


def _llama(config: Config, images: Images) -> Architecture:
    bias = config.flag("attention_bias", False)
    return _decoder(config, bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: Config, images: Images) -> Architecture:
    return _decoder(config, windows=_windows(config))


def _mixtral(config: Config, images: Images) -> Architecture:
    blocks = (_experts(config, "intermediate_size", "num_local_experts"),) * config.count("num_hidden_layers")
    return _decoder(config, blocks=blocks, windows=_windows(config))


def _qwen2(config: Config, images: Images) -> Architecture:
    return _decoder(config, bias=True, windows=_windows(config))


def _qwen3(config: Config, images: Images) -> Architecture:
    bias = config.flag("attention_bias", False)
    windows = _windows(config)
    return _decoder(config, bias=bias, out_bias=bias, head_width=128, qk_norm="head", windows=windows)


def _qwen2_moe(config: Config, images: Images) -> Architecture:
    return _decoder(config, bias=True, blocks=_qwen_blocks(config))


def _qwen3_moe(config: Config, images: Images) -> Architecture:
    bias = config.flag("attention_bias", False)
    blocks = _qwen_blocks(config)
    return _decoder(config, bias=bias, out_bias=bias, head_width=128, qk_norm="head", blocks=blocks)


def _qwen_blocks(config: Config) -> tuple[Inner, ...]:
    """Experts in every `decoder_sparse_step`-th block that is not listed as dense, a shared one if there is a width."""
    shared = config.count("shared_expert_intermediate_size", default=0, least=0)
    experts = _experts(config, "moe_intermediate_size", "num_experts", shared=shared, shared_gate=bool(shared))
    step, listed = config.count("decoder_sparse_step", default=1), config.items("mlp_only_layers", int)
    number = config.count("num_hidden_layers")
    sparse = [i not in listed and (i + 1) % step == 0 for i in range(number)]
    if all(sparse):
        return (experts,) * number
    hidden, width = config.count("hidden_size"), config.count("intermediate_size")
    dense = _mlp(hidden, width, gated=True, activation=_activation(config))
    return tuple(experts if each else dense for each in sparse)


def _gemma(config: Config, images: Images) -> Architecture:
    return _decoder(config, tied=True, head_width=256)


def _gemma2(config: Config, images: Images) -> Architecture:
    return _decoder(config, tied=True, head_width=256, norms=4, windows=_windows(config, every=2))


def _gemma3(config: Config, images: Images) -> Architecture:
    windows = _windows(config, every=6)
    return _decoder(config, tied=True, head_width=256, norms=4, qk_norm="head", windows=windows)


def _deepseek_blocks(config: Config) -> tuple[Inner, ...]:
    """Dense blocks first, then experts with shared ones; `noaux_tc` routing has a bias per expert."""
    hidden, width = config.count("hidden_size"), config.count("moe_intermediate_size")
    dense = _mlp(hidden, config.count("intermediate_size"), gated=True, activation=_activation(config))
    corrected = config.get("topk_method") == "noaux_tc" or config.data.get("model_type") == "deepseek_v3"
    experts = _experts(
        config,
        "moe_intermediate_size",
        "n_routed_experts",
        shared=width * config.count("n_shared_experts", default=0, least=0),
        vectors=(config.count("n_routed_experts"),) if corrected else (),
    )
    first, step = config.count("first_k_dense_replace", default=0, least=0), config.count("moe_layer_freq", default=1)
    number = config.count("num_hidden_layers")
    return tuple(experts if i >= first and i % step == 0 else dense for i in range(number))


def _deepseek(config: Config, images: Images) -> Architecture:
    """The first DeepSeek MoE: attention of Llama."""
    return _decoder(config, blocks=_deepseek_blocks(config))


def _deepseek_v2(config: Config, images: Images) -> Architecture:
    """DeepSeek-V2, V3: keys and values from one narrow latent (MLA), queries too if `q_lora_rank` is given."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    bias = config.flag("attention_bias", False)
    latent, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, value = config.count("qk_nope_head_dim"), config.count("v_head_dim")
    key, rank = nope + rope, config.optional("q_lora_rank")
    down = (Matrix(name="attention.q.down", inputs=hidden, outputs=rank, bias=bias, split="none"),) if rank else ()
    projections = (
        *down,
        Matrix(name="attention.q", inputs=rank or hidden, outputs=heads * key, grain=key),
        Matrix(name="attention.kv.down", inputs=hidden, outputs=latent + rope, bias=bias, split="none"),
        Matrix(name="attention.kv", inputs=latent, outputs=heads * (nope + value), grain=nope + value),
        Matrix(name="attention.o", inputs=heads * value, outputs=hidden, bias=bias, split="row", grain=value),
    )
    attention = Attention(heads=heads, kv_heads=heads, key_width=key, value_width=value)
    extra = (rank, latent) if rank else (latent,)
    return _decoder(config, latent=(attention, projections), blocks=_deepseek_blocks(config), extra=extra)


def _glm4_moe(config: Config, images: Images) -> Architecture:
    return _decoder(
        config,
        bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else "",
        blocks=_deepseek_blocks(config),
    )


def _gpt_oss(config: Config, images: Images) -> Architecture:
    """Biases everywhere, and a learned sink per head."""
    sinks = (config.count("num_attention_heads"),)
    experts = _experts(config, "intermediate_size", "num_local_experts", bias=True, vectors=sinks)
    blocks, windows = (experts,) * config.count("num_hidden_layers"), _windows(config, every=2)
    return _decoder(config, bias=True, out_bias=True, head_width=64, blocks=blocks, windows=windows)


def _phi3(config: Config, images: Images) -> Architecture:
    return _decoder(config, windows=_windows(config))


def _olmo(config: Config, images: Images) -> Architecture:
    bias = config.flag("attention_bias", False)
    return _decoder(config, bias=bias, out_bias=bias, rms=False, weightless=True)


def _olmo2(config: Config, images: Images) -> Architecture:
    return _decoder(config, qk_norm="whole")


def _olmoe(config: Config, images: Images) -> Architecture:
    blocks = (_experts(config, "intermediate_size", "num_experts"),) * config.count("num_hidden_layers")
    return _decoder(config, qk_norm="whole", blocks=blocks)


def _smollm3(config: Config, images: Images) -> Architecture:
    return _decoder(config, tied=True)


def _gpt2(config: Config, images: Images) -> Architecture:
    """GPT-2, and GPT-BigCode, whose keys and values have one head."""
    heads = config.count("num_attention_heads")
    one = config.data.get("model_type") == "gpt_bigcode" and config.flag("multi_query", True)
    return _decoder(
        config,
        heads=(heads, 1 if one else heads),
        bias=True,
        out_bias=True,
        attention_dropout=0.1,
        dropout=0.1,
        positions=config.count("max_position_embeddings"),
        tied=True,
        **_gpt(config),
    )


def _gpt_neo(config: Config, images: Images) -> Architecture:
    types = config.get("attention_types") or []
    if not isinstance(types, list) or not all(map(_is_types, types)):
        raise config.wrong("attention_types", f'{types!r}, expected pairs such as [["global", "local"], 6]')
    kinds = [kind for kinds, times in types for kind in kinds * times]
    window = config.count("window_size", default=256)
    return _decoder(
        config,
        out_bias=True,
        positions=config.count("max_position_embeddings"),
        windows=tuple(window if kind == "local" else None for kind in kinds),
        tied=True,
        **_gpt(config),
    )


def _is_types(value: object) -> bool:
    """Whether it is a list of kinds and how often it is repeated."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    kinds, times = value
    return isinstance(kinds, list) and isinstance(times, int) and 0 <= times <= MOST["num_hidden_layers"]


def _gpt(config: Config) -> dict[str, Any]:
    """Layer norms, and an MLP four times as wide, with biases."""
    inner, norms = 4 * config.count("hidden_size"), {"rms": False, "norm_bias": True}
    return {"gated": False, "activation": "gelu_new", "inner": inner, "mlp_bias": True, "rotary": False, **norms}


def _gptj(config: Config, images: Images) -> Architecture:
    return _decoder(config, norms=1, parallel=True, head_bias=True, **_gpt(config) | {"rotary": True})


def _bloom(config: Config, images: Images) -> Architecture:
    return _decoder(config, bias=True, out_bias=True, embedding_norm=True, tied=True, **_gpt(config))


def _mpt(config: Config, images: Images) -> Architecture:
    bias = not config.flag("no_bias", True)
    flags = _gpt(config) | {"mlp_bias": bias, "norm_bias": bias}
    flags["inner"] = config.count("expansion_ratio", default=4) * config.count("hidden_size")
    return _decoder(config, bias=bias, out_bias=bias, tied=True, **flags)


def _gpt_neox(config: Config, images: Images) -> Architecture:
    bias, parallel = config.flag("attention_bias", True), config.flag("use_parallel_residual", True)
    return _decoder(config, bias=bias, out_bias=bias, parallel=parallel, **_gpt(config) | {"rotary": True})


def _phi(config: Config, images: Images) -> Architecture:
    width = config.count("hidden_size") // config.count("num_attention_heads")
    extra = (2 * width,) * 2 if config.flag("qk_layernorm", False) else ()
    flags = _gpt(config) | {"rotary": True, "extra": extra}
    return _decoder(config, bias=True, out_bias=True, norms=1, parallel=True, head_bias=True, **flags)


def _starcoder2(config: Config, images: Images) -> Architecture:
    bias, windows = config.flag("use_bias", True), _windows(config)
    flags = _gpt(config) | {"rotary": True, "mlp_bias": bias}
    return _decoder(config, bias=bias, out_bias=bias, tied=True, windows=windows, **flags)


def _stablelm(config: Config, images: Images) -> Architecture:
    bias, parallel = config.flag("use_qkv_bias", False), config.flag("use_parallel_residual", False)
    norms = 1 if parallel else 2
    return _decoder(config, bias=bias, rms=False, norm_bias=True, norms=norms, parallel=parallel)


def _cohere(config: Config, images: Images) -> Architecture:
    """Command R: layer norms without a bias, one per block, attention and MLP side by side."""
    if config.flag("use_qk_norm", False):
        raise config.wrong("use_qk_norm", "True, expected false: norms of queries and keys per head are not counted")
    bias = config.flag("attention_bias", False)
    return _decoder(config, bias=bias, out_bias=bias, rms=False, norms=1, parallel=True, tied=True)


def _opt(config: Config, images: Images) -> Architecture:
    """OPT; the 350M model normalises behind each half, has no final norm and a narrower embedding."""
    bias, before = config.flag("enable_bias", True), config.flag("do_layer_norm_before", True)
    return _decoder(
        config,
        bias=bias,
        out_bias=bias,
        dropout=0.1,
        positions=config.count("max_position_embeddings") + 2,  # positions start at 2
        embedding_width=config.count("word_embed_proj_dim", default=config.count("hidden_size")),
        final_norm=before and not config.flag("_remove_final_layer_norm", False),
        weightless=not config.flag("layer_norm_elementwise_affine", True),
        tied=True,
        **_gpt(config) | {"activation": "relu", "mlp_bias": bias},
    )


def _falcon(config: Config, images: Images) -> Architecture:
    new, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    heads, parallel = config.count("num_attention_heads"), config.flag("parallel_attn", True) or new
    kv_heads = config.count("num_kv_heads", default=heads) if new else heads
    if not new and config.flag("multi_query", True):
        kv_heads = 1
    two = config.data.get("num_ln_in_parallel_attn") != 1 if new else not parallel
    flags = _gpt(config) | {"rotary": not config.flag("alibi", False), "activation": "gelu", "mlp_bias": bias}
    norms = 2 if two else 1
    return _decoder(
        config, heads=(heads, kv_heads), bias=bias, out_bias=bias, norms=norms, parallel=parallel, tied=True, **flags
    )


# Vision tower, projector, decoder -----------------------------------------------------------------------------------


def _tower(
    hidden: int,
    num_layers: int,
    *,
    tokens: int,
    heads: int,
    inner: Inner,
    patch: Matrix,
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
    rms: bool = False,
    rotary: bool = False,
    windows: tuple[int | None, ...] = (None,),
) -> tuple[Layer, ...]:
    """Patch embedding and blocks of a vision transformer; `before` and `after` are vectors of its two ends."""
    width = hidden // heads
    if not width:
        raise ValueError(f"vision_config: {heads} heads, expected at most its hidden width, {hidden}")
    attention = Attention(heads=heads, kv_heads=heads, key_width=width, value_width=width, causal=False, rotary=rotary)
    common: dict[str, Any] = {"part": "vision", "width": hidden, "tokens": tokens, "rms": rms}
    first = Layer(kind="vision-embedding", matrices=(patch,), vectors=before, norms=int(bool(before)), **common)
    blocks = [
        Layer(
            kind="vision-block",
            matrices=_heads(hidden, attention, bias=True, out_bias=True) + inner.matrices,
            vectors=((hidden,) if rms else (hidden, hidden)) * 2,
            attention=replace(attention, window=windows[i % len(windows)]),
            mlp=inner.mlp,
            norms=2,
            reduces=2.0,
            **common,
        )
        for i in range(num_layers)
    ]
    blocks = _named(blocks)
    if after:
        last = blocks[-1]
        blocks[-1] = replace(last, kind="vision-last", vectors=last.vectors + after, norms=last.norms + 1)
    return (first, *blocks)


def _clip(config: Config, images: Images) -> tuple[tuple[Layer, ...], int]:
    """CLIP or SigLIP tower, and the patches of one image."""
    family = config.data.get("model_type")
    if family not in ("clip_vision_model", "siglip_vision_model"):
        raise config.wrong("model_type", f"{family!r}, expected clip_vision_model or siglip_vision_model")
    siglip = family == "siglip_vision_model"
    hidden, size = config.count("hidden_size"), config.count("patch_size")
    fixed = config.count("image_size") // size
    patches = (images.size // size if images.size else fixed) ** 2
    if not patches:
        pixels = images.size or config.count("image_size")
        raise ValueError(f"images: size {pixels} is less than one patch of {size} pixels")
    positions = (fixed**2 + (not siglip)) * hidden
    layers = _tower(
        hidden,
        config.count("num_hidden_layers"),
        tokens=(patches + (not siglip)) * images.per_sample,
        heads=config.count("num_attention_heads"),
        inner=_mlp(hidden, config.count("intermediate_size"), gated=False, activation="gelu", bias=True),
        patch=_patches(config.count("num_channels", default=3) * size**2, hidden, bias=siglip),
        before=(positions,) if siglip else (positions, hidden, hidden, hidden),  # class token, norm ahead
        after=(hidden, hidden),
    )
    return layers, patches


def _patches(inputs: int, hidden: int, *, bias: bool) -> Matrix:
    return Matrix(name="patch", inputs=inputs, outputs=hidden, bias=bias, split="none")


def _text(config: Config, images: Images) -> tuple[Architecture, int]:
    """The decoder that `text_config` describes, and its width."""
    text = config.part("text_config")
    family = text.text("model_type", default="")
    if family not in FAMILIES or family in VISION:
        raise text.wrong("model_type", f"{family!r} is no decoder we know; known architectures: {', '.join(FAMILIES)}")
    if "tie_word_embeddings" not in text.data and "tie_word_embeddings" in config.data:
        text.data = {**text.data, "tie_word_embeddings": config.data["tie_word_embeddings"]}
    return FAMILIES[family](text, images), text.count("hidden_size")


def _llava(config: Config, images: Images) -> Architecture:
    """LLaVA: two matrices between tower and decoder; LLaVA-NeXT adds a vector that ends a row of an image."""
    (decoder, hidden), vision = _text(config, images), config.part("vision_config")
    tower, patches = _clip(vision, images)
    bridge = _mlp(tower[0].width, hidden, gated=False, activation="gelu", bias=True)
    projector = Layer(
        kind="projector",
        part="projector",
        width=hidden,
        tokens=patches * images.per_sample,
        matrices=(bridge.matrices[0], replace(bridge.matrices[1], inputs=hidden, outputs=hidden)),
        vectors=(hidden,) if config.data.get("model_type") == "llava_next" else (),
        mlp=bridge.mlp,
        reduces=1.0,
    )
    tiles = ", one tile per image" if config.data.get("model_type") == "llava_next" else ""
    return _seeing(tower, projector, decoder, vision, f"{_images(images, patches)}{tiles}")


def _paligemma(config: Config, images: Images) -> Architecture:
    (decoder, hidden), vision = _text(config, images), config.part("vision_config")
    tower, patches = _clip(vision, images)
    matrix = Matrix(name="projector", inputs=tower[0].width, outputs=hidden, bias=True, split="none")
    tokens = patches * images.per_sample
    projector = Layer(kind="projector", part="projector", width=hidden, tokens=tokens, matrices=(matrix,))
    return _seeing(tower, projector, decoder, vision, _images(images, patches))


def _qwen2_vl(config: Config, images: Images) -> Architecture:
    """Qwen2-VL: layer norms and GELU. Qwen2.5-VL: RMS norms, gated MLP with biases, windows in most blocks."""
    newer = config.data.get("model_type") == "qwen2_5_vl"
    text = config if config.get("hidden_size") is not None else config.part("text_config")
    decoder, out = _decoder(text, bias=True), text.count("hidden_size")
    vision = config.part("vision_config")
    vision.defaults = CLASS_DEFAULTS["qwen2_vl"]
    hidden, num_layers = vision.count("hidden_size" if newer else "embed_dim"), vision.count("depth")
    patch, merge = vision.count("patch_size"), vision.count("spatial_merge_size", default=2)
    side = (images.size or 448) // (patch * merge) * merge
    if not side:
        raise ValueError(f"images: size {images.size} is less than one merged patch of {patch * merge} pixels")
    width = vision.count("intermediate_size") if newer else round(vision.number("mlp_ratio", 4.0) * hidden)
    channels = vision.count("in_channels", default=3) * vision.count("temporal_patch_size", default=2)
    whole = set(vision.items("fullatt_block_indexes", int))
    window = (vision.count("window_size", default=112) // patch) ** 2 if newer else None
    tower = _tower(
        hidden,
        num_layers,
        tokens=side**2 * images.per_sample,
        heads=vision.count("num_heads"),
        inner=_mlp(hidden, width, gated=newer, activation="silu" if newer else "quick_gelu", bias=True),
        patch=_patches(channels * patch**2, hidden, bias=False),
        rms=newer,
        rotary=True,
        windows=tuple(None if i in whole else window for i in range(num_layers)),
    )
    joined, seen = hidden * merge**2, (side // merge) ** 2
    bridge = _mlp(joined, joined, gated=False, activation="gelu", bias=True)
    projector = Layer(
        kind="projector",
        part="projector",
        width=out,
        tokens=seen * images.per_sample,
        matrices=(bridge.matrices[0], replace(bridge.matrices[1], outputs=out)),
        vectors=(hidden,) if newer else (hidden, hidden),
        mlp=bridge.mlp,
        rms=newer,
        reduces=1.0,
    )
    return _seeing(tower, projector, decoder, vision, f"{_images(images, seen)}, {side * patch} pixels a side")


def _images(images: Images, tokens: int) -> str:
    return f"{images.per_sample} image(s) per sample, each {tokens} tokens of the sequence"


def _seeing(
    tower: tuple[Layer, ...], projector: Layer, decoder: Architecture, vision: Config, note: str
) -> Architecture:
    """Tower, projector and decoder as one chain; the embedding joins image and text tokens to one sequence."""
    return replace(
        decoder,
        layers=(*tower, projector, *decoder.layers),
        notes=(*decoder.notes, *vision.assumptions(), note),
    )


Family = Callable[[Config, Images], Architecture]

#: ``model_type`` -> its reader.
FAMILIES: dict[str, Family] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v2,
    "kimi_k2": _deepseek_v2,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "smollm3": _smollm3,
    "granite": _llama,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "falcon": _falcon,
    "mpt": _mpt,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "cohere": _cohere,
    "llava": _llava,
    "llava_next": _llava,
    "paligemma": _paligemma,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
}
VISION = ("llava", "llava_next", "paligemma", "qwen2_vl", "qwen2_5_vl")
