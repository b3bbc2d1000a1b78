"""A profile of five equal layers, for tests that simulate."""

from __future__ import annotations

from gradlane.planning.simulation.profiles import Profile, ProfileTensor

SMALL = Profile(
    "small",
    16,
    0.1,
    0.3,
    tuple(
        ProfileTensor(f"layer{i}.weight", (250, 1000), "f32", 0.02 * i, 0.3 - 0.03 * i)
        for i in range(5)
    ),
)
