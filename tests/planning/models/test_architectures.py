"""Built-in networks: their sizes and work, held against what is published of them."""

from __future__ import annotations

import pytest
from torch import nn

from gradlane.lab.workloads import REPLAY_NAMES, SIMULATED_NAMES
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.transformers import (
    H100_OPERATIONS_PER_S,
    h100_batch_time_s,
)
from gradlane.planning.simulation.profiles import synthetic_profile

PARAMETERS = {
    # torchvision's model cards (without auxiliary classifiers), number of tensors.
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "vgg16": (138_357_544, 32),
    "vgg19": (143_667_240, 38),
    "alexnet": (61_100_840, 16),
    "googlenet": (6_624_904, 173),
    "inception_v3": (23_834_568, 284),
    "vit_b16": (86_567_656, 152),
    # Caffe's: 3x(5x5 convolution), two inner products.
    "cifar10_quick": (145_578, 10),
    # 1.7M (He et al. 2015, table 6); the exact number is that of shortcuts without parameters.
    "resnet110": (1_727_962, 329),
    # 11M (Ioffe and Szegedy 2015); the exact number is that of Caffe's model.
    "bn_inception": (11_295_240, 278),
    # transformers' GPT2Model, BertModel, and TinyLlama/TinyLlama-1.1B.
    "gpt2_small": (124_439_808, 148),
    "gpt2_medium": (354_823_168, 292),
    "bert_base": (109_482_240, 199),
    "llama_1b": (1_100_048_384, 201),
    # peft's count for LoraConfig(r=16, target_modules="all-linear") on TinyLlama-1.1B.
    "llama_1b_lora": (12_615_680, 308),
}
MULTIPLICATIONS = {
    # GFLOPS (multiplications with their additions) of torchvision's model cards.
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vgg16": 15.47,
    "vgg19": 19.63,
    "alexnet": 0.71,
    "googlenet": 1.50,
    "inception_v3": 5.71,
    "vit_b16": 17.56,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_the_published_ones(name: str) -> None:
    architecture = ARCHITECTURES[name]()
    assert (architecture.numel, len(architecture.parameters)) == PARAMETERS[name]


@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_work_is_the_published_one(name: str) -> None:
    # Normalizations and biases, which the cards leave out, are less than 1 %.
    operations = ARCHITECTURES[name]().operations
    assert operations / 2e9 == pytest.approx(MULTIPLICATIONS[name], rel=0.01)


def test_sizes_in_the_papers() -> None:
    """Poseidon, table 3, and the low-precision paper, figure 3, in their rounding."""
    millions = {name: ARCHITECTURES[name]().numel / 1e6 for name in ARCHITECTURES}
    assert round(millions["cifar10_quick"], 4) == 0.1456
    assert round(millions["vgg19_22k"]) == 229
    assert round(millions["resnet152"], 1) == 60.2
    assert int(millions["vgg19"]) == 143
    assert int(millions["lstm_speech"]) == 13
    # "91 % of model parameters" of VGG19-22K are in its fully connected layers (section 5.1).
    large = ARCHITECTURES["vgg19_22k"]()
    dense = sum(
        p.numel for layer in large.layers if layer.kind == "Linear" for p in layer.parameters
    )
    assert round(100 * dense / large.numel) == 91


def test_words_of_a_transformer_cost_six_operations_a_parameter() -> None:
    """Kaplan et al. 2020: forward and backward take 6 N operations a token, and attention."""
    for name in ("gpt2_small", "gpt2_medium", "llama_1b"):
        architecture = ARCHITECTURES[name]()
        embedding = sum(
            p.numel for p in architecture.parameters if "wpe" in p.name or "embed_tokens" in p.name
        )
        tokens = architecture.layers[0].positions
        least = 6 * (architecture.numel - embedding) * tokens
        assert least < 3 * architecture.operations < 1.35 * least


def test_the_large_tables_of_dlrm_are_those_of_its_data_set() -> None:
    architecture = ARCHITECTURES["dlrm"]()
    tables = [p.shape for p in architecture.parameters if p.name.startswith("emb_l.")]
    assert len(tables) == 26
    assert sum(rows for rows, _ in tables) == 33_762_577
    assert {width for _, width in tables} == {16}
    assert sum(p.numel for p in architecture.parameters) - 16 * 33_762_577 == 475_985


def test_shapes_agree_with_torchs_own_layers() -> None:
    """Rebuild some layers with torch and compare names and shapes of their parameters."""
    expected: list[tuple[str, str, nn.Module]] = [
        ("lstm_speech", "lstm0", nn.LSTM(363, 1024, proj_size=512)),
        ("lstm_speech", "lstm2", nn.LSTM(512, 1024, proj_size=512)),
        ("googlenet", "inception3a.branch2.1.conv", nn.Conv2d(96, 128, 3, bias=False)),
        ("alexnet", "classifier.1", nn.Linear(9216, 4096)),
        ("bert_base", "embeddings.LayerNorm", nn.LayerNorm(768)),
        ("vit_b16", "conv_proj", nn.Conv2d(3, 768, 16)),
    ]
    for model, name, module in expected:
        layer = next(one for one in ARCHITECTURES[model]().layers if one.name == name)
        assert [(p.name, p.shape) for p in layer.parameters] == [
            (f"{name}.{key}", tuple(value.shape)) for key, value in module.named_parameters()
        ]
        assert layer.kind == type(module).__name__
    attention = nn.MultiheadAttention(768, 12)
    names = {p.name: p.shape for p in ARCHITECTURES["vit_b16"]().parameters}
    for key, value in attention.named_parameters():
        path = f"encoder.layers.encoder_layer_0.self_attention.{key}"
        assert names[path] == tuple(value.shape)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_network_makes_a_profile_with_the_kinds_of_its_layers(name: str) -> None:
    architecture = ARCHITECTURES[name]()
    assert architecture.name == name
    names = [parameter.name for parameter in architecture.parameters]
    assert len(set(names)) == len(names)
    profile = synthetic_profile(name)
    assert [tensor.name for tensor in profile.tensors] == names
    kinds = {tensor.name: (tensor.layer, tensor.rows) for tensor in profile.tensors}
    for layer in architecture.layers:
        for parameter in layer.parameters:
            rows = layer.positions * architecture.batch_size
            assert kinds[parameter.name] == (layer.kind, rows)


def test_times_of_an_h100_follow_from_its_peak() -> None:
    assert h100_batch_time_s(int(H100_OPERATIONS_PER_S), 0.5) == pytest.approx(6.0)
    # 6 N operations for each of 8,192 tokens at 40 % of the peak, and a tenth more for attention.
    plain_s = 6 * 124e6 * 8192 / (0.4 * H100_OPERATIONS_PER_S)
    assert plain_s < ARCHITECTURES["gpt2_small"]().batch_time_s < 1.2 * plain_s


def test_what_is_too_large_for_a_lab_is_simulated() -> None:
    for name in ARCHITECTURES:
        large = ARCHITECTURES[name]().numel > 400_000_000
        assert (name in SIMULATED_NAMES) == large
        assert (name in REPLAY_NAMES) != large
