"""Each option is the same on all ranks, which a session checks, or may truly be each rank's own."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.training.core import load_core
from gradlane.training.options.option_fields import option_rules
from gradlane.training.options.options import GROUPS, Options, keywords_of
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.session.init import open_session
from tests.training.rendezvous.stores import bounded

OWN = {
    # Where a rank is, and how the others reach it.
    *("store", "rank", "world_size", "job", "join", "interface", "advertise", "ports"),
    # Signatures tell whether it is the same.
    *("secret", "secret_file"),
    # How long this rank waits for others to appear, and what its machine can do.
    *("connect_timeout_s", "low_water_bytes", "send_buffer_bytes", "pacing"),
    *("work_threads", "lanes"),
    # A shared folder may have another path on each machine.
    "checkpoint_folder",
    # What this rank reports.
    *("prometheus", "dashboard", "dashboard_everywhere", "trace", "frame_trace", "summary"),
}
"""Options that may differ between ranks."""


def test_every_option_is_compared_or_each_ranks_own() -> None:
    own = {
        rules.name
        for kind in (Options, *GROUPS.values())
        for rules in option_rules(kind).values()
        if not rules.agreed and rules.name not in GROUPS
    }
    assert own == OWN


def errors_of(first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    """Prepare a model on two ranks with different options; return what each raises."""
    core, store, job = load_core(), HashStore(), uuid.uuid4().hex

    def one(rank: int) -> BaseException | None:
        place = {"store": store, "rank": rank, "world_size": 2, "job": job}
        given = {"connect_timeout_s": 20.0, "advertise": "127.0.0.1", **(first, second)[rank]}
        model = nn.Linear(2, 2)
        try:
            with open_session(core, Options.of(**keywords_of(**place, **given))) as session:
                session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except gradlane.GradlaneError as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("silence_timeout_s", (30.0, 3.0)),
        ("silence_timeout_s", (3.0, 30.0)),
        ("progress_timeout_s", (1800.0, 60.0)),
        ("checkpoint_keep", (100, 3)),
    ],
)
def test_time_limits_that_differ_are_refused_by_name(
    tmp_path: Path, name: str, values: tuple[Any, Any]
) -> None:
    folder = {"checkpoint_folder": tmp_path} if name.startswith("checkpoint") else {}
    first, second = ({name: value, **folder} for value in values)
    for error in errors_of(first, second):
        assert isinstance(error, gradlane.RanksDifferError)
        assert f"rank 0 has {name}={values[0]}, rank 1 has {values[1]}" in str(error)


def test_ranks_wait_for_others_to_appear_as_long_as_each_likes() -> None:
    assert errors_of({"connect_timeout_s": 10.0}, {"connect_timeout_s": 20.0}) == [None, None]


def test_a_rank_outside_of_the_world_of_rank_0_is_told_so() -> None:
    store = HashStore()

    def one(rank: int) -> str:
        world_size = (2, 2, 3)[rank]
        rank_info = RankInfo(rank, world_size, "job", 0)
        scope = RendezvousScope(bounded(store, rank), rank_info, 0, 20.0)
        try:
            scope.agree({"options": {"world_size": world_size}, "tensors": []})
        except gradlane.RanksDifferError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(one, range(3))
    assert first == second == ""
    assert third.startswith("rank 0 has world_size=2, rank 2 has 3")
