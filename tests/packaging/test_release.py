"""What a release is made of, how it is checked, and the upload that is rehearsed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts/release"))
NOT_READY: type[Exception] = SCRIPT["NotReadyError"]
ABOUT = "gradlane-1.2.3.dist-info"
METADATA = """\
Metadata-Version: 2.4
Name: gradlane
Version: 1.2.3
Summary: about
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.4
Requires-Dist: plotly>=5.20 ; extra == 'lab'
Description-Content-Type: text/markdown

text
"""


def bill(folder: str) -> str:
    core = f"path+file://{folder}/crates/gradlane-py#1.2.3"
    crate = {"type": "library", "bom-ref": "half", "name": "half", "version": "2.7.1"}
    return json.dumps(
        {
            "metadata": {
                "timestamp": "2026-01-01T00:00:00Z",
                "tools": [],
                "component": {"type": "library", "bom-ref": core, "name": "gradlane-py"},
            },
            "components": [crate],
            "dependencies": [{"ref": core, "dependsOn": ["half"]}],
        }
    )


def files(folder: str = "/home/me/a") -> dict[str, bytes]:
    """Return the files of a wheel as maturin writes it."""
    texts = {
        "gradlane/__init__.py": "",
        "gradlane/_core.abi3.so": "machine code",
        "gradlane/_core.pyi": "",
        "gradlane/py.typed": "",
        "gradlane/report/grafana.py": "",
        f"{ABOUT}/METADATA": METADATA,
        f"{ABOUT}/licenses/LICENSE": "Apache",
        f"{ABOUT}/licenses/THIRD-PARTY.txt": "half",
        f"{ABOUT}/sboms/gradlane-py.cyclonedx.json": bill(folder),
        f"{ABOUT}/RECORD": "",
    }
    return {name: text.encode() for name, text in texts.items()}


def wheel(path: Path, content: dict[str, bytes], *, year: int = 2026) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as written:
        for name, text in content.items():
            written.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), text)
    return path


def repacked(path: Path, content: dict[str, bytes], *, year: int = 2026) -> Path:
    SCRIPT["repack"](wheel(path, content, year=year))
    return path


@pytest.mark.parametrize(
    "heading",
    ["## 1.2.3", "## 1.2.3 (unreleased)", "## 1.2.3 (30 Nov 2026)", "## 1.2.3 - 2026-11-30"],
)
def test_notes_are_the_part_of_the_version(heading: str) -> None:
    part = "Words.\n\n### Added\n\n- it\n"
    text = f"# Changelog\n\n## 1.2.4\n\n- other\n\n{heading}\n\n{part}\n## 1.2.2\n\n- old\n"
    assert SCRIPT["notes"](text, "1.2.3") == part


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# Changelog\n\n## 1.2.30\n\n- it\n", "no heading"),
        ("# Changelog\n\n## 1x2.3\n\n- it\n", "no heading"),
        ("# Changelog\n\n## 1.2.3\n\n### Added\n\n## 1.2.2\n\n- it\n", "names no change"),
        ("# Changelog\n\n## 1.2.3\n", "names no change"),
    ],
)
def test_a_version_without_changes_is_refused(text: str, word: str) -> None:
    with pytest.raises(NOT_READY, match=word):
        SCRIPT["notes"](text, "1.2.3")


def test_the_version_stands_in_one_place() -> None:
    assert f'version = "{SCRIPT["version"]()}"' in (ROOT / "Cargo.toml").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    # A build of the second distribution by itself sees no Cargo.toml.
    papers = (ROOT / "papers" / "pyproject.toml").read_text()
    assert f'version = "{SCRIPT["version"]()}"' in papers
    assert f'"gradlane[lab]=={SCRIPT["version"]()}"' in papers
    assert (ROOT / "papers" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    SCRIPT["notes"]((ROOT / "CHANGELOG.md").read_text(), SCRIPT["version"]())


def test_a_dirty_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setitem(SCRIPT["require_clean_tree"].__globals__, "ROOT", tmp_path)
    SCRIPT["require_clean_tree"]()
    (tmp_path / "stray.py").write_text("")
    with pytest.raises(NOT_READY, match=r"commit or remove .*\n.*stray\.py"):
        SCRIPT["require_clean_tree"]()


def test_the_same_content_gives_the_same_wheel(tmp_path: Path) -> None:
    first = repacked(tmp_path / "1" / "a.whl", files("/home/me/a"))
    turned = dict(reversed(files("/tmp/of/somebody/else").items()))
    second = repacked(tmp_path / "2" / "a.whl", turned, year=2027)
    assert first.read_bytes() == second.read_bytes()
    assert SCRIPT["differences"](first.parent, second.parent) == []
    assert SCRIPT["check"](first, "1.2.3", ["/home/me", "/tmp/of"]) == []


def test_builds_that_differ_are_named_by_file(tmp_path: Path) -> None:
    first = repacked(tmp_path / "1" / "a.whl", files())
    repacked(tmp_path / "2" / "a.whl", files() | {"gradlane/_core.abi3.so": b"other code"})
    wheel(tmp_path / "2" / "b.whl", files())
    named = SCRIPT["differences"](first.parent, tmp_path / "2")
    assert named == [
        f"a.whl differs in {ABOUT}/RECORD, gradlane/_core.abi3.so",
        "b.whl was built once only",
    ]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (
            {"gradlane/_core.abi3.so": b"at /home/me/.cargo/x.rs"},
            "'/home/me', which is the builder's",
        ),
        ({f"{ABOUT}/sboms/other.json": b"path+file:///home/me/a"}, "which is the builder's"),
        ({"gradlane/py.typed": None}, "no py.typed"),
        ({"gradlane/report/grafana.py": None}, "no report/grafana.py"),
        ({"gradlane/_core.abi3.so": bytes(9_000_000)}, "not stripped"),
        ({"tests/test_it.py": b""}, "outside of the package"),
        ({"gradlane/tests/test_it.py": b""}, "of no use to users"),
        ({"gradlane/__pycache__/a.pyc": b""}, "of no use to users"),
        ({f"{ABOUT}/licenses/THIRD-PARTY.txt": None}, "no licence file THIRD-PARTY.txt"),
        ({f"{ABOUT}/METADATA": METADATA.replace("1.2.3", "1.2.2").encode()}, "Version '1.2.2'"),
        ({f"{ABOUT}/METADATA": METADATA.replace("Summary", "Other").encode()}, "no Summary"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_named(
    tmp_path: Path, change: dict[str, bytes | None], word: str
) -> None:
    content = {name: text for name, text in (files() | change).items() if text is not None}
    found = SCRIPT["check"](repacked(tmp_path / "a.whl", content), "1.2.3", ["/home/me"])
    assert any(word in one for one in found), found


def test_a_file_that_was_changed_after_its_record_is_named(tmp_path: Path) -> None:
    path = repacked(tmp_path / "a.whl", files("/gradlane"))
    content = SCRIPT["contents"](path) | {"gradlane/__init__.py": b"other"}
    assert SCRIPT["check"](wheel(path, content), "1.2.3", []) == [
        "a.whl: gradlane/__init__.py is not what RECORD says"
    ]


def source(path: Path, content: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as written:
        for name, text in content.items():
            entry = tarfile.TarInfo(f"gradlane-1.2.3/{name}")
            entry.size = len(text)
            written.addfile(entry, BytesIO(text))
    return path


def test_what_is_wrong_with_a_source_is_named(tmp_path: Path) -> None:
    content = {name: b"" for name in SCRIPT["IN_SOURCE"]["gradlane"]}
    content |= {"PKG-INFO": METADATA.encode()}
    path = source(tmp_path / "a.tar.gz", content)
    assert SCRIPT["check"](path, "1.2.3", []) == []
    del content["Cargo.lock"]
    source(path, content | {"python/gradlane/_core.abi3.so": b"code"})
    assert SCRIPT["check"](path, "1.2.3", []) == [
        "a.tar.gz: no Cargo.lock",
        "a.tar.gz: gradlane-1.2.3/python/gradlane/_core.abi3.so is not source",
    ]


def papers_wheel(folder: Path, needs: str = "gradlane[lab]==1.2.3") -> Path:
    about = "gradlane_papers-1.2.3.dist-info"
    metadata = METADATA.replace("Name: gradlane", "Name: gradlane-papers")
    metadata = metadata.replace("Requires-Dist: torch>=2.4", f"Requires-Dist: {needs}")
    names = [f"gradlane_papers/{one}" for one in SCRIPT["IN_WHEEL"]["gradlane_papers"]]
    texts = dict.fromkeys([*names, f"{about}/licenses/LICENSE", f"{about}/RECORD"], "")
    texts[f"{about}/METADATA"] = metadata
    content = {name: text.encode() for name, text in texts.items()}
    return repacked(folder / "gradlane_papers-1.2.3-py3-none-any.whl", content)


def test_the_second_distribution_is_checked_and_needs_gradlane_of_its_version(
    tmp_path: Path,
) -> None:
    assert SCRIPT["check"](papers_wheel(tmp_path), "1.2.3", []) == []
    path = papers_wheel(tmp_path, needs="gradlane[lab]")
    assert SCRIPT["check"](path, "1.2.3", []) == [
        f"{path.name}: its metadata does not require gradlane[lab]==1.2.3"
    ]
    inside = files() | {"gradlane_papers/plugin.py": b""}
    assert SCRIPT["check"](repacked(tmp_path / "a.whl", inside), "1.2.3", []) == [
        "a.whl: gradlane_papers/plugin.py is outside of the package"
    ]


def test_the_bill_names_crates_packages_and_files(tmp_path: Path) -> None:
    path, papers = repacked(tmp_path / "a.whl", files()), papers_wheel(tmp_path)
    found: dict[str, Any] = SCRIPT["bill_of_materials"](tmp_path, "1.2.3")
    by_name = {one["name"]: one for one in found["components"]}
    # What an extra adds is left out.
    assert set(by_name) == {"gradlane-py", "half", "torch", path.name, papers.name}
    assert by_name["torch"]["properties"][0]["value"] == "torch>=2.4"
    (digest,) = by_name[path.name]["hashes"]
    assert digest["content"] == SCRIPT["hashlib"].sha256(path.read_bytes()).hexdigest()
    needs = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    core = "path+file:///gradlane/crates/gradlane-py#1.2.3"
    assert needs == {"pkg:pypi/gradlane@1.2.3": [core, "pkg:pypi/torch"], core: ["half"]}


TWINE = """\
import sys, urllib.request
address, path = sys.argv[sys.argv.index("--repository-url") + 1], sys.argv[-1]
content = open(path, "rb").read() + {more!r}
parts = [(b'name="name"', b"gradlane"),
         (b'name="content"; filename="a.whl"\\r\\nContent-Type: application/octet-stream', content)]
begin = b"--x\\r\\nContent-Disposition: form-data; "
body = b"".join(begin + head + b"\\r\\n\\r\\n" + text + b"\\r\\n" for head, text in parts)
body += b"--x--\\r\\n"
urllib.request.urlopen(urllib.request.Request(
    address, body, {{"Content-Type": "multipart/form-data; boundary=x"}}))
"""


def twine(path: Path, more: bytes = b"") -> Path:
    """Write a program that sends what twine sends, and further bytes of the file."""
    path.write_text(f"#!{sys.executable}\n" + TWINE.format(more=more))
    path.chmod(0o755)
    return path


def test_a_rehearsed_upload_says_what_was_sent(tmp_path: Path) -> None:
    path = wheel(tmp_path / "a.whl", files())
    (sent,) = SCRIPT["rehearse_upload"](twine(tmp_path / "twine"), [path])
    assert (sent["name"], sent["file"]) == ("gradlane", "a.whl")
    with pytest.raises(NOT_READY, match="other bytes"):
        SCRIPT["rehearse_upload"](twine(tmp_path / "twine", b"more"), [path])


def test_what_is_left_before_a_release_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.3 (unreleased)\n")
    monkeypatch.setitem(SCRIPT["_left_to_do"].__globals__, "ROOT", tmp_path)
    left = SCRIPT["_left_to_do"]([Path("a-manylinux_2_17_x86_64.whl")], "1.2.3")
    assert left == [
        "no wheel for aarch64-unknown-linux-gnu: rustup target add aarch64-unknown-linux-gnu",
        "CHANGELOG.md says that 1.2.3 is unreleased: write the date",
    ]


def test_the_conda_package_needs_what_the_wheel_does() -> None:
    project = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2]
    wanted = re.findall(r'"([a-z]+)>=([\d.]+)"', project.partition("]")[0])
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text()
    needs = dict(re.findall(r"^    - (\w+) >=([\d.]+)$", recipe, re.MULTILINE))
    assert needs.pop("python") == "3.10" and needs.pop("__glibc") == "2.17"
    assert needs == {{"torch": "pytorch"}.get(name, name): at for name, at in wanted}
    assert {"torch", "numpy", "typer", "rich"} == {name for name, _ in wanted}
