"""Text from elsewhere: what is printed of it, and which errors escape it."""

from __future__ import annotations

import inspect
import json
import logging
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from gradlane import errors
from gradlane.formats.profile import FieldReader, ProfileError, read_object
from gradlane.formats.untrusted import EscapedError, escaped, escaped_lines
from gradlane.planning.probe.stream_endpoint import StreamError
from gradlane.planning.simulation.costs import CostsError
from gradlane.training.log import log
from gradlane.training.node.layout import agree_on_layout
from gradlane.training.options.options import Options
from gradlane.training.plans.plan import Plan, PlanError, parse_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.rendezvous.stores import bounded

HOSTILE = "a\x1b[2J\x9b31m\r\nrank 0: all is well\u202e\u2028\x00\x7f\ud800"
SHOWN = r"a\x1b[2J\x9b31m\r\nrank 0: all is well\u202e\u2028\x00\x7f\ud800"


def test_printable_text_stays_as_it_is() -> None:
    for text in ("", "rank 1's 'weight' (C:\\a)", "Größe ±3 µs, 日本語 ✓"):
        assert escaped(text) == text
        assert escaped(text.encode()) == text


def test_control_characters_are_escaped() -> None:
    assert escaped(HOSTILE) == SHOWN
    assert escaped(b"\xff\x1b") == r"\xff\x1b"
    assert escaped_lines("one\n\x1b[2Jtwo\x0cthree") == "one\n\\x1b[2Jtwo\nthree"


def test_long_text_is_cut_and_says_so() -> None:
    assert escaped("x" * 9, 4) == "xxxx... (cut, 9 characters)"
    assert len(escaped("\x1b" * 10_000_000)) < 20_000


@given(st.one_of(st.text(st.characters()), st.binary()))
def test_nothing_is_left_to_obey_and_escaping_twice_changes_nothing(text: str | bytes) -> None:
    shown = escaped(text)
    assert shown.isprintable()
    assert escaped(shown) == shown
    assert len(shown) <= 10 * len(text)


def gradlane_errors() -> list[type[Exception]]:
    found = [one for _, one in inspect.getmembers(errors, inspect.isclass)]
    return [*found, PlanError, ProfileError, CostsError, StreamError]


@pytest.mark.parametrize("kind", gradlane_errors())
def test_errors_escape_foreign_text(kind: type[Exception]) -> None:
    """The words of another rank, of the store or of a file reach a terminal through these."""
    assert issubclass(kind, EscapedError)
    further: list[object] = []
    if kind in (errors.PeerLostError, errors.ArrayRefusedError):
        further = [1]
    error = kind(HOSTILE, *further)
    assert str(error) == SHOWN
    if not further:
        assert str(pickle.loads(pickle.dumps(error))) == SHOWN


def test_names_in_files_must_be_printable(tmp_path: Path) -> None:
    """Names and summaries of plans and profiles go to the terminal as they are."""
    plan = Plan("net", ClusterFacts(2, 1e9), "probed", Settings(), prediction={}, summary="good")
    for text in ("net", "good"):
        written = json.dumps(plan.to_json()).replace(f'"{text}"', f'"{text}\\u001b[2J"')
        with pytest.raises(PlanError, match=r"cannot be printed: .*\\x1b\[2J"):
            parse_plan(written, "a plan")
    path = tmp_path / "profile.json"
    path.write_text('{"name": "a\\u001b[2J"}')
    with pytest.raises(ProfileError, match=r"name: .*cannot be printed: .*\\x1b\[2J"):
        FieldReader(str(path)).text(read_object(path), "name")


def test_a_file_is_quoted_without_its_control_characters() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan('{"format": "\\u001b[2J"}', HOSTILE)
    assert str(caught.value).isprintable()


def test_lines_of_the_log_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a line has of another rank's words: one line, and nothing to obey."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        log.warning("rank %d says %s", 1, HOSTILE)
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == f"gradlane: rank 1 says {SHOWN}\n"


def test_a_reason_with_another_ranks_words_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    scopes = [
        RendezvousScope(bounded(store, rank), RankInfo(rank, 2, "job", 0), 0, 30.0)
        for rank in range(2)
    ]
    scopes[1].put("local/1", json.dumps([1, HOSTILE, "here"]))
    assert agree_on_layout(Options(), scopes[0], {"LOCAL_WORLD_SIZE": "2"}) is None
    (told,) = caplog.records
    assert SHOWN[:40] in told.getMessage() and told.getMessage().isprintable()
