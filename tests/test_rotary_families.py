"""Families with rotary positions: their description against transformers, scaling rules, published configs, refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, randomise
from families import CASES, ROTARY, SIZES, make_batch, make_model, packed
from reference_encoder import encode
from safetensors.torch import load_file, save_file

import ftbert
from ftbert.checkpoint import ModelConfig
from ftbert.converters import open_checkpoint
from ftbert.converters.families import FAMILIES, find_family

MASKS = ("right", "left", "holes")


def described(model_type: str, **settings: Any) -> ModelConfig:
    return find_family({"model_type": model_type}).config({**PUBLISHED[model_type], **settings})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ROTARY)
def test_the_description_is_what_transformers_computes(family: str, size: int) -> None:
    """Without a kernel: tables, windows and positions alone."""
    reference = make_model(family, "encoder", size)
    checkpoint = open_checkpoint(reference)
    weights = dict(checkpoint.items(torch.float64))
    for mask in MASKS:
        batch = make_batch(reference, "encoder", mask)
        kept = batch["attention_mask"].bool()
        with torch.no_grad():
            want = reference(**batch).last_hidden_state
        ids, types = batch["input_ids"], batch.get("token_type_ids")
        got = encode(checkpoint.config.encoder, weights, ids, batch["attention_mask"], types, windows_of="columns")
        assert_close(got[kept], want[kept], atol=2e-5, what=mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ROTARY)
def test_masks_with_holes(place: Place, family: str, size: int) -> None:
    """Positions are columns, windows are of kept tokens: as transformers with flash attention."""
    reference = make_model(family, "encoder", size)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    batch = make_batch(reference, "encoder", "holes")
    ids, mask, types = batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids")
    want = encode(model.config, dict(model.checkpoint.items(torch.float64)), ids, mask, types)
    got = model(**{key: value.to(place.device) for key, value in batch.items()}).last_hidden_state
    limit = 2e-5 if place.dtype == torch.float32 else 128 * place.eps
    assert_close(got, want, atol=limit, rtol=0 if limit < 1e-4 else 64 * place.eps)


# ---- positions ------------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, beta": {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    "yarn, exact": {"factor": 2.0, "truncate": False, "attention_factor": 0.7},
    "yarn, mscale": {"factor": 3.0, "mscale": 0.7, "mscale_all_dim": 1.1},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("older", [False, True])
def test_frequencies_are_those_of_transformers(name: str, older: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = name.partition(",")[0]
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    rope = {"rope_type": kind, **RULES[name]}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope, rope_theta=5e5)))
    said = {"rope_scaling": rope | {"type": kind}, "rope_theta": 5e5} if older else {"rope_parameters": rope | {"rope_theta": 5e5}}
    rotary = described("llama", **sizes, **said).layers[0].attention.rotary
    assert rotary is not None
    plain = [5e5 ** (-i / 64) for i in range(0, 64, 2)]
    ours = torch.tensor(rotary.frequencies or plain, dtype=torch.float64)
    assert (rotary.theta == 5e5) == (kind in ("default", "dynamic"))
    assert_close(ours / theirs.inv_freq.double(), torch.ones(32, dtype=torch.float64), atol=1e-6)
    assert rotary.amplitude == pytest.approx(theirs.attention_scaling, rel=1e-9)


# ---- published models: their config.json, as far as it says what is computed -----------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    "modernbert": {  # answerdotai/ModernBERT-base
        "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "attention_bias": False,
        "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean", "decoder_bias": True,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu", "hidden_size": 768,
        "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "norm_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
        "vocab_size": 50368,
    },
    "qwen3": {  # Qwen/Qwen3-Embedding-0.6B
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 32768,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False, "vocab_size": 151669,
    },
    "gemma3_text": {  # google/embeddinggemma-300m
        "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "_sliding_window_pattern": 6,
        "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152,
        "max_position_embeddings": 2048, "num_attention_heads": 3, "num_hidden_layers": 24, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": True,
        "use_cache": True, "vocab_size": 262144,
    },
    "modernbert-decoder": {
        "model_type": "modernbert-decoder", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_hidden_layers": 4, "max_position_embeddings": 128, "vocab_size": 100,
    },
    "phi3": {  # microsoft/Phi-3-mini-4k-instruct
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064,
    },
    "smollm3": {  # HuggingFaceTB/SmolLM3-3B
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536, "mlp_bias": False,
        "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False, "vocab_size": 128256,
    },
    "gemma": {
        "model_type": "gemma", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "vocab_size": 100,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "vocab_size": 100,
    },
    "neobert": {  # chandar-lab/NeoBERT
        "model_type": "neobert", "architectures": ["NeoBERTLMHead"], "dim_head": 64, "hidden_size": 768,
        "intermediate_size": 3072, "max_length": 4096, "norm_eps": 1e-05, "num_attention_heads": 12,
        "num_hidden_layers": 28, "pad_token_id": 0, "vocab_size": 30522,
    },
    "roformer": {
        "model_type": "roformer", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": 100,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "vocab_size": 100,
    },
    "mistral": {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2,
        "max_position_embeddings": 128, "vocab_size": 100,
    },
    "new": {  # Alibaba-NLP/gte-base-en-v1.5
        "model_type": "new", "architectures": ["NewModel"], "hidden_act": "gelu", "hidden_size": 768,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192,
        "num_attention_heads": 12, "num_hidden_layers": 12, "pack_qkv": True, "pad_token_id": 0,
        "position_embedding_type": "rope", "rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 500000,
        "type_vocab_size": 0, "vocab_size": 30528,
    },
}  # fmt: skip


def test_published_configs_say_what_they_compute() -> None:
    turned = [layer.attention.rotary is not None for layer in described("smollm3").layers]
    assert turned == [i % 4 != 3 for i in range(36)]
    assert {layer.attention.window for layer in described("phi3").layers} == {(2046, None)}
    modernbert = described("modernbert")
    windows = [layer.attention.window for layer in modernbert.layers]
    assert windows == [None if i % 3 == 0 else (64, 64) for i in range(22)]
    thetas = [layer.attention.rotary and layer.attention.rotary.theta for layer in modernbert.layers]
    assert thetas == [160000.0 if i % 3 == 0 else 10000.0 for i in range(22)]
    assert [layer.attention_norm is None for layer in modernbert.layers] == [True] + [False] * 21
    qwen3 = described("qwen3").layers[27].attention
    assert (qwen3.heads, qwen3.kv_heads, qwen3.head_size, qwen3.causal, qwen3.window) == (16, 8, 128, True, None)
    neobert = described("neobert")
    ffn, attention = neobert.layers[27].ffn, neobert.layers[27].attention
    assert (ffn.inter, ffn.gated, ffn.activation, neobert.max_seq, neobert.depth) == (2048, True, "silu", 4096, 28)
    assert attention.rotary is not None and attention.rotary.interleaved and not attention.qkv_bias
    gemma = described("gemma3_text")
    types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(24)]
    for config in (gemma, described("gemma3_text", layer_types=types)):
        assert config.embedding_scale == 768**0.5 and config.max_seq == 2048
        assert [layer.attention.window for layer in config.layers] == [None if i % 6 == 5 else (256, 256) for i in range(24)]
        assert not any(layer.attention.causal for layer in config.layers)


@pytest.mark.parametrize(
    ("family", "settings", "seq"),
    [
        ("modernbert", {"num_hidden_layers": 4, "vocab_size": 500, "pad_token_id": 0}, 200),
        ("qwen3", {"num_hidden_layers": 2, "vocab_size": 500, "use_cache": False}, 150),
        ("gemma3_text", {"num_hidden_layers": 6, "vocab_size": 500, "use_cache": False}, 600),
    ],
)
def test_published_shapes(place: Place, family: str, settings: dict[str, Any], seq: int) -> None:
    from transformers import AutoConfig, AutoModel

    document = {**PUBLISHED[family], **settings}
    reference = randomise(AutoModel.from_config(AutoConfig.for_model(**document)))
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 500, (2, seq), generator=generator)
    mask = (torch.arange(seq) < torch.tensor([[seq], [seq - 57]])).long()
    with torch.no_grad():
        want = reference(ids, attention_mask=mask).last_hidden_state
    got = model(ids.to(place.device), mask.to(place.device)).last_hidden_state.cpu()
    limit = 3e-5 if place.dtype == torch.float32 else 128 * place.eps
    assert_close(got[mask.bool()], want[mask.bool()], atol=limit, rtol=0 if limit < 1e-4 else 64 * place.eps)


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROTARY)
def test_each_text_is_alone_and_padding_says_nothing(place: Place, family: str) -> None:
    reference = make_model(family, "encoder", 0)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    limit = (2e-6 if place.device == "cpu" else 4e-6) if place.dtype == torch.float32 else 16 * place.eps
    for name in MASKS:
        batch = {key: value.to(place.device) for key, value in make_batch(reference, "encoder", name).items()}
        together = model(**batch).last_hidden_state
        other = batch | {"input_ids": torch.where(batch["attention_mask"] == 0, 77, batch["input_ids"])}
        assert torch.equal(model(**other).last_hidden_state, together)
        for i in range(4):
            alone = model(**{key: value[i : i + 1] for key, value in batch.items()}).last_hidden_state
            assert_close(together[i : i + 1], alone, atol=limit, rtol=limit, what=f"{name}, text {i}")


@pytest.mark.parametrize("family", [f for f, task in CASES if FAMILIES[f].decoder and task == "sequence_classification"])
def test_heads_of_decoders_read_the_last_token_that_is_no_padding_by_its_id(place: Place, family: str) -> None:
    """Also where texts end in that id, and in packed ids."""
    reference = make_model(family, "sequence_classification", 0)
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    batch = make_batch(reference, "sequence_classification", "right")
    batch["input_ids"][2, 12:17] = batch["input_ids"][3, 5:7] = batch["input_ids"][1, 0] = 0
    with torch.no_grad():
        want = reference(**batch).logits
    batch = {key: value.to(place.device) for key, value in batch.items()}
    atol = 3e-5 if place.dtype == torch.float32 else 128 * place.eps
    assert_close(model(**batch).logits.cpu(), want, atol=atol, rtol=64 * place.eps)
    [logits] = model.logits_packed(*packed(batch))
    assert_close(logits.cpu(), want, atol=atol, rtol=64 * place.eps)


@pytest.mark.parametrize(
    ("family", "task", "settings"),
    [
        ("eurobert", "sequence_classification", {"classifier_pooling": "bos"}),
        ("modernbert", "sequence_classification", {"classifier_pooling": "mean"}),
        ("modernbert", "masked_lm", {"tie_word_embeddings": False, "classifier_activation": "silu"}),
        ("eurobert", "masked_lm", {"mlp_bias": True}),
    ],
)
def test_other_settings_of_heads(family: str, task: str, settings: dict[str, Any]) -> None:
    reference = make_model(family, task, 0, **settings)
    batch = make_batch(reference, task, "right")
    with torch.no_grad():
        want = reference(**batch).logits
    got = ftbert.load(reference)(**batch).logits
    rows: Any = batch["attention_mask"].bool() if task == "masked_lm" else ...
    assert_close(got[rows], want[rows], atol=3e-5)


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nomic_bert", "jina_embeddings_v3"])
def test_names_of_published_files(tmp_path: Path, family: str) -> None:
    """nomic-embed-text and jina-embeddings-v3 keep older names, which transformers renames, with qkv in one matrix."""
    reference = make_model(family, "encoder", 0)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = reference.state_dict()
    older: dict[str, torch.Tensor] = {}
    attention = "attn" if family == "nomic_bert" else "mixer"
    pairs = {
        "embeddings.LayerNorm": "emb_ln", "self_attn.o_proj": f"{attention}.out_proj", "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2", "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2", "layers.": "encoder.layers.",
    }  # fmt: skip
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            name, tensor = name.replace("self_attn.q_proj", f"{attention}.Wqkv"), torch.cat(parts)
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        for new, old in pairs.items():
            name = name.replace(new, old)
        older[name] = tensor.contiguous()
    save_file(older, path, metadata={"format": "pt"})
    assert set(load_file(path)) == set(older)
    batch = make_batch(reference, "encoder", "right")
    model, same = ftbert.load(tmp_path), ftbert.load(reference)
    assert torch.equal(model(**batch).last_hidden_state, same(**batch).last_hidden_state)
    assert type(model.reference()) is type(reference)
    loaded = type(reference).from_pretrained(tmp_path)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), "transformers renames them as this test does"


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_a_bidirectional_window_of_few_tokens(window: int, tmp_path: Path) -> None:
    """Of EmbeddingGemma's kind: a window of 1 is a token alone."""
    sizes = {"num_hidden_layers": 3, "sliding_window_pattern": 3, "use_bidirectional_attention": True}
    reference = make_model("gemma3_text", "encoder", 0, sliding_window=window, **sizes)
    reference.save_pretrained(tmp_path)
    read = type(reference).from_pretrained(tmp_path).eval()
    for mask in ("right", "left"):
        batch = make_batch(reference, "encoder", mask)
        kept = batch["attention_mask"].bool()
        with torch.no_grad():
            for model, theirs in ((ftbert.load(reference), reference), (ftbert.load(tmp_path), read)):
                assert_close(model(**batch).last_hidden_state[kept], theirs(**batch).last_hidden_state[kept], atol=2e-5)


def test_config_of_nomic_as_published(tmp_path: Path) -> None:
    """nomic-ai/nomic-embed-text-v1.5, smaller."""
    reference = make_model("nomic_bert", "encoder", 0, hidden_act="silu")
    reference.save_pretrained(tmp_path)
    published = {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "causal": False, "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 32, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 48,
        "n_head": 3, "n_inner": 80, "n_layer": 2, "n_positions": 64, "parallel_block": False, "prenorm": False,
        "qkv_proj_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False,
        "vocab_size": 96,
    }  # fmt: skip

    def load(**settings: Any) -> ftbert.Model:
        (tmp_path / "config.json").write_text(json.dumps(published | settings))
        return ftbert.load(tmp_path)

    batch = make_batch(reference, "encoder", "right")
    with torch.no_grad():
        want = reference(**batch).last_hidden_state
    kept = batch["attention_mask"].bool()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = [(load(), 64), (load(rotary_scaling_factor=2), 64), (load(rotary_scaling_factor=2, n_positions=40), 40)]
    for model, rows in models:
        assert_close(model(**batch).last_hidden_state[kept], want[kept], atol=2e-5)
        assert model.config.max_seq == rows
    assert type(load().reference()) is type(reference)
    with pytest.raises(ValueError, match="config.json: prenorm True is not supported: only False"):
        load(prenorm=True)
    # nomic-embed-text-v2-moe
    with pytest.raises(ValueError, match=r"num_experts 8 \(moe_every_n_layers 2\) is not supported: each token .* 2 of 8"):
        load(num_experts=8, moe_every_n_layers=2, moe_top_k=2)


def test_rotary_positions_that_change_with_the_length(tmp_path: Path) -> None:
    make_model("llama", "encoder", 0, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"texts are cut at 64 tokens, and the config has positions for 256 \(rope_type dynamic, factor 4.0\)"):
        ftbert.load(tmp_path)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling of type 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_scaling of type 'ntk'"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_parameters.factor: expected"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_parameters.factor: expected a number above 0"),
        ("llama", {"rope_theta": "much"}, "rope_theta: expected"),
        ("llama", {"rope_theta": -1}, "rope_theta: expected a number above 0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"num_key_value_heads": 3}, "3 does not divide heads 4"),
        ("llama", {"add_cross_attention": True}, "add_cross_attention"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types of model type 'mistral'"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0: expected at least 1"),
        ("phi3", {"layer_types": ["full_attention"] * 32}, "layer_types of model type 'phi3'"),
        ("phi3", {"sliding_window": 0}, "sliding_window 0: expected at least 1"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}, "rope_scaling of type 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "short_factor": [1.0] * 48}}, "rope_scaling of type 'yarn'"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval 0: expected at least 1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .*: expected 0 or 1 for each of 36 layers"),
        ("smollm3", {"no_rope_layers": [2] * 36}, "no_rope_layers .*: expected 0 or 1"),
        ("smollm3", {"no_rope_layers": 4}, "no_rope_layers 4: expected 0 or 1"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"] * 14}, "layer_types .* is not supported: one of"),
        ("qwen3", {"layer_types": ["full_attention"]}, "for each layer"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping 0: expected a number above 0"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0"),
        ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers 0"),
        ("modernbert", {"local_rope_theta": None}, "local_rope_theta null"),
        ("modernbert", {"is_causal": True}, "this checkpoint is a decoder"),
        ("modernbert", {"position_embedding_type": "sans_pos"}, "only 'absolute'"),
        ("new", {"position_embedding_type": "absolute"}, "only 'rope'"),
        ("modernbert-decoder", {"local_attention": None}, "local_attention null"),
        ("modernbert-decoder", {"local_attention": 1}, "local_attention 1: expected at least 2"),
        ("modernbert-decoder", {"add_cross_attention": True}, "add_cross_attention"),
        ("neobert", {"dim_head": 32}, "dim_head 32 is not hidden_size / num_attention_heads, 64"),
        ("neobert", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only 'swiglu'"),
        ("neobert", {"rope": False}, "rope False is not supported: only True"),
        ("neobert", {"ngpt": True}, "ngpt True is not supported"),
        ("neobert", {"rms_norm": False}, "rms_norm False"),
        ("neobert", {"num_attention_heads": 7}, "not a multiple of the number of attention heads 7"),
        ("roformer", {"rotary_value": True}, "rotary_value true"),
        ("roformer", {"embedding_size": "16"}, "embedding_size: expected"),
        ("roformer", {"is_decoder": True}, "this checkpoint is a decoder"),
        ("new", {"logn_attention_scale": True}, "logn_attention_scale True"),
        ("new", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b"),
    ],
)  # fmt: skip
def test_what_is_refused(family: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        described(family, **settings)


def test_a_table_that_the_code_makes(tmp_path: Path) -> None:
    """RoFormer's files hold the sines and cosines of its angles: left out where they are, refused where they are others."""
    reference = make_model("roformer", "encoder", 0)
    batch = make_batch(reference, "encoder", "right")
    want = ftbert.load(reference)(**batch).last_hidden_state
    table = reference.encoder.embed_positions.weight.data
    kept = table.clone()
    table.copy_(kept.bfloat16())
    reference.save_pretrained(tmp_path)
    assert torch.equal(ftbert.load(tmp_path)(**batch).last_hidden_state, want)
    table[3, 1] += 0.1
    reference.save_pretrained(tmp_path)
    for source in (reference, tmp_path):
        with pytest.raises(ValueError, match=r"encoder\.embed_positions\.weight is not what transformers makes"):
            ftbert.load(source)


def test_the_longest_sequence_is_the_configs(place: Place) -> None:
    """Past it transformers changes the frequencies of the rule "dynamic"; the others were not trained there."""
    reference = make_model("llama", "encoder", 0, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    model = ftbert.load(reference, device=place.device, dtype=place.dtype)
    ids = torch.full((1, 65), 7, device=place.device)
    assert model(ids[:, :64]).last_hidden_state.isfinite().all()
    with pytest.raises(RuntimeError, match="sequence of 65 tokens: the model has positions for 64"):
        model(ids)
