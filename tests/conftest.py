"""What all tests share: the package from this tree, and one thread of computation a process.

Ranks share the machine's cores, so more threads would only fight for them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SOURCES = str(Path(__file__).parent.parent / "python")

os.environ.setdefault("OMP_NUM_THREADS", "1")
if _SOURCES not in sys.path:
    sys.path.insert(0, _SOURCES)
