"""Options of sessions: each in one place, and `gradlane.init` takes and explains all of them."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import gradlane
from gradlane.training.options.option_fields import (
    agreed_options,
    check_options,
    on_command_line,
    option,
    option_rules,
)
from gradlane.training.options.options import GROUPS, Options, keywords_of
from gradlane.training.options.reference import options_page
from gradlane.training.options.secret import draw_secret, secret_bits, write_secret_file
from tests.paths import ROOT


@dataclass(frozen=True)
class Some:
    """Options as any command has them."""

    kind: str = option("a", known=("a", "b"), agreed=True)
    batch_size: int | None = option(None, least=1, most=64)
    wait_s: float = option(1.0, above=0)
    note: str = "free"


def test_init_takes_every_option_with_its_default() -> None:
    parameters = inspect.signature(gradlane.init).parameters
    # A short word for an option of `Rendezvous`, which a launcher can give, too.
    assert list(parameters) == [*(one.name for one in fields(Options)), "join"]
    assert len(parameters) <= 14
    for one in fields(Options):
        given = parameters[one.name].default
        assert Options.of(**{one.name: given}) == Options(), one.name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slice_elems": 500}, "write strategy=gradlane.Strategy(slice_elems=500)"),
        (
            {"slice_elems": 500, "strategy": "ring"},
            "write strategy=gradlane.Strategy('ring', slice_elems=500)",
        ),
        ({"interface": "eth1"}, "write network=gradlane.Network(interface='eth1')"),
        ({"secret": "hidden words"}, "write network=gradlane.Network(secret=...)"),
        ({"every": 5}, "write checkpoints=gradlane.Checkpoints(every=5)"),
        ({"checkpoint_every": 5}, "write checkpoints=gradlane.Checkpoints(every=5)"),
        ({"bucket": 9}, "write codec=gradlane.codecs.Qsgd(bucket=9)"),
        ({"strateggy": "p3"}, "strateggy is unknown; perhaps strategy; docs/options.md lists all"),
        ({"zzz": 1}, "zzz is unknown; docs/options.md lists all options"),
    ],
)
def test_a_misplaced_option_is_refused_with_the_line_to_write(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)) as refused:
        gradlane.init(**given)
    assert "hidden words" not in str(refused.value)


def test_every_option_is_explained_and_has_a_name_of_its_own() -> None:
    named: list[str] = []
    kinds: list[Any] = [Options, *GROUPS.values()]
    for kind in kinds:
        assert set(option_rules(kind)) == {one.name for one in fields(kind)}
        assert all(rules.doc.endswith(".") for rules in option_rules(kind).values())
        named += [rules.name for rules in option_rules(kind).values()]
    # The keyword of an object is also the name of its first option.
    assert len(named) - len(set(named)) == len({"strategy", "local", "stragglers", "going_on"})


def test_the_page_of_options_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page == options_page(), "run python -m gradlane.training.options.reference"


def test_options_by_their_own_names_stand_in_their_objects() -> None:
    keywords = keywords_of(strategy="ring", slice_elems=9, lanes=2, codec="bf16")
    assert keywords == {
        "strategy": gradlane.Strategy("ring", slice_elems=9),
        "network": gradlane.Network(lanes=2),
        "codec": "bf16",
    }
    whole = {"strategy": gradlane.Strategy("wfbp")}
    assert keywords_of(**whole) == whole
    with pytest.raises(TypeError, match="frames"):
        gradlane.init(**keywords_of(frames=3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"network": "eth0"}, "network is 'eth0'; give a gradlane.Network"),
        ({"strategy": 3}, "strategy is 3; give a text or a gradlane.Strategy"),
        ({"checkpoints": "/tmp"}, "give a gradlane.Checkpoints"),
    ],
)
def test_an_argument_of_another_kind_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        gradlane.init(**given)


def test_variables_give_what_the_program_does_not() -> None:
    environment = {
        "GRADLANE_LANES": "3",
        "GRADLANE_FRAME_BYTES": "4096",
        "GRADLANE_PORTS": "4000-4010",
        "GRADLANE_PACING": "off",
        "GRADLANE_CHECKPOINT_EVERY": "7",
        "GRADLANE_CHECKPOINT_FOLDER": "/shared/run1",
        "GRADLANE_PROMETHEUS": "",
        "GRADLANE_JOB": "night",
        "GRADLANE_STORE": "10.0.0.1:29600",
    }
    # The default, but given.
    network = gradlane.Network(lanes=1)
    options = Options.of(network=network, environment=environment)
    assert options.network == gradlane.Network(
        lanes=1, frame_bytes=4096, ports=(4000, 4010), pacing=False
    )
    assert options.checkpoints == gradlane.Checkpoints("/shared/run1", every=7)
    assert options.monitoring == gradlane.Monitoring()
    assert options.rendezvous == gradlane.Rendezvous(job="night", store="10.0.0.1:29600")
    assert Options.of(network=network).network == network


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("GRADLANE_LANES", "many", "GRADLANE_LANES is 'many'; it must be a whole number"),
        ("GRADLANE_LANES", "17", "GRADLANE_LANES is 17; it must be 1 to 16"),
        ("GRADLANE_PORTS", "x", "GRADLANE_PORTS is 'x'; use one, or the lowest and the highest"),
        ("GRADLANE_PORTS", "9-3", "GRADLANE_PORTS is (9, 3); it must be (low, high)"),
    ],
)
def test_variables_that_make_no_sense_are_refused_by_name(
    variable: str, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Options.of(environment={variable: text})


SECRET = "0123456789abcdef" * 2


def secret_file(path: Path, content: bytes, mode: int = 0o600) -> gradlane.Network:
    path.write_bytes(content)
    path.chmod(mode)
    return gradlane.Network(secret_file=path)


@pytest.mark.parametrize(
    "variable",
    ["GRADLANE_CONNECT_TIMEOUT_S", "GRADLANE_SILENCE_TIMEOUT_S", "GRADLANE_PROGRESS_TIMEOUT_S"],
)
@pytest.mark.parametrize("text", ["inf", "1e400", "1e30"])
def test_a_time_without_an_end_is_refused_by_its_variable(variable: str, text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{variable} is (inf|1e\+30); it must be at most 1e\+09 s"
    ):
        Options.of(environment={variable: text})


def test_a_secret_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ValueError, match=r"secret_file is .*No such file.*secret new PATH"):
        gradlane.Network(secret_file=path).read_secret()
    assert secret_file(path, f" {SECRET}\n".encode()).read_secret() == SECRET
    assert gradlane.Network(secret=SECRET).read_secret() == SECRET
    assert SECRET not in repr(gradlane.Network(secret=SECRET))
    assert gradlane.Network().read_secret() is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ValueError, match=rf"mode {mode:04o}\): chmod 600 {path}"):
        secret_file(path, SECRET.encode(), mode).read_secret()


def test_a_secret_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = secret_file(tmp_path / "secret", SECRET.encode())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 7)
    if os.getuid() == 0:
        # Root's is taken by all, such as a secret that an orchestrator has mounted.
        assert network.read_secret() == SECRET
        os.chown(tmp_path / "secret", 7777, -1)
    with pytest.raises(ValueError, match=r"belongs to user \d+, and this process runs as user"):
        network.read_secret()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n", "is empty"),
        (SECRET[:31].encode(), "has 124 bits, and a secret has at least 128"),
        (b"correct horse battery", "has 126 bits"),
        (b"\xff" * 40, "holds no text"),
        (b"a" * 5000, "more than 4096 bytes"),
    ],
)
def test_a_file_without_a_good_secret_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ValueError, match=reason) as told:
        secret_file(path, content).read_secret()
    assert str(path) in str(told.value) and "gradlane secret new" in str(told.value)
    assert content == b"\n" or content.decode(errors="replace") not in str(told.value)


def test_a_pipe_in_place_of_a_secret_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="no regular file"):
        gradlane.Network(secret_file=tmp_path / "pipe").read_secret()


def test_two_secrets_and_empty_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret_file(path, SECRET.encode())
    variables = {"GRADLANE_SECRET": SECRET, "GRADLANE_SECRET_FILE": str(path)}
    for network in (
        gradlane.Network(secret=SECRET, secret_file=path),
        Options.of(environment=variables).network,
        Options.of(network=gradlane.Network(secret=SECRET), environment=variables).network,
    ):
        with pytest.raises(ValueError, match="there are two secrets"):
            network.read_secret()
    assert gradlane.Network(secret=f" {SECRET}\n").read_secret() == SECRET
    for empty in ("", " " * 64):
        with pytest.raises(ValueError, match=r"secret= or GRADLANE_SECRET is empty"):
            gradlane.Network(secret=empty).read_secret()
    for name in variables:
        with pytest.raises(ValueError, match=f"{name} is empty"):
            Options.of(environment={name: ""})


def test_the_secrets_that_are_drawn_and_written_are_good(tmp_path: Path) -> None:
    first, second = draw_secret(), draw_secret()
    assert first != second and secret_bits(first) == 256
    write_secret_file(tmp_path / "secret", first)
    assert gradlane.Network(secret_file=tmp_path / "secret").read_secret() == first
    with pytest.raises(ValueError, match="exists; give another path"):
        write_secret_file(tmp_path / "secret", second)
    with pytest.raises(ValueError, match="cannot write"):
        write_secret_file(tmp_path / "none" / "secret", second)


def test_init_explains_every_argument_once_and_in_order() -> None:
    text = inspect.getdoc(gradlane.init) or ""
    arguments = text[text.index("Args:") : text.index("Returns:")]
    explained = re.findall(r"^    (\w+): ", arguments, flags=re.MULTILINE)
    assert explained == list(inspect.signature(gradlane.init).parameters)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "c"}, "unknown kind 'c'; known are a, b"),
        ({"batch_size": 0}, "batch-size is 0; it must be 1 to 64"),
        ({"batch_size": 65}, "batch-size is 65; it must be 1 to 64"),
        ({"wait_s": 0.0}, "wait-s is 0.0; it must be above 0"),
        ({"wait_s": float("nan")}, "wait-s is nan; it must be above 0"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_options(Some(**given), on_command_line)  # type: ignore[arg-type]


def test_none_and_the_limits_are_in_range() -> None:
    check_options(Some(batch_size=None))
    check_options(Some(batch_size=1))
    check_options(Some(batch_size=64))


def test_what_ranks_agree_on_is_what_says_so() -> None:
    assert agreed_options(Some()) == {"kind": "a"}
    agreed = Options().agreed()
    assert {"strategy", "codec", "update", "frame_bytes", "seed"} <= set(agreed)
    assert not {"interface", "ports", "send_buffer_bytes", "trace", "summary"} & set(agreed)


@pytest.mark.parametrize(
    ("given", "processors", "expected"),
    [
        ({}, 2, (1, 1)),
        ({}, 0, (1, 1)),
        ({}, 8, (2, 2)),
        ({}, 96, (3, 3)),
        ({"lanes": 5}, 2, (5, 5)),
        ({"work_threads": 0}, 16, (0, 3)),
        ({"work_threads": 4, "lanes": 1}, 16, (4, 1)),
    ],
)
def test_threads_follow_processors_unless_they_are_given(
    given: dict[str, Any], processors: int, expected: tuple[int, int]
) -> None:
    assert gradlane.Network(**given).thread_counts(processors) == expected


@pytest.mark.parametrize(
    ("given", "gbits_per_s", "lanes"),
    [({}, None, 3), ({}, 1, 1), ({}, 10, 1), ({}, 20, 2), ({}, 100, 3), ({"lanes": 4}, 1, 4)],
)
def test_a_slow_port_has_one_lane(
    given: dict[str, Any], gbits_per_s: float | None, lanes: int
) -> None:
    rate = None if gbits_per_s is None else gbits_per_s * 1e9
    assert gradlane.Network(**given).thread_counts(64, rate) == (lanes, lanes)
