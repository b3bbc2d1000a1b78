"""The two threads that exchange buckets, so that backward does not wait for them.

One thread encodes a bucket and begins its exchange, the other one finishes it, so encoding, sending
and adding up of consecutive buckets overlap. All ranks submit their buckets in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from gradlane.ddp.routes import BucketExchange, Route


class Pipeline:
    """Two threads, which start with the first bucket."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Bytes of encoded gradients that this rank has sent."""
        self.failure: BaseException | None = None
        """The error of a failed bucket; those after it are not begun, since peers may lack them."""
        self._encoder = ThreadPoolExecutor(1, "gradlane-encode")
        self._adder = ThreadPoolExecutor(1, "gradlane-add")
        weakref.finalize(self, _stop, self._encoder, self._adder)

    def submit(self, route: Route, exchange: BucketExchange) -> torch.futures.Future[torch.Tensor]:
        """Begin to exchange a bucket and return the future of its mean."""
        self._encoder.submit(self._run_guarded, self._begin, route, exchange)
        return exchange.done

    def close(self) -> None:
        """Finish the buckets in flight and end the threads."""
        _stop(self._encoder, self._adder)

    def _begin(self, route: Route, exchange: BucketExchange) -> None:
        if self.failure is not None:
            raise self.failure
        self.sent_bytes += route.begin(exchange)
        self._adder.submit(self._run_guarded, self._end, route, exchange)

    def _end(self, route: Route, exchange: BucketExchange) -> None:
        route.end(exchange)
        if exchange.target is not exchange.values:
            exchange.target.copy_(exchange.values)
        exchange.done.set_result(exchange.target)

    def _run_guarded(
        self, stage: Callable[[Route, BucketExchange], None], route: Route, exchange: BucketExchange
    ) -> None:
        """Run a stage of an exchange; its failure ends backward, which waits for it, not this
        thread."""
        try:
            stage(route, exchange)
        except Exception as error:
            self.failure = error
            # DDP passes on the text only.
            text = (
                f"gradlane's hook failed in step {exchange.step} with a bucket of "
                f"{exchange.values.numel()} gradients: {error}; restart from the last checkpoint"
            )
            # Its declared type is that of the future's value.
            exchange.done.set_exception(RuntimeError(text))  # type: ignore[arg-type]


def _stop(encoder: ThreadPoolExecutor, adder: ThreadPoolExecutor) -> None:
    encoder.shutdown()
    adder.shutdown()
