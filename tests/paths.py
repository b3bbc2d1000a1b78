"""Places that tests read from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The checkout."""
PACKAGE = ROOT / "python" / "gradlane"
PAPERS = ROOT / "papers" / "gradlane_papers"
"""The package of the second distribution."""
PACKAGES = (PACKAGE, PAPERS)
SHARED = ROOT.parent / "shared"
"""Reference data that is not part of the project; tests skip where it is absent."""
