"""Lightning: `torchrun --nproc-per-node=2 examples/lightning_module.py`."""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common import arguments, build_data, build_model, digest, leave
from gradlane.integrations.lightning import GradlaneStrategy


class Classifier(LightningModule):
    """A module as it would be without gradlane."""

    def __init__(self) -> None:
        """Build the model."""
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """Return a batch's loss."""
        points, labels = batch
        return nn.functional.cross_entropy(self.model(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train two epochs and print a hash of what was learned."""
    engine = arguments().engine
    module = Classifier()
    trainer = Trainer(
        strategy=GradlaneStrategy() if engine == "gradlane" else "ddp",
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(build_data(), batch_size=8))
    print(f"learned {digest(list(module.parameters()))}\n", end="", flush=True)
    leave(engine)


if __name__ == "__main__":
    main()
