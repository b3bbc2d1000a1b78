"""Sharded models train to the bits of torch's HSDP, in processes as torchrun starts them.

With two nodes the reference is torch's own, over Gloo; with four it is FSDP with a hook that
averages in the order of ranks, as sums of four depend on their order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.paths import ROOT
from tests.ports import reserve_port
from tests.training.sharded.fsdp2 import FSDP_MODULES, needs_fsdp2

pytestmark = [needs_core, needs_fsdp2]
PROGRAM = "tests.training.sharded.programs"


def start(
    programs: ForkedPrograms,
    folder: Path,
    program: str,
    arguments: list[str],
    nodes: int = 2,
    local: int = 2,
) -> list[str]:
    """Run a program on nodes of ranks, as torchrun starts them; returns what each has printed."""
    common = {
        **{"WORLD_SIZE": str(nodes * local), "LOCAL_WORLD_SIZE": str(local)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())},
        **{"GLOO_SOCKET_IFNAME": "lo"},
        "CHECKPOINTS": str(folder / "checkpoints"),
        "NODE_PORTS": ",".join(str(reserve_port()) for _ in range(nodes)),
    }
    environments = [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}
        for rank in range(nodes * local)
    ]
    return programs.run_all(
        folder, program, arguments, environments, timeout_s=250, modules=FSDP_MODULES
    )


def run(
    programs: ForkedPrograms,
    folder: Path,
    scenarios: list[str],
    nodes: int = 2,
    local: int = 2,
    program: str = PROGRAM,
) -> dict[str, list[str]]:
    """Run scenarios on nodes of ranks; returns what each rank found, by scenario."""
    printed = start(programs, folder, program, scenarios, nodes, local)
    found: dict[str, list[str]] = {}
    for output in printed:
        for line in output.splitlines():
            name, _, result = line.partition(": ")
            found.setdefault(name, []).append(result)
    return found


GROUPS = (
    ("adamw", "clipped", "two_optimizers", "checked", "ring", "tied", "checkpointing"),
    (
        "accumulated",
        "accumulated_in_node",
        "several",
        "seldom",
        "unused",
        "frozen",
        "reentrant",
        "several_unused",
    ),
    ("bf16", "bf16_f32", "bf16_default", "f64_reduced", "sums", "divides_in_node"),
    (
        "divides_later",
        "divides_later_bf16",
        "compiled",
        "checkpoints",
        "codec_bf16",
        "codec_qsgd",
        "muon",
    ),
)
"""Scenarios that share processes."""
BITS = [one for group in GROUPS for one in group if not one.startswith(("codec", "muon"))]


@pytest.fixture(scope="module")
def two_nodes(
    programs: ForkedPrograms, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[str]]:
    """Return what gives each rank's result of a scenario on two nodes."""
    results: dict[str, list[str]] = {}

    def result(scenario: str) -> list[str]:
        if scenario not in results:
            group = next((one for one in GROUPS if scenario in one), GROUPS[0])
            results.update(run(programs, tmp_path_factory.mktemp("two"), list(group)))
        return results[scenario]

    return result


@pytest.mark.parametrize("scenario", BITS)
def test_two_nodes_have_the_bits_of_hsdp(
    two_nodes: Callable[[str], list[str]], scenario: str
) -> None:
    lines = two_nodes(scenario)
    assert [one[:5] for one in lines] == ["same "] * 4, lines
    # A shard is the same on both nodes, and another one than its neighbour.
    assert lines[0] == lines[2] != lines[1] == lines[3]


@pytest.mark.parametrize(
    ("scenario", "least", "most"), [("codec_bf16", 1.5, 2), ("codec_qsgd", 2, 4)]
)
def test_codecs_between_nodes(
    two_nodes: Callable[[str], list[str]], scenario: str, least: float, most: float
) -> None:
    lines = two_nodes(scenario)
    sums = [line.split()[-1] for line in lines]
    assert sums[0] == sums[2] != sums[1] == sums[3]
    assert not any(line.startswith("same") for line in lines)
    # Of a model this small, what the ranks compare is a good part of all bytes.
    assert all(least < float(ratio) < most for ratio in two_nodes(f"{scenario} ratio"))


def test_muon_has_whole_matrices(two_nodes: Callable[[str], list[str]]) -> None:
    """Gathered in the node by torch, whose HSDP adds up over nodes once more: other last bits."""
    sums = [line.split()[-1] for line in two_nodes("muon")]
    assert sums[0] == sums[2] != sums[1] == sums[3]
    # A shard's own matrix would step elsewhere.
    assert all(float(off) < 0.01 for off in two_nodes("muon off"))


@pytest.mark.parametrize(
    ("nodes", "local", "scenario"), [(4, 2, "adamw"), (2, 4, "clipped")], ids=["4x2", "2x4"]
)
def test_eight_ranks(
    programs: ForkedPrograms, tmp_path: Path, nodes: int, local: int, scenario: str
) -> None:
    found = run(programs, tmp_path, [scenario], nodes, local)
    assert [line[:5] for line in found[scenario]] == ["same "] * 8


def test_metrics_name_ranks_of_the_world(two_nodes: Callable[[str], list[str]]) -> None:
    others = [[2], [3], [0], [1]]
    assert two_nodes("peers") == [f"{ranks} of 4 in step 4" for ranks in others]


def test_nodes_may_be_groups_by_themselves(
    two_nodes: Callable[[str], list[str]], programs: ForkedPrograms, tmp_path: Path
) -> None:
    found = run(programs, tmp_path, ["node_groups", "adamw"])
    assert found["adamw"] == two_nodes("adamw")


def test_the_example_learns_what_hsdp_learns(programs: ForkedPrograms, tmp_path: Path) -> None:
    path = str(ROOT / "examples" / "fsdp2.py")
    losses = []
    for engine in ("gradlane", "hsdp"):
        printed = start(programs, tmp_path, path, ["--engine", engine, "--steps", "3"])
        losses.append([line for text in printed for line in text.splitlines()])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
