"""Hugging Face's Trainer: `torchrun --nproc-per-node=2 examples/transformers_trainer.py`.

A tiny GPT-2 with random weights; nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradlane
from common import arguments, digest, leave
from gradlane.integrations.transformers import attach


def settings_for(folder: str, **length: Any) -> TrainingArguments:
    """Return the Trainer's defaults, but for what a short run on processors needs.

    Args:
        folder: where it may write.
        length: `num_train_epochs` or `max_steps`.
    """
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **length,
    )


def main() -> None:
    """Train some steps and print a hash of what was learned."""
    engine = arguments().engine
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_for(folder, num_train_epochs=2)
        trainer = Trainer(model=model, args=settings, train_dataset=data)
        session = gradlane.init() if engine == "gradlane" else None
        if session is not None:
            attach(trainer, session)
        trainer.train()
        print(f"learned {digest(list(model.parameters()))}\n", end="", flush=True)
        if session is not None:
            session.close()
    if torch.distributed.is_initialized():  # Not where one process trains alone.
        torch.distributed.destroy_process_group()
    leave(engine)


if __name__ == "__main__":
    main()
