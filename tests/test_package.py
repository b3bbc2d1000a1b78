"""What `import gradlane` gives, and what it loads."""

from __future__ import annotations

import subprocess
import sys


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
