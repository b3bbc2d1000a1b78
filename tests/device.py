"""The device of models, batches and scalers, in random loops and tests of lost and joining ranks.

GRADLANE_TEST_DEVICE=cuda python -m tests.loop_fuzzing --loops 400 --jobs 8
"""

import os

import torch

DEVICE = torch.device(os.environ.get("GRADLANE_TEST_DEVICE", "cpu"))

if DEVICE.type == "cuda":
    # The ranks and the reference run the same kernels on the same numbers, and bits are compared.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
