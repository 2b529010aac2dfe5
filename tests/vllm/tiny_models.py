"""Tiny models with random weights, in the shapes that matter to a KV cache; made once per test run.

Weights are large enough that outputs are not degenerate: greedy decoding wanders through the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 128


def make_model(directory: Path, name: str, seed: int = 0) -> Path:
    """Writes `name` (llama, gptoss, gemma3 or deepseek) and returns where."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model, config = _classes(transformers, name)
    path = directory / f"{name}-{seed}"
    if (path / "tokenizer.json").exists():
        return path
    torch.manual_seed(seed)
    made = model(config).to(torch.bfloat16)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape) * 0.12)
    made.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    ).save_pretrained(path)
    return path


def make_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 for the llama."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    path.mkdir()
    weights: dict[str, Any] = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, heads in (("q_proj", SHAPE["num_attention_heads"]), ("v_proj", SHAPE["num_key_value_heads"])):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(8, SHAPE["hidden_size"]) * 0.3
            weights[f"{module}.lora_B.weight"] = torch.randn(heads * SHAPE["head_dim"], 8) * 0.3
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def _classes(transformers: Any, name: str) -> tuple[Any, Any]:
    mixed = ["sliding_attention", "full_attention"] * 2
    if name == "gptoss":
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": mixed}
        return transformers.GptOssForCausalLM, transformers.GptOssConfig(**SHAPE | more)
    if name == "gemma3":
        windows = ["sliding_attention"] * 3 + ["full_attention"]
        more = {"sliding_window": WINDOW, "layer_types": windows, "query_pre_attn_scalar": 64}
        tied = {"tie_word_embeddings": True}
        return transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**SHAPE | more | tied)
    if name == "deepseek":
        shape = {key: value for key, value in SHAPE.items() if key not in ("head_dim", "pad_token_id")}
        more = {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
        }
        return transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config(**shape | more)
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE)
