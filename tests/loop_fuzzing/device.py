"""The device of all models, batches and scalers: the host, or what the environment names.

GRADLANE_STRANGERS_DEVICE=cuda python -m tests.loop_fuzzing --loops 400 --jobs 8
"""

import os

import torch

DEVICE = torch.device(os.environ.get("GRADLANE_STRANGERS_DEVICE", "cpu"))

if DEVICE.type == "cuda":
    # The ranks and the reference run the same kernels on the same numbers, and bits are compared.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
