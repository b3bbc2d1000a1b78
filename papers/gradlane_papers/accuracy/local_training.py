"""Trains one task with local updates: each emulated worker by itself, with rare exchanges.

Turns, fragments, differences and the outer optimizer are those of training; what travels goes
through the codecs as in `exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradlane.training.local_updates.fragments import divide
from gradlane.training.local_updates.outer_optimizer import OuterOptimizer
from gradlane.training.local_updates.rounds import Rounds
from gradlane.training.options.codec_choice import smallest_for
from gradlane.training.options.local_updates import Local
from gradlane.training.rendezvous.tensor_table import build_table
from gradlane_papers.accuracy.curve import TrainingCurve, evaluation_steps
from gradlane_papers.accuracy.exchange import EmulatedExchange
from gradlane_papers.accuracy.run import Run


class LocalWorkers:
    """Workers that step by themselves, and what they have in common."""

    def __init__(self, run: Run, local: Local, codec: str) -> None:
        """Begin with equal models.

        Args:
            run: its task, workers and seed.
            local: how often and how workers exchange.
            codec: of what travels.
        """
        self._run, self._local = run, local
        self.task = run.parsed()[0]
        self.models = [self.task.build(run.seed) for _ in range(run.workers)]
        self._optimizers = [self.task.make_optimizer(model) for model in self.models]
        tables = [build_table(model) for model in self.models]
        self._fragments = divide(self.models[0], tables[0], local.fragments)
        self._outer = [OuterOptimizer(local, table) for table in tables]
        self._rounds = Rounds(local)
        parameters = list(self.models[0].parameters())
        self._exchange = EmulatedExchange(
            self.models[0],
            codec,
            workers=run.workers,
            seed=run.seed,
            small_elems=smallest_for(codec, (one.numel() for one in parameters)),
        )
        self._under_way: tuple[Sequence[int], dict[int, Tensor], int] | None = None
        self.step = 0

    def take_step(self) -> tuple[int, bool]:
        """Take a step on every worker.

        Returns:
            Bytes of a worker's differences and of their mean, encoded, of an exchange that begins
            after the step, or 0; and whether the result of an exchange is used after it.
        """
        task, run, local = self.task, self._run, self._local
        for worker, (model, optimizer) in enumerate(
            zip(self.models, self._optimizers, strict=True)
        ):
            optimizer.zero_grad()
            loss = task.loss(model, task.batch(run.seed, worker, run.workers, self.step))
            loss.backward()  # type: ignore[no-untyped-call]
            task.clip_gradients(model)
            optimizer.step()
        self.step += 1
        due = self._rounds.advance(None)
        uses = self._under_way is not None and self._under_way[2] <= self.step
        if uses:
            self._use(local.mix)
        if due is None:
            return 0, uses
        sent = self._begin([due])
        if local.overlap_steps == 0:
            self._use(local.mix)
            uses = True
        return sent, uses

    def end_round(self) -> int:
        """Exchange what no exchange holds yet, as when a session closes; return the bytes."""
        if self._under_way is not None:
            self._use(self._local.mix)
        moved = self._rounds.moved()
        sent = self._begin(moved) if moved else 0
        if moved:
            self._use(1.0)
        for outer in self._outer:
            for index in range(len(outer.common)):
                outer.mix(index, 1.0)
        return sent

    def common_model_loss(self, curve: TrainingCurve) -> None:
        """Note the loss of the values that all workers have in common."""
        outer = self._outer[0]
        own = [parameter.detach().clone() for parameter in self.models[0].parameters()]
        for index in range(len(own)):
            outer.mix(index, 1.0)
        curve.note(self.step, self.task, self.models[0])
        for parameter, value in zip(self.models[0].parameters(), own, strict=True):
            parameter.data.copy_(value)

    def _begin(self, fragments: Sequence[int]) -> int:
        indices = [index for number in fragments for index in self._fragments[number]]
        differences = [[outer.difference(index) for index in indices] for outer in self._outer]
        means = self._exchange.average(differences, self.step, indices)
        for number in fragments:
            self._rounds.sent(number)
        due = self.step + self._local.overlap_steps
        self._under_way = (fragments, dict(zip(indices, means, strict=True)), due)
        return round(self._exchange.push_bytes + self._exchange.broadcast_bytes)

    def _use(self, share: float) -> None:
        assert self._under_way is not None
        (fragments, means, _), self._under_way = self._under_way, None
        for outer in self._outer:
            for index, mean in means.items():
                outer.step(index, mean.clone())
                outer.mix(index, share)
        for number in fragments:
            self._rounds.mixed(number, share)


def train_locally(run: Run, advance: Callable[[int], None]) -> TrainingCurve:
    """Train and return the curve, of the values that all workers have in common.

    Args:
        run: each of its steps takes one batch of every worker.
        advance: told of each step.
    """
    scheme = run.parsed()[1]
    assert scheme.local is not None
    workers = LocalWorkers(run, scheme.local, scheme.codec)
    curve = TrainingCurve()
    stops = set(evaluation_steps(run.steps))
    workers.common_model_loss(curve)
    for step in range(run.steps):
        sent, uses = workers.take_step()
        is_last = step + 1 == run.steps
        if is_last:
            sent += workers.end_round()
        curve.wire_bytes.append(sent)
        curve.uses_exchange.append(uses or is_last)
        if step + 1 in stops:
            workers.common_model_loss(curve)
        advance(1)
    return curve
