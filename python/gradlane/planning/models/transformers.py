"""Transformers of today: GPT-2, BERT-base, ViT-B/16, a Llama-style model, and LoRA adapters for it.

Names and shapes follow the packages that most people load them from (ViT: torchvision). Where
input and output embedding are one tensor, its layer comes first, as its gradient is whole only
when backward has come there; the product with the output is then work of the last normalization.

Default batch times are those of an H100: 989 TFLOP/s in bf16 (dense, SXM), of which a training
step uses 40 %.
"""

from __future__ import annotations

from dataclasses import replace

from gradlane.planning.models.layers import Architecture, FeatureMap, LayerList

H100_OPERATIONS_PER_S = 989e12
"""Dense bf16 peak of an H100 SXM, as its data sheet says."""
H100_UTILIZATION = 0.40
"""Share of the peak that the arithmetic of a training step uses; good ones have 35 to 50 %."""
H100 = "an H100 at 40 % of its bf16 peak"
TRAINING_OPERATIONS = 3
"""Operations of a step over those of forward: backward makes two products for each one."""
GPT2_WORDS = 50_257
SEQUENCE = 1024
LLAMA_SEQUENCE = 2048
LLAMA_BLOCKS = 22
LORA_RANK = 16
_LLAMA_PRODUCTS = (
    ("self_attn.q_proj", 2048, 2048),
    ("self_attn.k_proj", 2048, 256),
    ("self_attn.v_proj", 2048, 256),
    ("self_attn.o_proj", 2048, 2048),
    ("mlp.gate_proj", 2048, 5632),
    ("mlp.up_proj", 2048, 5632),
    ("mlp.down_proj", 5632, 2048),
)
"""Products of a block: name, inputs, outputs."""


def h100_batch_time_s(operations: int, utilization: float = H100_UTILIZATION) -> float:
    """Return the seconds that forward and backward take.

    Args:
        operations: of the whole batch's forward.
        utilization: share of the peak that is used.
    """
    return TRAINING_OPERATIONS * operations / (H100_OPERATIONS_PER_S * utilization)


def gpt2_small() -> Architecture:
    """GPT-2 small: 124,439,808 parameters in 148 tensors; 8 sequences of 1,024 tokens."""
    return _gpt2("gpt2_small", 768, 12)


def gpt2_medium() -> Architecture:
    """GPT-2 medium: 354,823,168 parameters in 292 tensors; 8 sequences of 1,024 tokens."""
    return _gpt2("gpt2_medium", 1024, 24)


def _gpt2(name: str, width: int, blocks: int) -> Architecture:
    layers = LayerList()
    words = SEQUENCE
    layers.embedding("transformer.wte", GPT2_WORDS, width, positions=words)
    layers.embedding("transformer.wpe", SEQUENCE, width, positions=words)
    for block in range(blocks):
        path = f"transformer.h.{block}"
        layers.layer_norm(f"{path}.ln_1", width, positions=words)
        layers.linear(f"{path}.attn.c_attn", width, 3 * width, positions=words)
        attention = _attention_operations(words, width, causal=True)
        layers.linear(
            f"{path}.attn.c_proj", width, width, positions=words, more_operations=attention
        )
        layers.layer_norm(f"{path}.ln_2", width, positions=words)
        layers.linear(f"{path}.mlp.c_fc", width, 4 * width, positions=words)
        layers.linear(f"{path}.mlp.c_proj", 4 * width, width, positions=words)
    head = 2 * words * width * GPT2_WORDS
    layers.layer_norm("transformer.ln_f", width, positions=words, more_operations=head)
    return _on_h100(name, layers, 8)


def bert_base() -> Architecture:
    """BERT-base, uncased, without a head: 109,482,240 parameters; 32 sequences of 512 tokens."""
    layers = LayerList()
    words, width = 512, 768
    layers.embedding("embeddings.word_embeddings", 30_522, width, positions=words)
    layers.embedding("embeddings.position_embeddings", 512, width, positions=words)
    layers.embedding("embeddings.token_type_embeddings", 2, width, positions=words)
    layers.layer_norm("embeddings.LayerNorm", width, positions=words)
    for block in range(12):
        path = f"encoder.layer.{block}"
        for part in ("query", "key", "value"):
            layers.linear(f"{path}.attention.self.{part}", width, width, positions=words)
        attention = _attention_operations(words, width)
        dense = f"{path}.attention.output.dense"
        layers.linear(dense, width, width, positions=words, more_operations=attention)
        layers.layer_norm(f"{path}.attention.output.LayerNorm", width, positions=words)
        layers.linear(f"{path}.intermediate.dense", width, 4 * width, positions=words)
        layers.linear(f"{path}.output.dense", 4 * width, width, positions=words)
        layers.layer_norm(f"{path}.output.LayerNorm", width, positions=words)
    layers.linear("pooler.dense", width, width)
    return _on_h100("bert_base", layers, 32)


def vit_b16() -> Architecture:
    """ViT-B/16 for 224x224 images: 86,567,656 parameters in 152 tensors; 128 images."""
    layers = LayerList()
    width, patches = 768, 14 * 14
    words = patches + 1
    # A parameter of the model itself gets a layer of its own, with torchvision's `class_token`.
    layers.add("class_token", width, "Parameter", weight=(1, 1, width))
    layers.convolution("conv_proj", FeatureMap(3, 224, 224), width, 16, stride=16, bias=True)
    layers.add("encoder", words * width, "Encoder", pos_embedding=(1, words, width))
    for block in range(12):
        path = f"encoder.layers.encoder_layer_{block}"
        layers.layer_norm(f"{path}.ln_1", width, positions=words)
        products = 2 * words * 3 * width * width
        layers.add(
            f"{path}.self_attention",
            products + _attention_operations(words, width),
            "MultiheadAttention",
            words,
            in_proj_weight=(3 * width, width),
            in_proj_bias=(3 * width,),
        )
        layers.linear(f"{path}.self_attention.out_proj", width, width, positions=words)
        layers.layer_norm(f"{path}.ln_2", width, positions=words)
        layers.linear(f"{path}.mlp.0", width, 4 * width, positions=words)
        layers.linear(f"{path}.mlp.3", 4 * width, width, positions=words)
    layers.layer_norm("encoder.ln", width, positions=words)
    layers.linear("heads.head", width, 1000)
    return _on_h100("vit_b16", layers, 128)


def llama_1b() -> Architecture:
    """A Llama-style model: 1,100,048,384 parameters in 201 tensors; 4 sequences of 2,048 tokens.

    The shapes of TinyLlama 1.1B: 22 blocks of width 2,048, 32 heads with 4 of keys and values, a
    gated layer of 5,632, and 32,000 words in separate input and output embeddings.
    """
    layers = LayerList()
    words, width, vocabulary = LLAMA_SEQUENCE, 2048, 32_000
    layers.embedding("model.embed_tokens", vocabulary, width, positions=words)
    for block in range(LLAMA_BLOCKS):
        path = f"model.layers.{block}"
        _rms_norm(layers, f"{path}.input_layernorm", width, words)
        for name, inputs, outputs in _LLAMA_PRODUCTS:
            if name == "mlp.gate_proj":
                _rms_norm(layers, f"{path}.post_attention_layernorm", width, words)
            layers.linear(
                f"{path}.{name}",
                inputs,
                outputs,
                positions=words,
                bias=False,
                more_operations=_llama_attention(name, words, width),
            )
    _rms_norm(layers, "model.norm", width, words)
    layers.linear("lm_head", width, vocabulary, positions=words, bias=False)
    return _on_h100("llama_1b", layers, 4)


def llama_1b_lora() -> Architecture:
    """A LoRA fine-tuning of `llama_1b`: 12,615,680 parameters in 308 tensors (Hu et al. 2021).

    Adapters of rank 16 beside every product of the blocks; all else is frozen. Few parameters,
    scattered over the whole of a step: backward computes one gradient for each frozen product, that
    of its input.
    """
    layers = LayerList()
    words, width, vocabulary = LLAMA_SEQUENCE, 2048, 32_000
    head = 2 * words * width * vocabulary
    for block in range(LLAMA_BLOCKS):
        for name, inputs, outputs in _LLAMA_PRODUCTS:
            more = _llama_attention(name, words, width)
            if (block, name) == (LLAMA_BLOCKS - 1, _LLAMA_PRODUCTS[-1][0]):
                more += head
            frozen = 2 * words * inputs * outputs
            adapters = 2 * words * LORA_RANK * (inputs + outputs)
            layers.add(
                f"model.layers.{block}.{name}",
                frozen + adapters + more,
                "LoraLinear",
                words,
                lora_A=(LORA_RANK, inputs),
                lora_B=(outputs, LORA_RANK),
            )
    whole = _on_h100("llama_1b_lora", layers, 4)
    # A product of forward and one of backward, in place of two.
    time_s = whole.batch_time_s * 2 / TRAINING_OPERATIONS
    return replace(whole, batch_time_s=time_s, forward_share=1 / 2)


def _llama_attention(name: str, words: int, width: int) -> int:
    """Return the operations of attention, which come before its output's product."""
    return _attention_operations(words, width, causal=True) if name == "self_attn.o_proj" else 0


def _rms_norm(layers: LayerList, name: str, width: int, words: int) -> None:
    layers.add(name, words * 4 * width, "RMSNorm", words, weight=(width,))


def _attention_operations(words: int, width: int, *, causal: bool = False) -> int:
    """Products of queries with keys and of weights with values; half of them where causal."""
    operations = 2 * 2 * words * words * width
    return operations // 2 if causal else operations


def _on_h100(name: str, layers: LayerList, batch_size: int) -> Architecture:
    operations = sum(layer.operations for layer in layers.layers) * batch_size
    time_s = h100_batch_time_s(operations)
    return Architecture(name, tuple(layers.layers), batch_size, time_s, H100)
