"""gradlane's codecs for `torch.nn.parallel.DistributedDataParallel`.

`ddp_model.register_comm_hook(*gradlane.ddp.ddp_hook("qsgd:bits=4"))` sends DDP's gradients encoded,
over Gloo. See `docs/ddp-hooks.md`.
"""

from gradlane.ddp.hook import HookState, ddp_hook

__all__ = ["HookState", "ddp_hook"]
