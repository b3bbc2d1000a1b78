"""Models of a popular library, with its own trainer where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.formats.profile import FieldReader, profile_from
from gradlane.planning.profiler.operations import synthetic_profile
from gradlane.planning.profiler.options import RecordingOptions

transformers = pytest.importorskip("transformers")


def small(kind: str) -> Any:
    """A small model of the library and a batch for it."""
    ids = torch.randint(0, 60, (4, 12), generator=torch.Generator().manual_seed(0))
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        config = transformers.BertConfig(**sizes, intermediate_size=64)
        labels = torch.zeros(4, dtype=torch.int64)
        return transformers.BertForSequenceClassification(config), {
            "input_ids": ids,
            "labels": labels,
        }
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=60,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_models_are_profiled(kind: str, checkpoints: bool) -> None:
    model, batch = small(kind)
    model.train()
    if checkpoints:
        # Renamed in version 5.
        name = "activation_checkpointing_enable"
        getattr(model, name, model.gradient_checkpointing_enable)()
    profile = gradlane.profile(model, loss_of, batch, steps=2, warmup=1)
    assert profile_from(profile.to_json(), FieldReader(kind)) == profile
    assert [one.name for one in profile.tensors] == [name for name, _ in model.named_parameters()]
    assert profile.batch_size == 4
    assert profile.flops is not None and profile.flops > 0
    assert {one.name for one in profile.tensors if one.gradients == 0} == set()
    once = {one.name for one in profile.modules if len(one.forwards_s) == 1}
    assert "" in once and len(once) > 20


def test_a_synthetic_profile_of_a_model() -> None:
    model, batch = small("gpt2")
    profile = synthetic_profile(model, batch, 0.2)
    first, last = (
        next(one for one in profile.tensors if one.name == f"transformer.h.{layer}.mlp.c_fc.weight")
        for layer in (0, 1)
    )
    assert first.need_s < last.need_s and first.ready_s > last.ready_s


def test_the_librarys_own_trainer_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from gradlane.planning.profiler.script import run_script

    script = tmp_path / "train.py"
    script.write_text(
        "import torch, transformers\n"
        "from tests.planning.profiler.test_transformers import small\n"
        "model, batch = small('bert')\n"
        "rows = [{key: value[index] for key, value in batch.items()} for index in range(4)] * 20\n"
        f"options = transformers.TrainingArguments({str(tmp_path)!r}, report_to=[],\n"
        "    per_device_train_batch_size=4, use_cpu=True, save_strategy='no')\n"
        "transformers.Trainer(model, options, train_dataset=rows).train()\n"
    )
    found = run_script(str(script), [], RecordingOptions(steps=3, warmup=2))
    profile = found.recorder.profile(found.name)
    assert profile.model == "BertForSequenceClassification"
    assert profile.batch_size == 4
