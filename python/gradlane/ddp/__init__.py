"""gradlane's codecs for `torch.nn.parallel.DistributedDataParallel`.

For those who stay with DDP: `ddp_model.register_comm_hook(*gradlane.ddp.ddp_hook("qsgd:bits=4"))`
sends gradients encoded, over Gloo. See `docs/ddp-hooks.md`.
"""

from gradlane.ddp.hook import HookState, ddp_hook

__all__ = ["HookState", "ddp_hook"]
