"""Lab runs: what is accepted, what is measured, and what is computed from it.

The runs under namespaces use replays of a few kilobytes, so they take seconds; no measured time
decides a test.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import gradlane
from gradlane.formats.rates import format_rate, parse_rate
from gradlane.formats.timeline.checks import check_events
from gradlane.formats.timeline.chrome import read_chrome, to_chrome
from gradlane.lab.cluster.counters import TrafficSampler
from gradlane.lab.cluster.errors import RankError
from gradlane.lab.runs import run as run_module
from gradlane.lab.runs.notes import loss_over_time, loss_table
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row, save_rows, summarize
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy, with_rules, with_updates
from gradlane.planning.simulation.lists import parse_rates
from gradlane.planning.simulation.straggler import parse_straggler
from gradlane.training.plans.settings import LEARNING_STEPS
from gradlane_papers.experiments.utilization import with_activity
from tests.built import needs_core
from tests.command_line import run
from tests.formats.timeline.names import named
from tests.namespaces import needs_namespaces

LAST_RESORT_S = 1800
"""A run ends by its own limits, which begin anew with each step of a rank: a busy machine stays
within them, however long all steps take together. This ends a test whose limits fail."""


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("4gbit", 4_000_000_000),
        ("500mbit", 500_000_000),
        ("10g", 10_000_000_000),
        ("2.5Gbps", 2_500_000_000),
        ("800 Mbit/s", 800_000_000),
        ("56kbit", 56_000),
        ("1000000", 1_000_000),
        ("1e9", 1_000_000_000),
    ],
)
def test_rates_are_read_as_people_write_them(text: str, rate_bps: int) -> None:
    """Prefixes are decimal."""
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize("text", ["", "fast", "-1gbit", "0", "4 gigabytes", "4gbit,5gbit", "nan"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    """The message shows how to write one."""
    with pytest.raises(ValueError, match="4gbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["4", "10", "2.5", "0.5", " 999999 "])
def test_a_rate_whose_unit_was_forgotten_is_refused_with_one(text: str) -> None:
    with pytest.raises(ValueError, match=f"has no unit: {text.strip()}gbit"):
        parse_rate(text)
    assert parse_rate(f"{text.strip()}kbit") == int(1000 * float(text))


RATES = {
    "whatif": ["resnet50", "--rate", "4"],
    "whatif of a node": ["resnet50", "--rate", "4gbit", "--local-rate", "4"],
    "plan": ["resnet50", "--workers", "4", "--rate", "4"],
    "lab run": ["--workload", "resnet50", "--rate", "4gbit,4"],
    **{f"lab {name}": ["--rate", "4"] for name in ("transport", "calibrate")},
    **{f"lab {name}": ["--rate", "4"] for name in ("bandwidth", "utilization", "scaling")},
    "lab slices": ["--rate", "1,4"],
}
"""Every command that takes a rate, and where it is given without a unit."""


@pytest.mark.parametrize("command", RATES)
def test_every_command_refuses_a_rate_without_a_unit_by_naming_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = command.partition(" of ")[0].split()
    status, _, errors = run(monkeypatch, capsys, *words, *RATES[command])
    assert status == 2
    assert "has no unit" in errors and "gbit for 10^9 bits a second" in errors


def test_a_rate_is_read_as_it_is_printed() -> None:
    for rate_bps in (1_500_000_000, 4_000_000_000, 250_000_000, 1_000):
        assert parse_rate(format_rate(rate_bps)) == rate_bps
    assert parse_rates("1, 4, 10 gbit") == [10**9, 4 * 10**9, 10**10]


def test_rates_are_printed_shortly() -> None:
    """Four digits are enough for a table."""
    assert format_rate(3_822_471_000) == "3.822 Gbit/s"
    assert format_rate(400e6) == "400 Mbit/s"


def test_strategies_are_parsed() -> None:
    """Bucket sizes belong to DDP; the written name is kept for the results."""
    strategies = parse_strategies("none, ddp-gloo,ddp-gloo:1,ddp-gather:4,p3,deferred-pull,ring")
    assert [strategy.text for strategy in strategies] == [
        "none",
        "ddp-gloo",
        "ddp-gloo:1",
        "ddp-gather:4",
        "p3",
        "deferred-pull",
        "ring",
    ]
    assert [strategy.bucket_mb for strategy in strategies] == [0, 25, 1, 4, 0, 0, 0]
    assert [strategy.is_baseline for strategy in strategies] == [0, 1, 1, 0, 0, 0, 0]
    own = [strategy.slice_elems(None) for strategy in strategies]
    assert own == [None] * 4 + [50_000, None, 16_384]
    assert strategies[-1].slice_elems(None, encoded=True) == 65_536
    assert [strategy.slice_elems(7) for strategy in strategies] == [None] * 4 + [7, 7, 7]
    assert [strategy.sums_in_rank_order for strategy in strategies] == [0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one"),
        ("p4", "p3"),
        ("p3:1", "ddp-gloo"),
        ("ddp-gloo:", "bucket"),
        ("ddp-gloo:-1", "bucket"),
        ("ddp-gloo:nan", "bucket"),
        ("p3,p3", "once"),
    ],
)
def test_wrong_strategies_are_refused(text: str, message: str) -> None:
    """The message says what there is."""
    with pytest.raises(ValueError, match=message):
        parse_strategies(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": "alexnet2"}, "resnet50"),
        ({"workers": 1}, "workers is 1"),
        ({"rates_bps": []}, "rate"),
        ({"dilation": 0.0}, "dilation"),
        ({"dilation": float("nan")}, "dilation"),
        ({"steps": 0}, "steps"),
        ({"warmup": -1}, "warmup"),
        ({"repeat": 0}, "repeat"),
        ({"slice_elems": 0}, "slice-elems"),
        ({"codec": "zip"}, "no codec is named"),
        ({"batch_time_s": 0.0}, "batch-time-s"),
        ({"profile_path": Path("/nowhere/profile.json")}, "/nowhere"),
        ({"strategies": []}, "strategy"),
        ({"trace_path": Path("t.json")}, "these are 0"),
        ({"slice_elems": 9}, "--slice-elems has no effect without one of gradlane's strategies"),
        ({"codec": "qsgd"}, r"--codec has no effect .* ddp-gloo\+CODEC"),
        ({"servers": 2}, "--servers has no effect"),
        ({"servers": 2, "strategies": parse_strategies("ring")}, "a ring has no servers"),
        (
            {"codec": "qsgd:ring=integer", "strategies": parse_strategies("p3")},
            "ring=integer is how one adds up",
        ),
        ({"trace_path": Path("t.json"), "strategies": parse_strategies("p3,wfbp")}, "these are 2"),
    ],
)
def test_wrong_options_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    """Nothing is started for options that cannot work."""
    good: dict[str, Any] = {"workload": "resnet50", "strategies": parse_strategies("none")}
    LabOptions(**good)
    with pytest.raises(ValueError, match=message):
        LabOptions(**{**good, **change})


def row(strategy: str, repeat: int, step_s: float, **change: Any) -> Row:
    """Return a row with this step time, and a bound of 1 s."""
    values: dict[str, Any] = {
        "workload": "resnet50",
        "strategy": strategy,
        "rate_bps": 10**9,
        "repeat": repeat,
        "step_s_median": step_s,
        "samples_per_s": 1 / step_s,
        "bound_step_s": 1.0,
        "link_utilization": 0.5,
        "cpu_share": 0.25,
    }
    return Row(**{**values, **change})


def test_a_rule_for_stragglers_needs_a_strategy_that_knows_it() -> None:
    with pytest.raises(ValueError, match="--stragglers drop has no effect"):
        with_rules(parse_strategies("none,ddp-gloo:25"), "drop")


def test_the_size_from_which_on_kvstore_splits_stands_in_rows() -> None:
    (kvstore,) = parse_strategies("kvstore")
    assert kvstore.slice_elems(None) is None
    assert kvstore.slice_elems(5_000) == 5_000


def test_ratios_are_taken_within_a_repeat_against_the_best_ddp() -> None:
    """The machine was slower in the second repeat, and for all strategies alike."""
    rows = [
        row("none", 0, 0.9),
        row("ddp-gloo:25", 0, 1.5),
        row("ddp-gloo:1", 0, 1.4),
        row("ddp-gather", 0, 1.2),
        row("p3", 0, 1.0),
        row("ddp-gloo:25", 1, 2.8),
        row("ddp-gloo:1", 1, 3.0),
        row("p3", 1, 2.0),
        row("ddp-gloo:25", 2, 1.5),
        row("p3", 2, 1.25),
    ]
    rows = summarize(rows)
    p3 = [one for one in rows if one.strategy == "p3"]
    assert [one.speedup_over_ddp for one in p3] == pytest.approx([1.4, 1.4, 1.2])
    assert [one.step_over_bound for one in p3] == pytest.approx([1.0, 2.0, 1.25])
    over = p3[0].over_repeats
    assert over is not None
    assert (over.repeats, over.step_s) == (3, 1.25)
    assert over.speedup_over_ddp == pytest.approx(1.4)
    assert over.step_over_bound == pytest.approx(1.25)
    assert rows[0].step_over_bound is None


def test_ratios_do_not_cross_rates_or_workloads() -> None:
    """A row without a DDP of its own has no ratio."""
    rows = [
        row("ddp-gloo", 0, 2.0),
        row("p3", 0, 1.0, rate_bps=2 * 10**9),
        row("p3", 0, 1.0, workload="vgg19"),
        row("p3", 0, 1.0, bound_step_s=None),
    ]
    rows = summarize(rows)
    assert [one.speedup_over_ddp for one in rows] == [1.0, None, None, 2.0]
    assert rows[3].step_over_bound is None


def small_profile(folder: Path) -> Path:
    """A model of 24,600 parameters in three layers."""
    sizes = {"head.weight": [10, 200], "middle.weight": [100, 200], "first.weight": [26, 100]}
    path = folder / "profile.json"
    params = [
        {
            "name": name,
            "shape": shape,
            "numel": shape[0] * shape[1],
            "grad_ready_s": 0.004 * (index + 1),
        }
        for index, (name, shape) in enumerate(sizes.items())
    ]
    content = {"batch_time_s": 0.02, "backward_time_s": 0.012, "params": params}
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A small profile."""
    return small_profile(tmp_path)


@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_a_run_measures_what_is_known_in_advance(profile: Path, tmp_path: Path) -> None:
    """Two ranks, three strategies, two repeats: bytes, sums, equality and interleaving."""
    options = LabOptions(
        workload="resnet50",
        strategies=parse_strategies("none,ddp-gloo:25,ddp-gather"),
        workers=2,
        rates_bps=[100_000_000],
        dilation=1.0,
        repeat=2,
        steps=20,
        warmup=1,
        profile_path=profile,
    )
    saved = tmp_path / "rows.json"
    rows = run_lab(
        options,
        on_rows=lambda finished: save_rows(finished, saved),
        on_recording=with_activity,
    )
    assert [(one.repeat, one.strategy) for one in rows] == [
        (0, "none"),
        (0, "ddp-gloo:25"),
        (0, "ddp-gather"),
        (1, "ddp-gloo:25"),
        (1, "ddp-gather"),
        (1, "none"),
    ]
    # Either scheme moves one model's worth of bytes a step between two ranks, and headers.
    model_bytes = 4 * (10 * 200 + 100 * 200 + 26 * 100)
    for one in rows:
        assert len(one.step_s) == 20
        assert one.bound_step_s is not None
        if one.strategy == "none":
            assert one.tx_bytes_per_step < 0.1 * model_bytes
            assert not one.params_equal
        else:
            assert 0.9 * model_bytes < one.tx_bytes_per_step < 1.2 * model_bytes
            assert one.params_equal
            assert one.verified_tensors == 2 * 3
    # Bytes of all intervals are those of the whole window, but for its last part of an interval,
    # and what a port carries between two samples at both of its ends.
    for one in rows:
        assert one.activity is not None
        sent_bytes = sum(map(sum, one.activity.sent_bytes)) / 2
        assert sent_bytes <= 1.2 * one.tx_bytes_per_step * 20 + 1000
        seen_late_s = one.activity.wall_interval_s + 2 * one.activity.wall_sample_gap_s_max
        seen_late_bytes = one.rate_bps / 8 * seen_late_s
        assert sent_bytes >= 0.8 * one.tx_bytes_per_step * 20 - seen_late_bytes - 1000
        assert len(one.activity.step_starts_s) == 21 and len(one.activity.rank_cpu_s) == 2
    # Sums of two are the same in any order, and repeats are the same runs.
    assert len({one.param_digest for one in rows if one.strategy != "none"}) == 1
    assert json.loads(saved.read_text()) == [one.to_json() for one in rows]


@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
@pytest.mark.parametrize("steps", [1, 3])
def test_bytes_of_a_step_are_those_of_a_step(
    profile: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first values' are counted nor what is still to be sent when a step ends lost.

    A busy machine takes samples late: here none but the first and the last are taken.
    """
    rarely = functools.partial(TrafficSampler, interval_s=3600.0)
    monkeypatch.setattr(run_module, "TrafficSampler", rarely)
    options = LabOptions(
        workload="resnet50",
        strategies=parse_strategies("p3"),
        workers=2,
        rates_bps=[20_000_000],
        dilation=1.0,
        steps=steps,
        warmup=0,
        profile_path=profile,
    )
    (row,) = run_lab(options)
    expected = row.expected_tx_bytes
    assert expected is not None
    assert 1.0 < row.tx_bytes_per_step / expected < 1.15
    assert row.balance is not None
    for node in row.balance.nodes:
        assert 1.0 < node.rx_bytes_per_step / expected < 1.15
        assert 1.0 < node.tx_bytes_per_step / expected < 1.15
    # The two small tensors travel together; what tells of absent ones is not sent without any.
    unsent = [owner.owned_bytes - owner.rx_bytes_per_step for owner in row.balance.owners]
    assert sorted(unsent) == [0, 2 * 4]
    for owner in row.balance.owners:
        assert owner.rx_bytes_per_step == owner.tx_bytes_per_step


@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_a_run_can_be_looked_at(profile: Path, tmp_path: Path) -> None:
    """The timeline of all ranks, in one file."""
    path = tmp_path / "trace.json"
    options = LabOptions(
        workload="resnet50",
        strategies=parse_strategies("p3"),
        workers=2,
        rates_bps=[200_000_000],
        dilation=2.0,
        steps=3,
        warmup=1,
        profile_path=profile,
        trace_path=path,
    )
    one = run_lab(options)[0]
    timeline = read_chrome(path)
    check_events(to_chrome(timeline))
    assert timeline.rate_bps == 200_000_000 and timeline.facts["workload"] == "resnet50"
    for rank in range(2):
        own = [span for span in timeline.spans if span.rank == rank]
        trained = {span.arguments["step"] for span in own if span.lane == "forward"}
        assert trained == set(range(1, one.warmup + one.steps + 1))
        # The first step is not of training: there all travel alone.
        received = named(
            span for span in own if span.lane == "receive" and span.arguments["step"] > 0
        )
        assert received >= {"first.weight", "middle.weight", "head.weight"}


OTHERS = "p3,slicing,ring,asgd,auto:any-rounding"


@pytest.mark.slow
@needs_core
@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_all_strategies_of_gradlane_learn_what_rank_order_summing_learns(profile: Path) -> None:
    """Three ranks: bit-identical to DDP with a gather-and-sum hook, whatever the slice size.

    A ring learns the mean to rounding, the same on all ranks, and so does what `auto` finds where
    it may; of `asgd` nothing is known but that all end with the same. With `auto` the steps in
    which a plan is found are none of the measured ones.
    """
    in_rank_order = "ddp-gather,p3,slicing,wfbp,kvstore,deferred-pull"
    rows = {}
    for slice_elems, names in ((None, f"{in_rank_order},auto"), (777, OTHERS)):
        options = LabOptions(
            workload="resnet50",
            strategies=parse_strategies(names),
            workers=3,
            rates_bps=[100_000_000],
            dilation=1.0,
            steps=5,
            warmup=1,
            slice_elems=slice_elems,
            profile_path=profile,
        )
        rows.update({(one.strategy, slice_elems): one for one in run_lab(options)})
    assert all(one.params_equal for one in rows.values())
    late = rows["asgd", 777]
    assert late.metrics["staleness_by_rank"]
    assert all(one.verified_tensors == 3 * 3 for one in rows.values() if one is not late)
    alone = {("auto", None), *((name, 777) for name in ("ring", "asgd", "auto:any-rounding"))}
    assert len({one.param_digest for key, one in rows.items() if key not in alone}) == 1
    ring, auto, fixed = rows["ring", 777], rows["auto", None], rows["p3", None]
    # Either way round the ring, less its own share; what is queued at the end can be a step's.
    share = 2 * 2 / 3 * 4 * (10 * 200 + 100 * 200 + 26 * 100)
    assert 0.75 * share < ring.tx_bytes_per_step < 1.3 * share
    assert auto.warmup == LEARNING_STEPS + 1 and len(auto.step_s) == 5
    plan = auto.metrics["plan"]
    assert plan["cluster"]["workers"] == 3
    # A busy machine does not fill the link.
    assert 0.0 < plan["cluster"]["rate_bps"] < 2e8
    assert plan["settings"]["strategy"]
    assert "plan" not in fixed.metrics


def test_local_updates_are_run_beside_exact_ones() -> None:
    texts = ["local:steps=4,outer=average", "local"]
    found = with_updates(parse_strategies("none,p3,ring"), texts)
    named = ["p3", f"p3/{texts[0]}", "p3/local", "ring", f"ring/{texts[0]}", "ring/local"]
    assert [one.text for one in found] == ["none", *named]
    assert found[2].rounds == gradlane.Local(steps=4, outer="average") == found[2].update
    assert found[1].rounds is None and found[1].update == "worker"
    # A name in a list, or of a row, is read again.
    assert parse_strategies(",".join(one.text for one in found)) == found
    sealed = parse_strategy("p3/sealed/local:steps=2")
    assert sealed.sealed and sealed.rounds == gradlane.Local(steps=2)


@pytest.mark.parametrize(
    ("strategies", "update", "message"),
    [
        ("p3", "local:steps=0", "local_steps is 0"),
        ("p3", "diloco", "is not 'local'"),
        ("none", "local", "--update local has no effect"),
        ("auto", "local", "leave plan out"),
        ("sfb", "local:steps=8", "no product of one batch's factors"),
        ("asgd", "local:steps=8", "applies each gradient at once"),
        ("p3", "local:steps=3", "give --steps 9"),
    ],
)
def test_local_updates_that_cannot_be_run_are_refused(
    strategies: str, update: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LabOptions(
            workload="resnet50",
            strategies=with_updates(parse_strategies(strategies), [update]),
            steps=8,
        )


@needs_core
@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_what_ranks_refuse_is_told_once_and_without_calls() -> None:
    """There are more fragments than layers, and only the ranks have the model."""
    options = LabOptions(
        workload="digits-cnn",
        strategies=with_updates(parse_strategies("p3"), ["local:steps=50,fragments=50"]),
        workers=2,
        rates_bps=[1_000_000_000],
        steps=50,
        warmup=0,
        paced=False,
    )
    with pytest.raises(RankError) as caught:
        run_lab(options)
    assert str(caught.value).count("fragments is 50, but the model has") == 1
    assert not caught.value.details


@pytest.mark.slow
@needs_core
@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_local_updates_send_so_many_times_less() -> None:
    """Turns are counted, and what ends the last round is not."""
    updates = ["local:steps=4", "local:steps=4,fragments=2,overlap_steps=1,mix=0.5"]
    options = LabOptions(
        workload="digits-cnn",
        strategies=with_updates(parse_strategies("none,p3"), updates),
        workers=2,
        rates_bps=[1_000_000_000],
        steps=8,
        warmup=3,
        paced=False,
    )
    _, exact, *local = run_lab(options)
    assert [one.warmup for one in local] == [4, 4] and exact.warmup == 3
    assert exact.expected_tx_bytes is not None
    for one in local:
        assert one.params_equal and len(one.step_s) == 8 and one.evaluation is not None
        assert one.expected_tx_bytes == pytest.approx(exact.expected_tx_bytes / 4)
        assert one.tx_bytes_per_step == pytest.approx(one.expected_tx_bytes, rel=0.1)
        assert one.step_s_median == pytest.approx(one.step_s_mean)


@pytest.mark.slow
@needs_core
@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_a_stopped_rank_is_left_out_and_all_hold_the_same_in_the_end() -> None:
    """Who is late is up to the machine; digests, counts and losses of all steps are not."""
    rules = "wait,drop,backup=1:carry"
    options = LabOptions(
        workload="digits-cnn",
        strategies=with_rules(parse_strategies("p3"), rules),
        workers=3,
        rates_bps=[1_000_000_000],
        dilation=1.0,
        steps=12,
        warmup=2,
        servers=2,
        paced=False,
        straggler=parse_straggler("rank=2,share=0.5,burst=10ms"),
    )
    rows = {one.strategy: one for one in run_lab(options)}
    assert list(rows) == ["p3", "p3/drop", "p3/backup=1:carry"]
    for one in rows.values():
        assert one.params_equal, f"{one.strategy}: ranks hold different parameters"
        assert one.straggler == {"rank": 2, "share": 0.5, "burst_s": 0.01}
        assert len(one.loss) == 14 and len(one.step_s) == 12
        assert one.evaluation is not None
    assert not rows["p3"].metrics["left_out"]
    backup = rows["p3/backup=1:carry"]
    assert backup.late == "carry" and backup.metrics["decided_steps"] == 14
    assert sum(row["left_out_steps"] for row in backup.metrics["left_out"]) == 14
    table = loss_table(list(rows.values()))
    assert table is not None and table.row_count == 3
    times_s, losses = loss_over_time(rows["p3/drop"])
    assert len(times_s) == len(losses) == 12 and times_s == sorted(times_s)
    assert losses == rows["p3/drop"].loss[2:]


@pytest.mark.slow
@needs_core
@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_servers_on_nodes_of_their_own_learn_the_same() -> None:
    options = LabOptions(
        workload="digits-cnn",
        strategies=parse_strategies("none,ddp-gather,p3,wfbp"),
        workers=2,
        serving=1,
        rates_bps=[1_000_000_000],
        dilation=1.0,
        steps=4,
        warmup=1,
        paced=False,
    )
    rows = {one.strategy: one for one in run_lab(options)}
    assert len({rows[name].param_digest for name in ("ddp-gather", "p3", "wfbp")}) == 1
    assert (rows["p3"].serving, rows["ddp-gather"].serving) == (1, 0)
    balance = rows["p3"].balance
    assert balance is not None
    workers, (server,) = balance.owners[:2], balance.owners[2:]
    assert [one.owned_bytes for one in workers] == [0, 0]
    assert server.owned_bytes > 0
    # All gradients go to the server's node, and all results come from there.
    loads = [min(one.rx_bytes_per_step, one.tx_bytes_per_step) for one in balance.nodes]
    assert loads[2] > 1.8 * max(loads[:2]) > 0
    assert rows["p3"].expected_tx_bytes == pytest.approx(server.owned_bytes, rel=0.01)


@needs_namespaces
@pytest.mark.timeout(LAST_RESORT_S)
def test_a_rank_that_cannot_build_its_workload_fails_the_run(tmp_path: Path) -> None:
    """The run ends with the rank's own words."""
    profile = tmp_path / "profile.json"
    profile.write_text('{"params": []}')
    options = LabOptions(
        workload="resnet50",
        strategies=[parse_strategy("none")],
        workers=2,
        rates_bps=[100_000_000],
        dilation=1.0,
        profile_path=profile,
    )
    with pytest.raises(RankError, match="params"):
        run_lab(options)
