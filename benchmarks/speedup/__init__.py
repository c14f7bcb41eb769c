"""What a plan is worth when it runs: clusters of stated device times and link rates, emulated on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.demo import LAYER_BYTES
from runtime.emulate import Emulation, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An emulated cluster and what is trained on it.

    Parameters
    ----------
    speeds
        (device type, number of devices, speed relative to the slowest).
    slow_s
        Forward seconds of a layer for one sample on a device of speed 1; backward takes twice as long.
    fits
        How many layers a device has memory for; None for all.
    bytes_per_s
        Of every device's network port; None for loopback.
    length
        Tokens per sample, which decides what a hand-over weighs.
    """

    name: str
    speeds: tuple[tuple[str, int, float], ...]
    slow_s: float
    num_layers: int
    samples: int
    fits: int | None = None
    bytes_per_s: float | None = None
    length: int = 32

    @property
    def limit(self) -> float:
        """Speed of all devices over that of as many of the slowest: no plan gains more on an even one."""
        least = min(speed for _, _, speed in self.speeds)
        total = sum(count * speed for _, count, speed in self.speeds)
        return total / (least * sum(count for _, count, _ in self.speeds))

    @property
    def emulation(self) -> Emulation:
        """The cluster, as it is run and as the planner sees it."""
        memory = round(((self.fits or self.num_layers) + 0.5) * LAYER_BYTES)
        return Emulation(
            name=self.name,
            groups=tuple(
                Group(
                    device_type=name,
                    count=count,
                    forward_s=self.slow_s / speed,
                    backward_s=2 * self.slow_s / speed,
                    memory_bytes=memory,
                    bytes_per_s=self.bytes_per_s,
                )
                for name, count, speed in self.speeds
            ),
        )


def _mixed(fast: float) -> tuple[tuple[str, int, float], ...]:
    return (("fast", 2, fast), ("slow", 2, 1.0))


CASES = {
    case.name: case
    for case in (
        Case(name="control", speeds=(("fast", 4, 1.0),), slow_s=0.010, num_layers=8, samples=32, fits=4),
        Case(name="3to1", speeds=_mixed(3.0), slow_s=0.030, num_layers=8, samples=32),
        Case(name="3to1_half", speeds=_mixed(3.0), slow_s=0.030, num_layers=8, samples=64, fits=6),
        Case(name="4to1_half", speeds=_mixed(4.0), slow_s=0.024, num_layers=8, samples=40, fits=7),
        Case(
            name="three_kinds",
            speeds=(("fast", 1, 4.0), ("medium", 1, 2.0), ("slow", 2, 1.0)),
            slow_s=0.048,
            num_layers=8,
            samples=32,
            fits=4,
        ),
        Case(
            name="slow_links",
            speeds=_mixed(3.0),
            slow_s=0.015,
            num_layers=8,
            samples=32,
            fits=6,
            bytes_per_s=50e6 / 8,
            length=256,
        ),
    )
}
