"""A node that loses its network, or two that lose each other: all ranks say so, in bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gradlane.lab.cluster.fork_server import ForkedProgram, running_fork_server
from gradlane.lab.cluster.namespaces import INTERFACE, EmulatedCluster
from tests.forked_programs import SOURCES
from tests.namespaces import needs_namespaces

RANKS = 3
CUT = 2
"""The rank whose cable is pulled."""
ENDS_WITHIN_S = 60.0
"""Many times the program's silence timeout of 3 s: nothing may wait for ever."""
NOBODY = "02:00:00:00:00:99"
"""An address of no interface: what is sent there goes nowhere, without a word."""


def cut_between(cluster: EmulatedCluster, one: int, other: int) -> None:
    """Let nothing pass between two nodes any more; both still reach all others."""
    for here, there in ((one, other), (other, one)):
        member = cluster.members[here]
        member.route.neigh(
            "replace",
            dst=cluster.addresses[there],
            lladdr=NOBODY,
            ifindex=member.interface(INTERFACE),
            state="permanent",
        )


def train_until_the_end(
    folder: Path,
    cluster: EmulatedCluster,
    before: Callable[[], None],
    during: Callable[[], None],
    **environment: str,
) -> list[str]:
    """Train for ever on all nodes, and return what the ranks wrote to stderr when all had ended.

    Args:
        folder: for what they write.
        cluster: the nodes.
        before: called before the first rank is started.
        during: called when all ranks train.
        environment: added to that of the ranks.
    """
    before()
    with contextlib.ExitStack() as ending:
        children: list[ForkedProgram] = []
        for rank in range(RANKS):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": cluster.addresses[0],
                "MASTER_PORT": "29501",
                "ADVERTISE": cluster.addresses[rank],
                "PYTHONUNBUFFERED": "1",
                **environment,
            }
            with (folder / f"errors-{rank}").open("wb") as errors:
                # With an ending that it does not know, such as a number, it trains for ever.
                child = running_fork_server({"OMP_NUM_THREADS": "1", **SOURCES}).fork(
                    "tests.training.model.failing_rank",
                    [str(rank)],
                    namespace=cluster.namespace_descriptor(rank),
                    environment=own,
                    stderr=errors,
                    timeout_s=60.0,
                )
            children.append(child)
            for end in (child.stdout.close, child.stdin.close, child.kill):
                ending.callback(end)
        for child in children:
            for line in child.stdout:
                if line.startswith(b"step 6"):
                    break
        during()
        codes = [child.wait(ENDS_WITHIN_S) for child in children]
    told = [(folder / f"errors-{rank}").read_text() for rank in range(RANKS)]
    assert codes == [1] * RANKS, told
    return told


def last_lines(told: list[str], error: str) -> list[str]:
    """Return the line of each rank's traceback that is the error itself, from its text on."""
    found = []
    for text in told:
        lines = [line for line in text.splitlines() if line.startswith(f"gradlane.errors.{error}")]
        assert lines, text
        found.append(lines[-1].partition(": ")[2])
    return found


@needs_namespaces
def test_a_pulled_cable_is_named_on_every_rank(tmp_path: Path) -> None:
    with EmulatedCluster(RANKS, 200_000_000) as cluster:
        told = train_until_the_end(
            tmp_path,
            cluster,
            lambda: None,
            lambda: cluster.set_link(CUT, connected=False),
        )
    for rank, text in enumerate(last_lines(told, "PeerLostError")):
        assert "bytes) were outstanding" in text, text
        lost = [other for other in range(RANKS) if other != rank] if rank == CUT else [CUT]
        assert any(f"rank {other} was lost: silent for" in text for other in lost), text


@needs_namespaces
@pytest.mark.parametrize("other", [0, 1])
def test_a_cut_link_is_named_alike_on_every_rank(tmp_path: Path, other: int) -> None:
    with EmulatedCluster(RANKS, 200_000_000) as cluster:
        told = train_until_the_end(
            tmp_path, cluster, lambda: None, lambda: cut_between(cluster, other, CUT)
        )
    said = {text.partition(";")[0] for text in last_lines(told, "SessionFailedError")}
    (text,) = said
    assert text.startswith(f"the link between rank {other} and rank {CUT} is cut"), text


@needs_namespaces
def test_a_link_that_is_cut_at_the_start_is_named_alike_on_every_rank(tmp_path: Path) -> None:
    with EmulatedCluster(RANKS, 200_000_000) as cluster:
        told = train_until_the_end(
            tmp_path,
            cluster,
            lambda: cut_between(cluster, 1, CUT),
            lambda: None,
            CONNECT_TIMEOUT_S="5",
        )
    said = set(last_lines(told, "RendezvousError"))
    (text,) = said
    assert text.startswith(f"the link between rank 1 and rank {CUT} is cut"), text
