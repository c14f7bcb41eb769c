"""planner.job: what to train, and the choices allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.job import BytesPerParameter, Job


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "gradients", "states"),
    [
        # Adam keeps two fp32 moments (8), momentum one (4), SGD none; mixed precision adds the fp32 master weights (4).
        ("fp32", "sgd", 4, 4, 0),
        ("fp32", "momentum", 4, 4, 4),
        ("fp32", "adam", 4, 4, 8),
        ("mixed", "sgd", 2, 4, 4),
        ("mixed", "momentum", 2, 4, 8),
        ("mixed", "adam", 2, 4, 12),
    ],
)
def test_state_follows_precision_and_optimizer(
    precision: Any, optimizer: Any, weights: int, gradients: int, states: int
) -> None:
    """Bytes per parameter come from precision and optimizer, unless they are given."""
    state = Job(precision=precision, optimizer=optimizer).state
    assert (state.weights, state.gradients, state.optimizer) == (weights, gradients, states)
    assert state.total == weights + gradients + states
    own = BytesPerParameter(weights=2, gradients=2, optimizer=6)
    assert Job(precision=precision, optimizer=optimizer, bytes_per_parameter=own).state == own


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    """A job saved and loaded is the same value with the same digest; nothing but the schema is needed in a file."""
    own = BytesPerParameter(weights=2, gradients=2, optimizer=6)
    job = Job(global_batch=96, micro_batches=(1, 3), tp=(1,), bytes_per_parameter=own, max_depth=4, extrapolate=True)
    job.save(tmp_path / f"job.{suffix}")
    assert Job.load(tmp_path / f"job.{suffix}") == job
    assert Job.load(tmp_path / f"job.{suffix}").digest == job.digest != Job().digest
    assert Job.from_dict({"schema": "hpp-job/1"}) == Job()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "global_batch: 0 is less than 1"),
        ({"max_depth": 0}, "max_depth: 0 is less than 1"),
        ({"max_classes": -1}, "max_classes: -1 is less than 1"),
        ({"sync_chunk_bytes": 0}, "sync_chunk_bytes: 0 is less than 1"),
        ({"context_bytes": -1}, "context_bytes: -1 is negative, expected bytes"),
        ({"tp_context_bytes": -1}, "tp_context_bytes: -1 is negative"),
        ({"sync_buffer_bytes": -1}, "sync_buffer_bytes: -1 is negative"),
        ({"memory_margin": 1.0}, "memory_margin: 1.0 is not in [0, 1), expected a fraction such as 0.05"),
        ({"memory_margin": 5}, "memory_margin: 5.0 is not in [0, 1)"),
        ({"micro_batches": []}, "micro_batches: the list is empty, expected sizes, or null for all that are measured"),
        ({"micro_batches": [0, 1]}, "micro_batches: 0 is less than 1"),
        ({"micro_batches": [2, 2]}, "micro_batches: [2, 2] has a value twice"),
        ({"micro_batches": [512, 1024]}, "micro_batches: the smallest, 512, exceeds global_batch 256"),
        ({"tp": [1, 1]}, "tp: [1, 1] has a value twice"),
        ({"precision": "bf16"}, "precision: 'bf16' is not among fp32, mixed"),
        ({"optimizer": "adamw"}, "optimizer: 'adamw' is not among adam, sgd, momentum; did you mean 'adam'?"),
        ({"sync": "off"}, "sync: 'off' is not among overlapped, exposed"),
        (
            {"sync_granularity": "blocks"},
            "sync_granularity: 'blocks' is not among tensor, layer, block, model; did you",
        ),
        ({"bytes_per_parameter": {"weights": 2}}, "bytes_per_parameter.gradients: missing, expected a whole number"),
        (
            {"bytes_per_parameter": {"weights": -2, "gradients": 1, "optimizer": 1}},
            "bytes_per_parameter.weights: -2 is negative, expected bytes per parameter",
        ),
        ({"recompute": "auto"}, "recompute: expected true or false, got text 'auto'"),
        ({"globalbatch": 3}, "key 'globalbatch' is not among the keys: global_batch, micro_batches, "),
    ],
)
def test_a_job_refuses(changes: dict[str, Any], message: str) -> None:
    """Whatever is wrong in a job file is named: file, key, value, what would be right."""
    with pytest.raises(ValueError) as caught:
        Job.from_dict({"schema": "hpp-job/1", **changes}, "job.yaml")
    assert str(caught.value).startswith(f"job.yaml: {message}")


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"optimizer": "lion"}, {"sync": "off"}, {"sync_granularity": "bucket"}]
)
def test_a_job_in_python_refuses_the_same(changes: dict[str, Any]) -> None:
    """A word outside the choices is refused in Python as in a file, by its key."""
    (key,) = changes
    with pytest.raises(ValueError, match=f"^{key}: '{changes[key]}' is not among"):
        replace(Job(), **changes)
