"""Ranks join a training that runs, and some are killed meanwhile: the same bits on all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model, loss_of
from tests.training.model.joining_rank import (
    EPOCHS,
    STEPS_AFTER,
    digest_of,
    optimizer_of,
    scheduler_of,
)
from tests.training.model.test_going_on_processes import Bf16Means, Means, RingMeans
from tests.training.model.test_going_on_processes import check_reference as check_each_tensor
from tests.waiting import eventually

pytestmark = needs_core

PATIENT_S = 120.0
BUFFERS_MB = 0.001608
"""Of the model."""
JOINING = "gradlane.training.session.joining"
PRECOPY = "gradlane.training.model.precopy"


class Run:
    """A training of some ranks that others join, as all have ended."""

    def __init__(
        self,
        programs: ForkedPrograms,
        folder: Path,
        *,
        joiners: int = 1,
        world_size: int = 3,
        fatal: Mapping[str, str] | None = None,
        fatal_after: Mapping[str, tuple[str, str]] | None = None,
        fatal_steps: Mapping[str, tuple[int, int]] | None = None,
        numbers: Mapping[str, int] | None = None,
        joins_after: Callable[[], bool] = lambda: True,
        pause_s: float = 0.01,
        local_size: int = 1,
        prepares_anew: bool = False,
        spoils: Mapping[str, str] | None = None,
        raises: Mapping[str, str] | None = None,
        is_small: bool = False,
        samples: int = 0,
        slow: float = 0.0,
        one_by_one: bool = True,
        losses: int = 0,
        kill_all_when: Callable[[], bool] | None = None,
        refused: Mapping[str, Any] | None = None,
        other_optimizer: bool = False,
        **options: Any,
    ) -> None:
        """Start all ranks, and wait for those that survive.

        Args:
            programs: forks the ranks.
            folder: for files.
            joiners: ranks that come later, by the labels `joiner-0`...
            world_size: ranks of the start, by the labels `0`, `1`...
            fatal: by label, the function in whose first call a rank is killed.
            fatal_after: the same, in the first call after a rank has `joined` or was `lost`.
            fatal_steps: by label, the step in whose backward a rank is killed, counted from the
                start or the last join on, and after how many joins.
            numbers: by label, the number whose batches a rank has in place of its own; the state
                after each step is then kept.
            joins_after: comes true before the first rank that comes later is started.
            pause_s: seconds after each step.
            local_size: ranks of a machine, as a launcher would say.
            prepares_anew: whether all prepare the model anew in the end, and train on.
            spoils: by label, a function that does nothing on a rank.
            raises: by label, a function that fails on a rank.
            is_small: whether the model has one parameter, and its optimizer no state.
            samples: of an epoch, or 0.
            slow: seconds that each file of a checkpoint takes.
            one_by_one: whether a joiner is started once the one before has joined or ended.
            losses: members that all see lost before they end, at least.
            kill_all_when: comes true while the ranks train, which are then all killed; None: they
                end by themselves.
            refused: options of ranks that come later in place of the others', with which each ends
                by an error; None: the same.
            other_optimizer: whether those have another optimizer.
            options: further options of the sessions.
        """
        fatal, fatal_after = fatal or {}, fatal_after or {}
        fatal_steps = fatal_steps or {}
        victims = {*fatal, *fatal_after, *fatal_steps}
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = folder / "job.json"
        labels = [str(rank) for rank in range(world_size)]
        later = [f"joiner-{number}" for number in range(joiners)]
        turned_away = set(later) if refused is not None else set()
        job = {
            "port": store.port,
            "folder": str(folder),
            "world_size": world_size,
            # Where all are killed it goes on until then.
            "joins": len(set(later) - victims) if kill_all_when is None else 1000,
            "losses": losses,
            "fatal": fatal,
            "fatal_after": fatal_after,
            "fatal_steps": fatal_steps,
            "numbers": numbers or {},
            "pause_s": pause_s,
            "prepares_anew": prepares_anew,
            "spoils": spoils or {},
            "raises": raises or {},
            "is_small": is_small,
            "joiner_options": refused or {},
            "other_optimizer": other_optimizer,
            "slow": slow,
            "samples": samples,
            "options": {
                "going_on": True,
                "connect_timeout_s": PATIENT_S,
                "silence_timeout_s": PATIENT_S,
                "progress_timeout_s": PATIENT_S,
                **options,
            },
        }
        path.write_text(json.dumps(job))
        self._programs, self._folder = programs, folder
        self._local_size = local_size
        self._pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        try:
            for rank, label in enumerate(labels):
                self._start(label, path, {"RANK": str(rank)})
            assert eventually(joins_after, PATIENT_S)
            for label in later:
                self._start(label, path, {})
                if label in victims | turned_away:
                    self._wait(label)
                elif one_by_one:
                    self._wait_until_joined(label)
            if kill_all_when is not None:
                assert eventually(kill_all_when, PATIENT_S)
                victims = set(self._pids) - turned_away
                for label in victims:
                    os.kill(self._pids[label], signal.SIGKILL)
            for label in (*labels, *later):
                if label not in self.codes:
                    self._wait(label)
        finally:
            for pid in self._pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.errors = {label: (folder / f"errors-{label}").read_text() for label in self._pids}
        self.survivors = [label for label in self._pids if label not in victims | turned_away]
        ends = dict.fromkeys(victims, -signal.SIGKILL) | dict.fromkeys(turned_away, 1)
        expected = {label: ends.get(label, 0) for label in self._pids}
        assert self.codes == expected, self.errors
        self.results: dict[str, dict[str, Any]] = {
            label: json.loads((folder / f"{label}.json").read_text()) for label in self.survivors
        }

    def rows_of(self, label: str) -> list[list[Any]]:
        """Return step, world size and digest of each step that a rank has ended."""
        text = (self._folder / f"rows-{label}").read_text()
        # One that was killed may have left a part of a line.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _start(self, label: str, path: Path, place: dict[str, str]) -> None:
        local = {
            "LOCAL_RANK": str(len(self._pids) % self._local_size),
            "LOCAL_WORLD_SIZE": str(self._local_size),
        }
        self._pids[label] = self._programs.start(
            f"{self._folder}-{label}",
            program="tests.training.model.joining_rank",
            arguments=[str(path)],
            output=str(self._folder / f"output-{label}"),
            errors=str(self._folder / f"errors-{label}"),
            environment={"LABEL": label, **local, **place},
        )

    def _wait(self, label: str) -> None:
        self.codes[label] = self._programs.wait(f"{self._folder}-{label}", PATIENT_S)

    def _wait_until_joined(self, label: str) -> None:
        end_s = time.monotonic() + PATIENT_S
        while "has joined" not in (self._folder / f"errors-{label}").read_text():
            assert time.monotonic() < end_s
            time.sleep(0.05)

    def check_alike(self) -> None:
        """Check that all ranks that end together had the same bits, rates and places."""
        first = self.results[self.survivors[0]]
        digests = {step: (count, digest) for step, count, digest in first["rows"]}
        for label, result in self.results.items():
            assert result["step"] == first["step"], label
            for step, count, digest in result["rows"]:
                assert (count, digest) == digests[step], (label, step)
            assert result["rate"] == first["rate"], label
            assert result["scheduled"] == first["scheduled"], label
            assert result["metrics"]["members"] == first["metrics"]["members"]
            assert result["metrics"]["generation"] == first["metrics"]["generation"]
            # A rank may be lost in between, whose place the others then do not have yet.
            assert result["gathered"][-1:] == first["gathered"][-1:], label

    def check_reference(self, means: Means | None = None) -> None:
        """Check the bits after each step against one process; no rank may have been lost."""
        check_reference(self.results["0"]["rows"], means)


def check_reference(rows: list[list[Any]], means: Means | None = None) -> None:
    """Check the bits after each step, from the first on, against one process.

    Args:
        rows: step, world size and digest of each; no rank may have been lost in one.
        means: how they are made; None: of gradients that travel as they are.
    """
    means, before = means or Means(), rows[0][1]
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    for step, count, digest in rows:
        gradients: list[list[torch.Tensor]] = []
        if count > before:
            means.let_in(before)
        before = count
        for rank in range(count):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append(
                [one.grad.clone() for one in model.parameters() if one.grad is not None]
            )
        for (name, parameter), *parts in zip(model.named_parameters(), *gradients, strict=True):
            parameter.grad = means.over(name, dict(enumerate(parts)))
            means.take(name, range(count))
        optimizer.step()
        scheduler.step()
        assert digest_of(model) == digest, (step, count)


@pytest.mark.parametrize("secret", [None, "0123456789abcdef0123456789abcdef"])
def test_a_rank_joins_and_all_have_the_bits_of_one_process(
    tmp_path: Path, programs: ForkedPrograms, secret: str | None
) -> None:
    """Parameters, optimizer's state and scheduler are taken over, and the first mean is of all."""
    options: dict[str, Any] = {} if secret is None else {"secret": secret}
    run = Run(programs, tmp_path, **options)
    run.check_alike()
    run.check_reference()
    counts = [count for _, count, _ in run.results["0"]["rows"]]
    assert counts[0] == 3 and counts[-STEPS_AFTER:] == [4] * STEPS_AFTER
    (change,) = run.results["joiner-0"]["changes"]
    assert change["joined"] == [3] and change["rank"] == 3 and change["world_size"] == 4
    first = run.results["joiner-0"]["rows"][0][0]
    assert change["step"] == first
    assert run.results["joiner-0"]["metrics"]["joined"] == [{"rank": 3, "step": first}]
    assert run.results["joiner-0"]["scheduled"] == run.results["0"]["step"]
    told = run.errors["joiner-0"]
    # Running means alone: these are each rank's own.
    assert "while the others trained" in told and f" {BUFFERS_MB} of " in told, told


def test_a_rank_that_cannot_repeat_updates_gets_all_while_the_others_wait(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    """Whatever its updates have made, it trains with the bits of the others."""
    run = Run(programs, tmp_path, spoils={"joiner-0": f"{PRECOPY}:RepeatedUpdates.repeat"})
    run.check_alike()
    run.check_reference()
    told = run.errors["joiner-0"]
    assert "while the others trained" in told and f" {BUFFERS_MB} of " not in told, told


@pytest.mark.parametrize("codec", ["bf16", "qsgd:bits=8"])
def test_a_rank_joins_where_gradients_are_encoded(
    tmp_path: Path, programs: ForkedPrograms, codec: str
) -> None:
    """It repeats updates by the means that all have decoded."""
    run = Run(programs, tmp_path, codec=codec)
    run.check_alike()
    assert f" {BUFFERS_MB} of " in run.errors["joiner-0"]


def test_a_rank_joins_a_ring(tmp_path: Path, programs: ForkedPrograms) -> None:
    """Sums go round all ranks from its first step on."""
    run = Run(programs, tmp_path, strategy="ring")
    run.check_alike()
    assert [count for _, count, _ in run.results["0"]["rows"]][-STEPS_AFTER:] == [4] * STEPS_AFTER


class Bf16RingMeans(RingMeans):
    """The same where weights travel as bf16: each hop decodes, adds and encodes."""

    BLOCK_ELEMS = 65_536

    def of_servers(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return Bf16Means().over(name, dict(enumerate(gradients)))

    def around(self, name: str, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        if not name.endswith(".weight"):
            return super().around(name, gradients)
        total, *others = gradients
        for gradient in others:
            total = total.bfloat16().float() + gradient
        return (total / len(gradients)).bfloat16().float()


@pytest.mark.parametrize(("victims", "codec"), [(("1", "3"), "raw"), (("2", "0"), "bf16")])
def test_a_ring_loses_a_rank_one_joins_and_another_is_lost(
    tmp_path: Path, programs: ForkedPrograms, victims: tuple[str, str], codec: str
) -> None:
    """Around all ranks, on servers, around all ranks of the new world, and on servers again."""
    first, second = victims
    kept = next(label for label in "0123" if label not in victims)

    def has_lost_one() -> bool:
        return "training goes on without" in (tmp_path / f"errors-{kept}").read_text()

    run = Run(
        programs,
        tmp_path,
        world_size=4,
        strategy="ring",
        codec={"*.weight": codec},
        numbers={"0": 0, "1": 1, "2": 2, "3": 3, "joiner-0": 4},
        fatal_steps={first: (3, 0), second: (4, 1)},
        losses=2,
        joins_after=has_lost_one,
        pause_s=0.2,  # The reference makes each step several times.
    )
    run.check_alike()
    before = [rank for rank in range(4) if rank != int(first)]
    begun = run.results["joiner-0"]["rows"][0][0]
    kept_rows = torch.load(tmp_path / f"{kept}.pt")
    states, worlds = kept_rows["states"], kept_rows["worlds"]
    assert [row[0] for row in run.results[kept]["rows"]] == list(range(1, len(states) + 1))
    means = RingMeans if codec == "raw" else Bf16RingMeans
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    words = [
        check_each_tensor(
            some,
            4,
            left,
            means(owners, 4),
            lambda _: scheduler.step(),
            training=(model, optimizer),
            ranks=ranks,
            first_step=step,
        )
        for some, left, owners, ranks, step in (
            (states[: begun - 1], before, worlds[0], range(4), 1),
            (
                states[begun - 1 :],
                [rank for rank in (*before, 4) if rank != int(second)],
                worlds[1],
                (*before, 4),
                begun,
            ),
        )
    ]
    for found, fatal_step in zip(words, (3, 4), strict=True):
        # Ranks may have the means of a step that the lost one still took part in.
        assert found[: fatal_step - 2] == ["old"] * (fatal_step - 2)
        assert set(found[fatal_step:]) == {"new"}
    changes = [(one["lost"], one["joined"]) for one in run.results[kept]["changes"]]
    place = [*before, 4].index(int(second))
    assert changes == [([int(first)], []), ([], [3]), ([place], [])]


def test_ranks_that_have_joined_stay_single_in_a_model_prepared_anew(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    """By their numbers they would fill two nodes, whose ranks add up first by default."""
    run = Run(
        programs, tmp_path, world_size=2, joiners=2, local_size=2, prepares_anew=True, pause_s=0.1
    )
    run.check_alike()
    run.check_reference()
    assert "nodes of 2 ranks" not in run.errors["0"], run.errors["0"]


def test_a_rank_joins_a_model_of_one_parameter(tmp_path: Path, programs: ForkedPrograms) -> None:
    """There are fewer tensors than members that could give some."""
    run = Run(programs, tmp_path, is_small=True)
    run.check_alike()
    told = run.errors["joiner-0"]
    assert "while the others trained" in told and "waited for 0 of " in told, told
    assert "asks to join again" not in told and "while the others wait:" not in told, told


def test_a_donor_that_fails_says_so(tmp_path: Path, programs: ForkedPrograms) -> None:
    """Nobody waits for its next round, and its program trains on."""
    run = Run(
        programs,
        tmp_path,
        raises={"1": "gradlane.training.model.update_log:UpdateLog.wait_for_steps"},
    )
    run.check_alike()
    assert "rank 1 gives no more: RuntimeError" in run.errors["joiner-0"]


def test_two_ranks_join_at_once(tmp_path: Path, programs: ForkedPrograms) -> None:
    """One after the other, in worlds of their own."""
    run = Run(programs, tmp_path, joiners=2, world_size=2, one_by_one=False)
    run.check_alike()
    run.check_reference()
    assert run.results["0"]["metrics"]["members"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "place",
    [
        f"{JOINING}:JoinRequest.wait_for_invitation",
        f"{PRECOPY}:broadcast_and_finish",
        f"{PRECOPY}:RepeatedUpdates.repeat",
        "gradlane.training.model.joining:_hand_over",
        f"{JOINING}:JoinRequest.wait_for_outcome",
        f"{JOINING}:Joins._move",
        f"{JOINING}:FirstStepState.take_over",
    ],
)
def test_a_rank_is_killed_while_it_joins_and_another_joins(
    tmp_path: Path, programs: ForkedPrograms, place: str
) -> None:
    """The others train on without it, and lose no step."""
    is_member = place.endswith("FirstStepState.take_over")
    run = Run(programs, tmp_path, joiners=2, fatal={"joiner-0": place}, losses=int(is_member))
    run.check_alike()
    steps = [step for step, _, _ in run.results["0"]["rows"]]
    assert steps == list(range(1, len(steps) + 1))
    assert len(run.results["0"]["metrics"]["members"]) == 4


@pytest.mark.parametrize(
    ("place", "victim"),
    [
        (f"{JOINING}:Joins._give", "0"),
        (f"{PRECOPY}:PrecopySource.start", "1"),
        (f"{PRECOPY}:broadcast_and_finish", "2"),
        ("gradlane.training.model.update_log:UpdateLog.wait_for_steps", "0"),
        (f"{JOINING}:Joins._answer", "0"),
        ("gradlane.training.rendezvous.join_requests:JoinRequests.invite", "0"),
        ("gradlane.training.model.prepared:connect_to_join", "0"),
        ("gradlane.training.model.joining:_hand_over", "2"),
        ("gradlane.training.rendezvous.join_requests:JoinRequests.settle", "0"),
        (f"{JOINING}:Joins._move", "2"),
        ("gradlane.training.model.prepared:PreparedModel.moved_to", "0"),
    ],
)
def test_a_member_is_killed_while_a_rank_joins(
    tmp_path: Path, programs: ForkedPrograms, place: str, victim: str
) -> None:
    """The rank that joins asks again, or trains on with those that are left."""
    run = Run(programs, tmp_path, fatal={victim: place})
    run.check_alike()
    assert len(run.results["joiner-0"]["metrics"]["members"]) == 3


def test_a_rank_joins_in_the_place_of_one_that_was_lost(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    """A joiner's own death is a loss like any other, and the next one joins the rest."""
    place = "gradlane.training.model.kernel.step_end:StepEnd.end_step"
    run = Run(programs, tmp_path, joiners=2, fatal={"joiner-0": place}, losses=1)
    run.check_alike()
    assert [one["rank"] for one in run.results["0"]["metrics"]["lost"]] == [3]
    assert run.results["0"]["metrics"]["members"] == [0, 1, 2, 3]


def test_a_rank_joins_the_half_that_goes_on(tmp_path: Path, programs: ForkedPrograms) -> None:
    """The register by which rank 0 goes on alone ends with the world that it leaves."""

    def is_alone() -> bool:
        return "training goes on without" in (tmp_path / "errors-0").read_text()

    run = Run(
        programs, tmp_path, world_size=2, fatal_steps={"1": (3, 0)}, losses=1, joins_after=is_alone
    )
    run.check_alike()
    assert [one["rank"] for one in run.results["0"]["metrics"]["lost"]] == [1]
    assert run.results["0"]["metrics"]["members"] == [0, 1]


def test_no_sample_is_lost_or_doubled(tmp_path: Path, programs: ForkedPrograms) -> None:
    """An `ElasticSampler` shares out what is left of the epoch that a rank joins in."""
    samples = 96
    run = Run(programs, tmp_path, world_size=2, samples=samples)
    run.check_alike()
    trained = sorted(tuple(one) for result in run.results.values() for one in result["ids"])
    assert trained == [(epoch, one) for epoch in range(EPOCHS) for one in range(samples)]
    assert run.results["joiner-0"]["ids"]
