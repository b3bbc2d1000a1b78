"""Writes `docs/constructs.md`."""

from __future__ import annotations

from tests.training.model.constructs import PAGE, all_constructs, page

if __name__ == "__main__":
    PAGE.write_text(page(all_constructs()))
