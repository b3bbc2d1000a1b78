"""The licences of crates that the core is made of, and their check in a wheel."""

from __future__ import annotations

import json
import runpy
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts/third-party"))
NOTICE = "gradlane-0.1.0.dist-info/licenses/THIRD-PARTY.txt"
BILL = "gradlane-0.1.0.dist-info/sboms/gradlane-py.cyclonedx.json"


@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
def test_the_file_names_the_core_crates_and_has_their_licences() -> None:
    crates = SCRIPT["core_crates"]()
    assert {"pyo3", "pyo3-macros", "ring", "snow"} <= {one["name"] for one in crates}
    assert not {"proptest", "gradlane-net", "cc"} & {one["name"] for one in crates}
    now = SCRIPT["third_party_text"](crates)
    assert (ROOT / "THIRD-PARTY.txt").read_text() == now, (
        "the core has other crates now: scripts/third-party > THIRD-PARTY.txt"
    )


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("Apache-2.0 AND ISC", True),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
        ("MIT AND GPL-3.0-only", False),
        ("MPL-2.0", False),
        ("Apache-2.0 WITH LLVM-exception", False),
    ],
)
def test_an_expression_is_permissive_if_a_known_licence_meets_each_part(
    licence: str, permissive: bool
) -> None:
    assert SCRIPT["is_permissive"](licence) is permissive


def crate(folder: Path, name: str, licence: str | None, text: str = "") -> dict[str, Any]:
    (folder / name).mkdir()
    if text:
        (folder / name / "LICENSE").write_text(text)
    path = str(folder / name / "Cargo.toml")
    return {"name": name, "version": "1.0.0", "license": licence, "manifest_path": path}


def test_texts_that_differ_in_line_breaks_alone_stand_once(tmp_path: Path) -> None:
    crates = [
        crate(tmp_path, "one", "MIT", "May be\nused.\n"),
        crate(tmp_path, "two", "MIT/ISC", "May be used."),
        crate(tmp_path, "three", "ISC", "May be used by others."),
    ]
    text = SCRIPT["third_party_text"](crates)
    assert text.count("used.") == 1 and "\none 1.0.0\ntwo 1.0.0\n\nMay be\nused.\n" in text
    assert f"{'two 1.0.0':<28} MIT OR ISC\n" in text
    assert "\nthree 1.0.0\n\nMay be used by others.\n" in text


@pytest.mark.parametrize(
    ("licence", "text", "words"),
    [
        ("GPL-3.0-only", "text", "strict 1.0.0 has the licence 'GPL-3.0-only'"),
        (None, "text", "'none named'"),
        ("MIT", "", "strict 1.0.0 has no file with its licence"),
    ],
)
def test_a_crate_without_a_permissive_licence_and_its_text_is_refused(
    licence: str | None, text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=words):
        SCRIPT["third_party_text"]([crate(tmp_path, "strict", licence, text)])


def wheel(path: Path, components: list[dict[str, str]], notice: str | None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(BILL, json.dumps({"components": components}))
        if notice is not None:
            file.writestr(NOTICE, notice)
    return path


PYO3 = {"name": "pyo3", "version": "0.30.1"}
OURS = {"name": "gradlane-net", "version": "0.1.0"}
BUILDS = {"name": "cc", "version": "1.2.0", "scope": "excluded"}
UNLINKED = {"name": "errno", "version": "0.3.15"}
LINKED = ["pyo3 0.30.1"]


def test_a_wheel_names_the_crates_of_its_core(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = wheel(tmp_path / "a.whl", [PYO3, OURS, BUILDS, UNLINKED], "\npyo3 0.30.1   MIT\n")
    SCRIPT["check_wheel"](path, LINKED)
    assert "all 1 crates" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("components", "notice", "words"),
    [
        ([PYO3], "\npyo3 0.30.10  MIT\n", "PARTY.txt does not name pyo3 0.30.1"),
        ([OURS, BUILDS], "\npyo3 0.30.1 MIT\n", "materials does not name pyo3 0.30.1"),
        ([PYO3], None, "needs one bill of materials"),
    ],
)
def test_a_wheel_whose_bill_and_text_differ_is_refused(
    components: list[dict[str, str]], notice: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=words):
        SCRIPT["check_wheel"](wheel(tmp_path / "a.whl", components, notice), LINKED)


def test_a_wheel_names_the_crates_of_its_own_target() -> None:
    """One target's core may link crates that the other's does not."""
    for target in SCRIPT["TARGETS"]:
        machine = target.partition("-")[0]
        name = f"gradlane-0.1.0-cp310-abi3-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
        assert SCRIPT["targets_of"](Path("dist", name)) == (target,)
    with pytest.raises(SystemExit, match="for none of"):
        SCRIPT["targets_of"](Path("gradlane-0.1.0-cp310-abi3-win_amd64.whl"))
