"""Tiny random checkpoints of every model family, and what each is compared with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": 198,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 128

CED: dict[str, Any] = {
    "model_type": "ced",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "sliding_window": WINDOW,
    "n_prefill_layer": 2,
    "prefill_keep_tokens": 140,
    "compress_ratios": [1, 2, 0, 0],
    "record_format": "fp8",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 40_000,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "eos_token_id": 198,
}

HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
FAMILIES = (*HUGGING_FACE, "ced")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models as small as these lose more by sharing their work between threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_family(path: Path, name: str, seed: int = 0, **change: Any) -> Path:
    """Writes a checkpoint of family `name` to `path`/`name` and returns where."""
    target = path / name
    if name == "ced":
        return make_ced(target, CED | change, seed)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    prefix, more = HUGGING_FACE[name]
    shape = {key: value for key, value in (SHAPE | more | change).items() if name != "deepseek_v3" or key != "head_dim"}
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**shape)
    )
    with torch.no_grad():
        for tensor_name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in tensor_name or "embed_scale" in tensor_name:
                continue
            # Large enough that different tokens and positions give clearly different logits, and no bias is zero.
            spread = 1.5 / weight.shape[-1] ** 0.5 if weight.dim() >= 2 else 0.1
            base = 1.0 if weight.dim() == 1 and "norm" in tensor_name and name != "gemma3" else 0.0
            weight.copy_(base + torch.randn(weight.shape) * spread)
    model.save_pretrained(target)
    return target


def make_ced(target: Path, raw: dict[str, Any], seed: int = 0) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    hidden, inner, latent = raw["hidden_size"], raw["intermediate_size"], raw["kv_lora_rank"]
    dim, heads = latent + raw["qk_rope_head_dim"], raw["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": torch.randn(raw["vocab_size"], hidden, generator=generator)}
    for index, ratio in enumerate(raw["compress_ratios"]):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(heads * dim, hidden),
            f"{layer}.self_attn.kv_proj.weight": matrix(dim, hidden),
            f"{layer}.self_attn.kv_norm.weight": norm(latent),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * latent),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
        if ratio:
            tensors[f"{layer}.self_attn.compressor.kv_proj.weight"] = matrix(dim, hidden)
            tensors[f"{layer}.self_attn.compressor.norm.weight"] = norm(latent)
        if ratio == 2:
            tensors[f"{layer}.self_attn.compressor.gate_proj.weight"] = matrix(1, hidden)
    tensors["model.norm.weight"] = norm(hidden)
    if not raw["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(raw["vocab_size"], hidden)
    save_file(tensors, target / "model.safetensors")
    return target


class CedReference:
    """`ced` in float64, plainly: whole matrices over whole sequences, nothing cached, nothing shared with the engine.

    Only the rounding of the records is as the format says, in loops over single values.
    """

    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.raw = json.loads((path / "config.json").read_text())
        self.tensors = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}

    def logits(self, tokens: list[int], keep: int | None = None) -> torch.Tensor:
        """Logits of the last `keep` tokens, the only ones that go through the decoder half; None: all do."""
        raw = self.raw
        hidden = self.tensors["model.embed_tokens.weight"][tokens]
        positions = torch.arange(len(tokens))
        shared: tuple[torch.Tensor, torch.Tensor] | None = None
        for index, ratio in enumerate(raw["compress_ratios"]):
            if index == raw["n_prefill_layer"] and keep is not None:
                hidden, positions = hidden[-keep:], positions[-keep:]
            layer = f"model.layers.{index}"
            x = self._norm(hidden, f"{layer}.input_layernorm")
            if ratio:
                shared = self._records(x, positions, f"{layer}.self_attn.compressor", ratio)
            hidden = hidden + self._attention(x, positions, f"{layer}.self_attn", shared)
            x = self._norm(hidden, f"{layer}.post_attention_layernorm")
            gate = x @ self._weight(f"{layer}.mlp.gate_proj").T
            up = x @ self._weight(f"{layer}.mlp.up_proj").T
            hidden = hidden + (gate * torch.sigmoid(gate) * up) @ self._weight(f"{layer}.mlp.down_proj").T
        return self._norm(hidden, "model.norm") @ self._weight("lm_head").T

    def _attention(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        name: str,
        shared: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        raw, latent = self.raw, self.raw["kv_lora_rank"]
        keys = self._key(x @ self._weight(f"{name}.kv_proj").T, positions, f"{name}.kv_norm")
        age = positions[:, None] - positions[None]
        visible = (age >= 0) & (age < raw["sliding_window"])
        if shared is not None:
            records, ends = shared
            keys = torch.cat((records, keys))
            visible = torch.cat((ends[None] <= positions[:, None], visible), 1)
        q = (x @ self._weight(f"{name}.q_proj").T).view(len(x), raw["num_attention_heads"], -1)
        out = []
        for head in range(raw["num_attention_heads"]):
            query = self._turned(q[:, head], positions)
            scores = (query @ keys.T) * keys.shape[1] ** -0.5
            out.append(torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ keys[:, :latent])
        return torch.cat(out, -1) @ self._weight(f"{name}.o_proj").T

    def _records(
        self, x: torch.Tensor, positions: torch.Tensor, name: str, ratio: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = x @ self._weight(f"{name}.kv_proj").T
        ends = positions
        if ratio == 2:
            whole = len(x) // 2 * 2
            shares = torch.softmax((x @ self._weight(f"{name}.gate_proj").T)[:whole].view(-1, 2, 1), 1)
            values = (values[:whole].view(-1, 2, values.shape[1]) * shares).sum(1)
            ends = positions[1::2]
        keys = self._key(values, ends, f"{name}.norm")
        return torch.stack([self._rounded(key) for key in keys]) if len(keys) else keys, ends

    def _rounded(self, key: torch.Tensor) -> torch.Tensor:
        if self.raw["record_format"] == "fp8":
            parts = []
            for part in key.split(32):
                scale = 2.0 ** (torch.floor(torch.log2(part.abs().max() / 448)) + 1)
                parts.append((part / scale).to(torch.float8_e4m3fn).double() * scale)
            return torch.cat(parts)
        parts = []
        known = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        for part in key.split(16):
            scale = (part.abs().max() / 6).to(torch.float8_e4m3fn).double()
            near = (part[:, None].abs() / scale - known).abs().argmin(1)
            parts.append(known[near] * part.sign() * scale)
        return torch.cat(parts)

    def _key(self, x: torch.Tensor, positions: torch.Tensor, norm: str) -> torch.Tensor:
        latent = self.raw["kv_lora_rank"]
        return self._turned(torch.cat((self._norm(x[:, :latent], norm), x[:, latent:]), 1), positions)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        latent, dim = self.raw["kv_lora_rank"], self.raw["qk_rope_head_dim"]
        frequencies = self.raw["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angle = positions[:, None].double() * frequencies
        a, b = x[:, latent : latent + dim // 2], x[:, latent + dim // 2 :]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.cat((x[:, :latent], *turned), 1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.raw["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]


def add_tokenizer(path: Path) -> None:
    """A byte-level tokenizer and a chat template; the model needs a vocabulary of at least 260."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
