"""How long a plan takes: generated models and clusters of 16, 64 and 256 devices, with gradient sync and without.

A 70B model needs 1.24 TB of state, more than 16 such devices hold beside their activations: there the model is smaller.
The first three cases give one tp degree and micro-batch size, as those behind the reachable figures did; the next three
leave both free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.search_time import generate
from planner import Cluster, Job, ModelProfile
from planner.job import BytesPerParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on so many devices; `reachable_s` is what a prototype took, with the sync term and without."""

    name: str
    model: str
    devices: tuple[tuple[str, int], ...]
    tp: tuple[int, ...]
    micro_batches: tuple[int, ...]
    global_batch: int
    reachable_s: tuple[float, float]

    @property
    def num_devices(self) -> int:
        """Of all types."""
        return sum(count for _, count in self.devices)


SMALL, MIDDLE, LARGE = (3.0, 0.15), (9.0, 0.4), (12.0, 0.8)
ON_16 = (("A100", 8), ("V100", 8))
ON_64 = (("H100", 16), ("A100", 24), ("V100", 24))
ON_64_LARGE = (("H100", 24), ("A100", 24), ("V100", 16))
ON_256 = (("H100", 64), ("A100", 96), ("V100", 64), ("T4", 32))


def _case(
    name: str,
    model: str,
    devices: tuple[tuple[str, int], ...],
    tp: tuple[int, ...],
    micro_batches: tuple[int, ...],
    global_batch: int,
    reachable_s: tuple[float, float],
) -> Case:
    return Case(
        name=name,
        model=model,
        devices=devices,
        tp=tp,
        micro_batches=micro_batches,
        global_batch=global_batch,
        reachable_s=reachable_s,
    )


CASES = {
    case.name: case
    for case in (
        _case("16", "7B", ON_16, (1,), (1,), 64, SMALL),
        _case("64", "13B", ON_64, (1,), (1,), 256, MIDDLE),
        _case("256", "70B", ON_256, (4,), (1,), 512, LARGE),
        _case("16-free", "13B", ON_16, (1, 2, 4), (1, 2), 64, SMALL),
        _case("64-free", "70B", ON_64_LARGE, (2, 4, 8), (1, 2), 256, MIDDLE),
        _case("256-free", "70B", ON_256, (2, 4, 8), (1, 2), 512, LARGE),
    )
}


def question(case: Case, synced: bool) -> tuple[ModelProfile, Cluster, Job]:
    """Profile, cluster and job of a case.

    A job cannot switch gradient sync off. Without it here means frozen layers, with all of the model state counted as
    weights, and no sync chunk less: the same memory and hand-overs, and nothing after the last micro-batch.
    """
    devices = [name for name, _ in case.devices]
    profile = generate.profile(case.model, devices, case.tp, case.micro_batches)
    job = Job(global_batch=case.global_batch)
    if not synced:
        state = BytesPerParameter(weights=job.state.total, gradients=0, optimizer=0)
        job = replace(job, bytes_per_parameter=state, sync_buffer_bytes=job.sync_chunk_bytes)
        profile = replace(
            profile,
            kinds=tuple(replace(kind, trainable=False) for kind in profile.kinds),
            cells=tuple(replace(cell, update_s=0.0) for cell in profile.cells),
        )
    return profile, generate.cluster(dict(case.devices)), job
