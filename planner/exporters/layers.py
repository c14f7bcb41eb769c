"""Which layers of a profile are the embedding, the decoder layers and the head, and what other systems call them.

Profiles list every layer, ends included; other systems count decoder layers and place the ends by rules of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from planner.plans import spans
from planner.profile import LayerKind, ModelProfile

EMBEDDING = re.compile(r"embed|wte|wpe", re.IGNORECASE)
HEAD = re.compile(r"head|norm|logit|loss|classifier", re.IGNORECASE)
MTP = re.compile(r"mtp", re.IGNORECASE)
OTHER = re.compile(r"vision|\bvit|tower|projector|encoder", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a model calls its modules.

    Parameters
    ----------
    embedding, head
        Modules before the first and after the last decoder layer, in the order they run.
    block
        Decoder layer, ``{}`` for its index.
    everywhere
        Modules without weights that every stage needs a copy of.
    """

    embedding: tuple[str, ...]
    block: str
    head: tuple[str, ...]
    everywhere: tuple[str, ...] = ()


NAMES = {
    "llama": Names(
        embedding=("model.embed_tokens",),
        block="model.layers.{}",
        head=("model.norm", "lm_head"),
        everywhere=("model.rotary_emb",),
    ),
    "gpt2": Names(
        embedding=("transformer.wte", "transformer.wpe", "transformer.drop"),
        block="transformer.h.{}",
        head=("transformer.ln_f", "lm_head"),
    ),
    "opt": Names(
        embedding=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        block="model.decoder.layers.{}",
        head=("model.decoder.final_layer_norm", "lm_head"),
    ),
    "gpt-neox": Names(
        embedding=("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
        block="gpt_neox.layers.{}",
        head=("gpt_neox.final_layer_norm", "embed_out"),
        everywhere=("gpt_neox.rotary_emb",),
    ),
    "torchtitan": Names(embedding=("tok_embeddings",), block="layers.{}", head=("norm", "lm_head")),
    "torchtitan-output": Names(embedding=("tok_embeddings",), block="layers.{}", head=("norm", "output")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """How many layers of a model are embedding, decoder layers (blocks), multi-token prediction and head, in order."""

    embedding: int
    blocks: int
    mtp: int = 0
    head: int

    @property
    def total(self) -> int:
        """All layers."""
        return self.embedding + self.blocks + self.mtp + self.head

    def block_range(self, layers: tuple[int, int]) -> tuple[int, int]:
        """Decoder layers, counted from 0, of a range of layers."""
        first, end = (min(max(edge - self.embedding, 0), self.blocks) for edge in layers)
        return first, end

    def num_blocks(self, layers: tuple[int, int]) -> int:
        """Decoder layers of a range of layers."""
        first, end = self.block_range(layers)
        return end - first

    def num_mtp(self, layers: tuple[int, int]) -> int:
        """Multi-token prediction layers of a range of layers."""
        start = self.embedding + self.blocks
        first, end = (min(max(edge - start, 0), self.mtp) for edge in layers)
        return end - first

    def modules(self, layers: tuple[int, int], names: Names) -> tuple[str, ...]:
        """Names of the modules of a range of layers.

        Raises
        ------
        ValueError
            If the range splits an end whose modules are not as many as its layers.
        """
        i, j = layers
        first, end = self.block_range(layers)
        start = self.embedding + self.blocks
        if self.num_mtp(layers):
            raise ValueError(
                f"layers {spans(range(start, start + self.mtp))} predict further tokens: no names for them"
            )
        return (
            # Ends that were not measured as layers of their own go with the outermost block.
            *(names.embedding if not self.embedding and i == 0 else ()),
            *_end("embedding", names.embedding, self.embedding, (i, min(j, self.embedding))),
            *(names.block.format(n) for n in range(first, end)),
            *_end("head", names.head, self.head, (max(i - start, 0), j - start)),
            *(names.head if not self.head and j == self.total else ()),
        )


def _end(what: str, modules: tuple[str, ...], count: int, part: tuple[int, int]) -> tuple[str, ...]:
    """Modules of the layers [i, j) of an end that has `count` layers."""
    i, j = part
    if i >= j:
        return ()
    if (i, j) == (0, count):
        return modules
    if len(modules) != count:
        raise ValueError(
            f"the {what}, {count} layers, is split between stages, but its modules are {', '.join(modules)}"
        )
    return modules[i:j]


def model_layers(
    profile: ModelProfile | None, ends: tuple[int, int] | None = None, num_layers: int | None = None
) -> ModelLayers:
    """Tell the ends of a model from its decoder layers.

    An embedding is what is called one, or what another layer's weights are tied to; a head is what is called one, has
    logits or is tied. Else the ends are what comes before the first and after the last kind that occurs twice.

    Parameters
    ----------
    ends
        Layers of the embedding and of the head, where the names do not tell.
    num_layers
        Layers of the model, where `ends` has to do without a profile.

    Raises
    ------
    ValueError
        If there is neither a profile nor `ends`, or the layers in between are not those of one decoder.
    """
    if profile is None and (ends is None or num_layers is None):
        raise ValueError(
            "profile: without it nothing says which layers are the embedding and the head; "
            "give it, or say how many layers each end has (ends: 1,1)"
        )
    kinds = [profile.kind_of(l) for l in range(profile.num_layers)] if profile is not None else []
    count = len(kinds) or num_layers or 0
    before, after = ends if ends is not None else _ends(kinds)
    if before < 0 or after < 0 or before + after >= count:
        raise ValueError(f"ends: {before} and {after} of {count} layers leave no decoder layer")
    inside = kinds[before : count - after]
    mtp = next((n for n, kind in enumerate(reversed(inside)) if not MTP.search(kind.name)), len(inside))
    for l, kind in enumerate(inside[: len(inside) - mtp], start=before):
        if OTHER.search(kind.name) and ends is None:
            raise ValueError(
                f"layer {l} is of kind {kind.name!r}: not one decoder, so its layers cannot be counted as decoder "
                "layers; say how many layers each end has (ends)"
            )
    return ModelLayers(embedding=before, blocks=count - before - after - mtp, mtp=mtp, head=after)


def _ends(kinds: list[LayerKind]) -> tuple[int, int]:
    """Layers of the embedding and of the head."""
    times = Counter(kind.name for kind in kinds)
    tied = {kind.tied_to for kind in kinds}
    repeated = [l for l, kind in enumerate(kinds) if times[kind.name] > 1]
    first, last = (repeated[0], repeated[-1]) if repeated else (0, len(kinds) - 1)
    before = after = 0
    while before < len(kinds) and times[kinds[before].name] == 1 and _is_embedding(kinds[before], tied):
        before += 1
    while after < len(kinds) and times[kinds[-1 - after].name] == 1 and _is_head(kinds[-1 - after]):
        after += 1
    return before or first, after or len(kinds) - 1 - last


def _is_embedding(kind: LayerKind, tied: set[str | None]) -> bool:
    return kind.name in tied or bool(EMBEDDING.search(kind.name))


def _is_head(kind: LayerKind) -> bool:
    return kind.logits_bytes > 0 or kind.tied_to is not None or bool(HEAD.search(kind.name))
