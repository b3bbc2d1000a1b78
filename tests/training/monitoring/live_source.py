"""A session's numbers that a test makes up, for the live state."""

from __future__ import annotations

from typing import Any

from gradlane.formats.live_state import WaitNow
from gradlane.training.monitoring.live import LiveNumbers, LiveView
from gradlane.training.monitoring.metrics import Metrics, Reading, metrics_of
from gradlane.training.monitoring.step_timer import StepTimer
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from tests.training.monitoring.test_metrics import late, wait

HOSTILE = (
    "<script>document.body.textContent='taken over'</script>\x1b[2J<img src=x onerror=alert()>"
)
"""The name of a layer."""


def peer(tx_bytes: int, rx_bytes: int) -> Reading:
    return {
        "tx_bytes": tx_bytes,
        "rx_bytes": rx_bytes,
        "queued_bytes": 7,
        "in_flight_bytes": 3,
        "owned_bytes": 1000,
    }


class FakeSource:
    """Two ranks, of which this one is rank 0; a step takes a second on a clock of its own."""

    def __init__(self, steps: int = 0) -> None:
        self.now_ns = 10**12
        self.waited_ns = 0
        self.timer = StepTimer(lambda: self.now_ns, keeps_history=True)
        self.timer.use_channel(lambda: self.waited_ns)
        self.wait: WaitNow | None = None
        self.norms: dict[tuple[int, str], float] = {}
        self.step = 0
        self.refusals: list[dict[str, str]] = []
        self.view = LiveView(
            self.read, Options(), RankInfo(0, 2, "a job", 0), clock_ns=lambda: self.now_ns
        )
        self.train(steps)

    def train(self, steps: int, step_s: float = 1.0, wait_s: float = 0.25) -> None:
        for _ in range(steps):
            self.step += 1
            self.timer.step_begins()
            self.pass_time(step_s)
            self.waited_ns += int(wait_s * 1e9)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def metrics(self) -> Metrics:
        wait_s = self.waited_ns / 1e9
        reading: dict[str, Any] = {
            "step": self.step,
            "raw_bytes": 80,
            "encoded_bytes": 20,
            "wait_s": wait_s,
            "refused_connections": len(self.refusals),
            "refusals": self.refusals,
            "gathered_slices": 10 * self.step,
            "peers": [peer(0, 0), peer(1_000_000 * self.step, 500_000 * self.step)],
            "waits": [
                wait(f"{HOSTILE}.weight", self.step, 0.8 * wait_s, 0.4, 1),
                wait("fc.bias", self.step, 0.2 * wait_s, 0.1, 2),
            ],
            "stragglers": [late(0, 0.0, 0.0, 0), late(9 * self.step, 0.9 * self.step, 0.5, 1)],
        }
        return metrics_of(0, 2, self.timer.times(), [reading])

    def read(self) -> LiveNumbers:
        codecs = {
            (1, f"{HOSTILE}.weight"): CodecChoice(f"{HOSTILE}.weight", "topk:ratio=0.01", ""),
            (1, "fc.bias"): CodecChoice("fc.bias", "raw", ""),
        }
        begin_ns = self.timer.last_begin_ns
        return LiveNumbers(self.metrics(), self.timer, begin_ns, self.wait, codecs, self.norms)
