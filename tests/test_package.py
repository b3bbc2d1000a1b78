"""What `import gradlane` gives, and what it loads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import gradlane
from gradlane.formats.link_report import LinkReport, PortFigures, RoundTrip
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.planning.simulation.small_profile import SMALL


def test_importing_loads_neither_torch_nor_the_core() -> None:
    program = (
        "import sys, gradlane\n"
        "assert 'torch' not in sys.modules and 'gradlane._core' not in sys.modules\n"
        "assert {'init', 'Session', 'Plan', 'ddp'} <= set(dir(gradlane))\n"
        "assert gradlane.ddp.ddp_hook and gradlane.codecs.Codec\n"
        "assert gradlane.synthetic_profile and gradlane.Coordinator\n"
        "assert gradlane.integrations\n"
        "try:\n"
        "    gradlane.no_such_name\n"
        "except AttributeError as error:\n"
        "    assert 'no_such_name' in str(error)\n"
        "else:\n"
        "    raise SystemExit('found what is not there')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FACTS = ClusterFacts(workers=4, rate_bps=2e8, latency_s=0.001)
LINKS = LinkReport(
    2, 1.0, (PortFigures(0, None, None, 1e9, 1e9),), (RoundTrip(0, 1, round_trip_s=1e-4),)
)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (SMALL, ("Profile", repr(SMALL.model), f"{len(SMALL.tensors)} tensors", "step ")),
        (LINKS, ("LinkReport of 2 ranks", "1.046 Gbit/s", "50 us one way")),
        (LinkReport(1, 1.0), ("LinkReport of 1 ranks: no links",)),
        (Plan("m", FACTS, "given", Settings()), ("Plan ", "'m'", "4 workers", "strategy='p3'")),
        (gradlane.Coordinator(SMALL, FACTS), ("Coordinator of <Profile", "rule 'auto'")),
        (
            gradlane.Network(lanes=2, secret="5ecre7" * 6),
            ("Network(secret=..., lanes=2)",),
        ),
        (gradlane.Strategy("p3", scheme="ring"), ("Strategy(name='ring')",)),
    ],
)
def test_things_that_people_hold_say_in_one_line_what_they_are(
    thing: Any, words: tuple[str, ...]
) -> None:
    text = repr(thing)
    assert all(one in text for one in words), text
    assert "\n" not in text and len(text) < 200


def test_a_session_says_where_it_is_and_that_it_is_closed() -> None:
    alone = gradlane.Rendezvous(rank=0, world_size=1)
    with gradlane.init(rendezvous=alone, monitoring=gradlane.Monitoring(summary=False)) as session:
        assert repr(session) == "<Session rank 0 of 1, strategy='p3', open>"
    assert repr(session) == "<Session rank 0 of 1, strategy='p3', closed>"
