"""Four ranks on two nodes, in real processes: sums in shared memory, then over connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.built import needs_core
from tests.training.model.pool import RankPool
from tests.training.node.node_programs import LOCAL_SIZE, values_of
from tests.training.node.rank_loss import NODES, check_that_all_name_the_lost_rank

pytestmark = needs_core
HERE = "tests.training.node.node_programs"


def node_by_node(name: str, dtype: str, size: int, step: int, absent: int | None) -> bytes:
    """Return the mean of what all ranks push: node means, then their mean."""
    nodes = []
    for node in range(NODES):
        ranks = range(node * LOCAL_SIZE, (node + 1) * LOCAL_SIZE)
        there = [values_of(name, dtype, size, rank, step) for rank in ranks if rank != absent]
        nodes.append(sum(there[1:], there[0]) / there[0].dtype.type(LOCAL_SIZE))
    mean: bytes = ((nodes[0] + nodes[1]) / nodes[0].dtype.type(NODES)).tobytes()
    return mean


@pytest.mark.parametrize("local", ["leader", "shared"])
def test_means_are_taken_node_by_node_and_are_the_same_everywhere(
    pool: RankPool, local: str
) -> None:
    found = pool.run(f"{HERE}:means", local=local)
    assert all(one == found[0] for one in found)
    names = [
        (slot, dtype, size)
        for dtype in ("float32", "float64")
        for slot, size in ((dtype, 9_001), (f"{dtype} small", 3))
    ]
    for number, (slot, dtype, size) in enumerate(names):
        assert found[0]["spread"][number] == values_of(slot, dtype, size, 0, 0).tobytes()
        assert found[0]["1"][number] == node_by_node(slot, dtype, size, 1, None)
        assert found[0]["2"][number] == node_by_node(slot, dtype, size, 2, 3)
    assert found[0]["3"] == [b""] * 6


def test_training_sends_a_nodes_bytes_once(pool: RankPool) -> None:
    """Layers that some steps leave out, frozen ones, several dtypes, batch statistics."""
    alone = pool.run(f"{HERE}:trained", local="off")
    led = pool.run(f"{HERE}:trained", local="leader")
    shared = pool.run(f"{HERE}:trained", local="shared")
    for ranks in (alone, led, shared):
        assert len({rank["digest"] for rank in ranks}) == 1
        assert {rank["begun"] for rank in ranks} == {alone[0]["start"]}
    assert led[0]["digest"] == shared[0]["digest"] != alone[0]["digest"]
    for one, other in zip(alone, led, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=0.02)
    between = sum(
        sum(rank["peers"][other] for other in range(4) if other // 2 != number // 2)
        for number, rank in enumerate(alone)
    )
    # Half of it, but that single ranks push nothing of a layer that they left out.
    for ranks in (led, shared):
        assert sum(rank["tx"] for rank in ranks) < 0.65 * between
    assert [rank["tx"] > 0 for rank in led] == [True, False, True, False]
    assert all(rank["tx"] > 0 for rank in shared)
    for rank in (*led, *shared):
        assert rank["channel"]["local_bytes"] > 0
    for ranks in (led, shared):
        # Whoever comes last waits for nothing, but somebody does in each step.
        assert {"stem.weight", "gradlane's rank statuses"}.intersection(
            row["name"] for rank in ranks for row in rank["waits"]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1, "accumulate": 2},
        {"defer": False, "buffers": "average"},
        {"strategy": "ring"},
        {"strategy": "wfbp", "slice_elems": 1000},
    ],
)
def test_clipping_accumulation_and_strategies(pool: RankPool, options: dict[str, Any]) -> None:
    led = pool.run(f"{HERE}:trained", local="leader", steps=3, **options)
    shared = pool.run(f"{HERE}:trained", local="shared", steps=3, **options)
    assert len({rank["digest"] for rank in (*led, *shared)}) == 1


@pytest.mark.parametrize("local", ["leader", "shared"])
def test_clipping_as_means_arrive_and_whole_gives_the_same_bits(pool: RankPool, local: str) -> None:
    options: dict[str, Any] = {"local": local, "clip_by_session": 0.2, "steps": 6}
    arriving = pool.run(f"{HERE}:trained", **options)
    whole = pool.run(f"{HERE}:trained", defer=False, **options)
    for one, other in zip(arriving, whole, strict=True):
        assert one["digest"] == other["digest"] == arriving[0]["digest"]
        assert one["norms"] == other["norms"] == arriving[0]["norms"]
        assert min(one["norms"]) > 0.2


@pytest.mark.parametrize("local", ["leader", "shared"])
def test_a_session_closes_once_the_leaders_threads_are_done(pool: RankPool, local: str) -> None:
    """No rank tells the others of a failure, however late those threads run."""
    options: dict[str, Any] = {"local": local, "clip_by_session": 0.2, "defer": False, "steps": 2}
    slow = pool.run(f"{HERE}:trained_with_slow_leaders", **options)
    assert [rank["failures"] for rank in slow] == [[]] * 4
    assert slow[0]["digest"] == pool.run(f"{HERE}:trained", **options)[0]["digest"]


def test_a_codec_between_nodes(pool: RankPool) -> None:
    led = pool.run(f"{HERE}:trained", local="leader", codec="qsgd:bits=8", steps=3)
    assert len({rank["digest"] for rank in led}) == 1


@pytest.mark.parametrize("sums", ["host", "collective"])
@pytest.mark.parametrize(
    ("codec", "momentum", "strategy"),
    [
        ("bf16:residual=on", 0.0, "p3"),
        ("onebit", 0.0, "ring"),
        ("topk:ratio=0.05", 0.0, "wfbp"),
        ("dgc:ratio=0.05", 0.9, "p3"),
    ],
)
def test_error_feedback_between_nodes_is_that_of_ranks_with_their_gradients(
    pool: RankPool, tmp_path: Path, codec: str, momentum: float, strategy: str, sums: str
) -> None:
    """Codecs that draw no numbers: the bits are those of two ranks, also from a state on, and where
    a timeline is recorded."""
    given: dict[str, Any] = {"codec": codec, "momentum": momentum}
    traced: dict[str, Any] = {"trace": str(tmp_path / "trace.json")} if sums == "host" else {}
    nodes = set(pool.run(f"{HERE}:feedback_of_nodes", ranks=NODES, **given, strategy=strategy))
    ranks = pool.run(
        f"{HERE}:feedback", local="leader", local_sums=sums, strategy=strategy, **given, **traced
    )
    for rank in ranks:
        assert {rank["right"], rank["again"]} == nodes
        assert rank["without"] not in nodes, "the residuals count"
        assert rank["common"] == LOCAL_SIZE
    kept = [rank["residuals"] for rank in ranks]
    for kind in ("mean_worker_residual", "owner_residual"):
        assert all(map(any, kept[0][kind].values()))
    halves = set() if codec.startswith("bf16") else {"3.weight"}
    assert set(kept[0]["worker_residual"]) == {"0.weight", "2.weight"} | halves
    for kind in ("mean_worker_residual", "owner_residual"):
        assert all(one[kind] == kept[0][kind] for one in kept)
    own = [one["worker_residual"] for one in kept]
    assert all(any(map(any, one.values())) for one in own)
    assert own[0] == own[1] != own[2] == own[3]


def test_a_checkpoint_has_the_residuals_of_nodes(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(f"{HERE}:feedback_restored", folder=str(tmp_path), local="leader")
    assert len({digest for rank in ranks for digest in rank}) == 1


@pytest.mark.parametrize(
    "ways", [["off", "leader"], ["leader", "off"], ["leader", "leader"], ["off", "off"]]
)
def test_residuals_of_nodes_and_of_ranks_become_each_other(pool: RankPool, ways: list[str]) -> None:
    """Each rank's own among the same; else their mean, since they are of other gradients."""
    for before, after in pool.run(f"{HERE}:feedback_moves", ways=ways):
        kind = "worker_residual" if ways[0] == ways[1] else "mean_worker_residual"
        assert after["worker_residual"] == before[kind]
        assert after["owner_residual"] == before["owner_residual"]
        assert any(before["worker_residual"])


def test_one_node_has_the_bits_of_ranks_alone(pool: RankPool) -> None:
    alone = pool.run(f"{HERE}:trained", local="off", steps=3)
    led = pool.run(f"{HERE}:trained", local="leader", local_size=4, steps=3)
    assert {rank["digest"] for rank in (*alone, *led)} == {alone[0]["digest"]}


@pytest.mark.parametrize("local", ["leader", "shared"])
def test_the_last_ranks_state_is_handed_over(pool: RankPool, local: str) -> None:
    assert len(set(pool.run(f"{HERE}:uneven", local=local))) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": "leader", "strategy": "kvstore"}, 'strategy="kvstore"'),
        ({"local": "leader", "update": "server"}, 'update="server"'),
        ({"local": "shared", "codec": "qsgd:bits=4"}, "codec 'qsgd:bits=4'"),
        ({"local": "shared", "codec": "onebit"}, "codec 'onebit'"),
        ({"local": "leader", "codec": "onebit"}, "opened"),
        ({"local": "leader", "local_size": 4, "codec": "dgc"}, "takes the optimizer's momentum"),
        ({"local": "leader", "local_size": 4, "codec": "onebit"}, "opened"),
        ({"local": "leader", "local_size": 4, "going_on": True}, "its ranks are lost as one"),
        ({"local": "leader", "scheme": "sfb"}, "opened"),
        ({"local": "leader", "scheme": "adam"}, "a single rank makes the mean of a layer"),
        ({"local": "shared", "scheme": "adam"}, "a single rank makes the mean of a layer"),
        ({"local": "leader", "stragglers": "drop"}, "a late one makes all of them late"),
        ({"local": "twice"}, "unknown local 'twice'"),
        ({"local": "auto", "codec": "onebit"}, "opened"),
        ({"local": "auto", "local_size": 4, "codec": "dgc"}, "opened"),
        ({"local": "auto", "update": "server"}, "opened"),
    ],
)
def test_what_does_not_go_together(pool: RankPool, options: dict[str, Any], words: str) -> None:
    for said in pool.run(f"{HERE}:refused", **options):
        assert words in said


def test_ranks_that_are_dealt_out_in_turns(pool: RankPool) -> None:
    for said in pool.run(f"{HERE}:another_block", local="leader"):
        assert "rank 1 has local rank 0 of 2, not 1" in said
    assert set(pool.run(f"{HERE}:another_block", local="auto")) == {"opened"}


@pytest.mark.parametrize(("victim", "local"), [(0, "leader"), (3, "leader"), (1, "shared")])
def test_a_rank_that_gives_up_is_named_everywhere(pool: RankPool, victim: int, local: str) -> None:
    heard = pool.run(f"{HERE}:lost", victim=victim, how="abort", local=local)
    for rank, words in enumerate(heard):
        if rank != victim:
            assert words[0] == victim
            assert words[1] in (2, 3)
            assert "the test says so" in words[2]


@pytest.mark.parametrize(("victim", "local"), [(3, "leader"), (0, "shared")])
def test_a_rank_that_is_killed_is_noticed_at_once(victim: int, local: str) -> None:
    check_that_all_name_the_lost_rank(victim, "kill", local=local)


@pytest.mark.parametrize(("victim", "local"), [(3, "leader"), (0, "leader"), (1, "shared")])
def test_a_rank_that_stands_still_is_named_by_its_node(victim: int, local: str) -> None:
    check_that_all_name_the_lost_rank(victim, "stop", local=local, silence_timeout_s=2.0)


def test_a_plan_that_is_found_knows_the_nodes_and_may_add_up_on_them(pool: RankPool) -> None:
    ranks = pool.run(f"{HERE}:planned")
    assert [rank["nodes_of"] for rank in ranks] == [[LOCAL_SIZE], [], [], []]
    assert {rank["local"] for rank in ranks} == {"leader"}
    assert len({rank["digest"] for rank in ranks}) == 1
    for number, rank in enumerate(ranks):
        assert rank["sent"][-1] > 0
        # The sample after a step may be taken before its bytes leave; the last one is of all steps.
        after_last_but_one, *_, in_the_end = rank["sent"][-3:]
        assert (in_the_end > after_last_but_one) == (number % LOCAL_SIZE == 0)
