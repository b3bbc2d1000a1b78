"""The choice of the backend of sums, from the ranks' devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from gradlane.training.node.devices import (
    ON_HOST,
    SumBackend,
    agree_on_sum_backend,
    collective_obstacle,
    default_obstacle,
)
from gradlane.training.node.layout import NodeLayout
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.rendezvous.stores import bounded


def report(device: str, accelerator: str = "", backends: tuple[str, ...] = ("gloo", "nccl")) -> Any:
    return {"devices": device.split("+"), "accelerator": accelerator, "backends": backends}


def test_devices_of_a_node_each_rank_has_one() -> None:
    two = [report("cuda:0", "a"), report("cuda:1", "b")]
    assert collective_obstacle([*two, *two], 2) == ""
    assert collective_obstacle([report("cpu"), report("cpu")], 2) == ""


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        (
            [report("cuda:0", "a"), report("cpu+cuda:1", "b")],
            "rank 1 has gradients on cpu and cuda:1",
        ),
        ([report("cpu"), report("cuda:0", "a")], "rank 0 has its gradients on cpu, rank 1 on cuda"),
        ([report("cuda:0", "a"), report("cuda:0", "a")], "ranks 0 and 1 share one accelerator"),
        (
            [report("cuda:0", "a"), report("cuda:1", "b", ("gloo",))],
            "rank 1 was built without nccl",
        ),
        ([report("cpu", "", ()), report("cpu")], "rank 0 was built without gloo"),
    ],
)
def test_devices_that_collectives_cannot_use(reports: list[Any], why: str) -> None:
    assert why in collective_obstacle(reports, 2)


def test_the_same_device_number_on_two_nodes_is_none_that_is_shared() -> None:
    assert collective_obstacle([report("cuda:0", "a"), report("cuda:0", "a")], 1) == ""


def test_unasked_it_changes_no_bit() -> None:
    cuda = [report(f"cuda:{number}", str(number)) for number in range(4)]
    assert default_obstacle(cuda, 2, exact_order=True) == ""
    assert "exact_order=False" in default_obstacle(cuda, 4, exact_order=True)
    assert default_obstacle(cuda, 4, exact_order=False) == ""
    assert "host's memory already" in default_obstacle([report("cpu")] * 2, 2, exact_order=False)


def agreed(options: Options, gradients: list[torch.Tensor]) -> Any:
    store = HashStore()
    layout = NodeLayout(1, 2, 0, 0, 1)
    scopes = [
        RendezvousScope(bounded(store, rank), RankInfo(rank, 2, "job", 0), 0, 1.0)
        for rank in range(2)
    ]
    cpu = '{"devices": ["cpu"], "accelerator": "", "backends": ["gloo"]}'
    scopes[1].put("local/device/1", cpu)
    return agree_on_sum_backend(options, scopes[0], layout, gradients)


def test_ranks_exchange_devices_only_if_the_choice_needs_them() -> None:
    gradients = [torch.zeros(2)]
    assert agreed(Options.of(local="leader"), gradients) is ON_HOST
    assert agreed(Options.of(**keywords_of(local="leader", local_sums="collective")), []) is ON_HOST
    asked = Options.of(**keywords_of(local="leader", local_sums="collective"))
    assert agreed(asked, gradients) == SumBackend("gloo", "asked for")
    unasked = agreed(Options.of(**keywords_of(local="leader", local_sums="auto")), gradients)
    assert unasked == SumBackend("", "the gradients are in the host's memory already")


def test_collectives_need_ranks_that_add_up() -> None:
    Options.of(**keywords_of(local="auto", local_sums="collective"))
    Options.of(**keywords_of(local_sums="auto"))
    with pytest.raises(ValueError, match='local_sums="collective" with local="off"'):
        Options.of(**keywords_of(local="off", local_sums="collective"))
