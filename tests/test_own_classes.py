"""Config files that name a class with code of its own: read where a row says what it changes, else refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from families import make_batch, make_model
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder
from tokenizers_offline import folder_of, modules_of, write
from transformers import AutoTokenizer

import ftbert
from ftbert.converters import convert
from ftbert.evaluation import check
from ftbert.text import TextSettings, load_tokenizer

TEXTS = ["hello world", "naive cafe the end hello", "two"]


def edit(folder: Path, **entries: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


@pytest.fixture
def voyage(tmp_path: Path) -> tuple[Path, Any, torch.Tensor]:
    """As voyageai/voyage-4-nano is published; the model that its code makes, and the layer behind it."""
    folder = write(tmp_path / "voyage", "bert", model_max_length=64, tokenizer_class="BertTokenizer")
    sizes = {"vocab_size": 400, "tie_word_embeddings": True, "num_labels": 90}
    inner = make_model("qwen3", "encoder", 0, is_causal=False, **sizes)
    linear = torch.randn(90, inner.config.hidden_size, generator=torch.Generator().manual_seed(1))
    inner.save_pretrained(folder)
    state = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state | {"linear.weight": linear}, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    del document["is_causal"]
    code = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
    said = {"architectures": ["Qwen3ForCausalLM"], "auto_map": code, "use_bidirectional_attention": True}
    (folder / "config.json").write_text(json.dumps(document | said | {"num_labels": 90}))
    (folder / "modules.json").write_text(json.dumps(modules_of("Transformer", "Pooling", "Normalize")))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder, inner, linear


def test_voyage_4(voyage: tuple[Path, Any, torch.Tensor], tmp_path: Path) -> None:
    folder, inner, linear = voyage
    model = ftbert.load(folder)
    assert not any(layer.attention.causal for layer in model.config.layers)
    with torch.no_grad():
        ids = [torch.tensor([load_tokenizer(folder)(text)["input_ids"]]) for text in TEXTS]
        states = [inner(one).last_hidden_state[0] @ linear.T for one in ids]
    want = torch.stack([torch.nn.functional.normalize(one.mean(0), dim=0) for one in states]).numpy()
    for one in (model, ftbert.load(convert(folder, tmp_path / "copy")), ftbert.load(folder, heads=False)):
        assert np.abs(one.encode(TEXTS) - want).max() < 1e-6
        for ours, theirs in zip(one.encode(TEXTS, output_value="token_embeddings"), states, strict=True):
            assert_close(torch.from_numpy(ours), theirs, atol=3e-5)
    assert model.encode(TEXTS, pooling="cls").shape == (3, 90)
    with pytest.raises(ValueError, match="pooling max is not supported: this model's class has a linear layer"):
        model.encode(TEXTS, pooling="max")
    checked = check(model, texts=TEXTS)
    assert checked.passed and checked.texts is not None and checked.texts.peer == "transformers"
    assert_close(model.reference()(ids[1]).last_hidden_state, inner(ids[1]).last_hidden_state, atol=1e-6)


def test_what_a_server_says_of_voyage_4(voyage: tuple[Path, Any, torch.Tensor]) -> None:
    pytest.importorskip("msgspec", reason="msgspec is not installed: the extra ftbert[serve]")
    from ftbert.server.describe import describe
    from ftbert.server.settings import Settings

    about = describe(ftbert.load(voyage[0]), "", str(voyage[0]), Settings(models=()))
    assert (about.task, about.model.hidden, about.model.token_width) == ("embedding", 90, 90)


@pytest.mark.parametrize(
    ("family", "kind", "code"),
    [
        ("llama", "llama_bidirec", "llama_bidirectional_model.LlamaBidirectionalModel"),
        ("qwen3", "bidirectional_pplx_qwen3", "modeling.PPLXQwen3Model"),
    ],
)
def test_a_type_of_its_own(family: str, kind: str, code: str, tmp_path: Path) -> None:
    """Attention in both directions, whatever config.json says or leaves out; of pplx-embed whole numbers behind it."""
    folder = write(tmp_path / "made", "bert", model_max_length=64, tokenizer_class="BertTokenizer")
    reference = make_model(family, "encoder", 0, is_causal=False, vocab_size=400)
    reference.save_pretrained(folder)
    edit(folder, model_type=kind, is_causal=None, architectures=[code.rpartition(".")[2]], auto_map={"AutoModel": code})
    modules = modules_of("Transformer", "Pooling")
    if family == "qwen3":
        modules.append({"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    ids = [torch.tensor([load_tokenizer(folder)(text)["input_ids"]]) for text in TEXTS]
    with torch.no_grad():
        means = torch.stack([reference(one).last_hidden_state[0].mean(0) for one in ids])
    want = means.numpy() if family == "llama" else torch.clamp(torch.round(torch.tanh(means) * 127), -128, 127).numpy()
    for model in (ftbert.load(folder), ftbert.load(convert(folder, tmp_path / "copy"))):
        got = model.encode(TEXTS, normalize=None)
        if family == "qwen3":
            assert np.array_equal(got, got.round()) and np.abs(got - want).max() <= 1 and (got == want).mean() > 0.99
        else:
            assert np.abs(got - want).max() < 3e-5
    edit(folder, auto_map=None, architectures=["Other"])
    with pytest.raises(ValueError, match=f"model type '{kind}' is not supported"):
        ftbert.load(folder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_use_bidirectional_attention(family: str, tmp_path: Path) -> None:
    """Code beside the weights reads it; transformers' own classes of these types do not."""
    reference = make_model(family, "encoder", 0, is_causal=False)
    reference.save_pretrained(tmp_path)
    edit(tmp_path, is_causal=None, use_bidirectional_attention=True, architectures=[f"{type(reference).__name__[:-5]}ForCausalLM"])
    batch = make_batch(reference, "encoder", "right")
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        want = reference(**batch).last_hidden_state
    model = ftbert.load(tmp_path)
    assert_close(model(**batch).last_hidden_state[kept], want[kept], atol=3e-5)
    assert_close(model.reference()(**batch).last_hidden_state[kept], want[kept], atol=1e-6)
    assert TextSettings.from_folder(tmp_path).pooling == "mean"


@pytest.mark.parametrize("where", ["", "someone/elsewhere--"])
@pytest.mark.parametrize(("family", "code"), [("bert", "layers.BertModel"), ("qwen3", "modeling.KaLMModel"), ("llama", "modeling.NewModel")])
def test_code_that_nobody_listed_is_refused_by_name(family: str, code: str, where: str, tmp_path: Path) -> None:
    make_model(family, "encoder", 0).save_pretrained(tmp_path)
    entries = {"AutoConfig": "configuration.Any", "AutoModel": where + code}
    edit(tmp_path, auto_map=entries)
    with pytest.raises(ValueError, match=rf"config\.json: auto_map names {code}, .* take auto_map out of config\.json"):
        ftbert.load(tmp_path)
    ftbert.load(edit(tmp_path, auto_map={"AutoConfig": "configuration.Any", "AutoTokenizer": ["a.B", None]}))


def test_an_architecture_that_nobody_has_is_refused_by_name(tmp_path: Path) -> None:
    make_model("bert", "encoder", 0).save_pretrained(tmp_path)
    edit(tmp_path, architectures=["BertForContrast"])
    with pytest.raises(ValueError, match=r"architectures names BertForContrast, .* name that class there"):
        ftbert.load(tmp_path)
    for name in ("BertLMHeadModel", "RobertaModel", "TFBertModel", "FlaxBertForMaskedLM", "HF_ColBERT", "Contriever"):
        ftbert.load(edit(tmp_path, architectures=[name]))


@pytest.mark.parametrize(
    ("family", "code"),
    [
        ("nomic_bert", "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"),
        ("nomic_bert", "modeling_hf_nomic_bert.NomicBertForPreTraining"),
        ("eurobert", "modeling_eurobert.EuroBertModel"),
        ("jina_embeddings_v3", "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"),
        ("new", "Alibaba-NLP/new-impl--modeling.NewModel"),
        ("neobert", "model.NeoBERT"),
        ("qwen2", "modeling_qwen.Qwen2Model"),
        ("phi3", "modeling_phi3.Phi3ForCausalLM"),
    ],
)
def test_listed_code_is_what_transformers_has(family: str, code: str, tmp_path: Path) -> None:
    reference = make_model(family, "encoder", 0, **({"is_causal": False} if family == "qwen2" else {}))
    reference.save_pretrained(tmp_path)
    batch = make_batch(reference, "encoder", "right")
    plain = ftbert.load(tmp_path)(**batch).last_hidden_state
    assert torch.equal(ftbert.load(edit(tmp_path, auto_map={"AutoModel": code}))(**batch).last_hidden_state, plain)


@pytest.mark.parametrize("load", [ftbert.load, ftbert.optimize])
def test_live_code_is_compared(load: Any) -> None:
    """A subclass under a known type, as transformers makes one of auto_map, whose tokens see all others."""
    from transformers import Qwen3Model

    class Both(Qwen3Model):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
            whole = torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
            return super().forward(input_ids, attention_mask={"full_attention": whole}, **given)

    config = make_model("qwen3", "encoder", 0, max_window_layers=28).config
    live = Both(config).eval()
    with pytest.raises(RuntimeError, match="differs from Both's own"):
        load(live)
    config.use_bidirectional_attention = True  # what such code says of itself
    load(Both(config).eval())
    load(Qwen3Model(config).eval())  # transformers' own does not read it


# ---- XLM-RoBERTa by flash-attention's names ---------------------------------------------------------------------------

FLASH_NAMES = {
    "embeddings.LayerNorm": "emb_ln", "attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2",
    "attention.output.dense": "mixer.out_proj", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    "self_attn.o_proj": "mixer.out_proj", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
    "attention.self.query": "mixer.Wqkv", "self_attn.q_proj": "mixer.Wqkv", "encoder.layer.": "layers.",
    "layers.": "encoder.layers.",
}  # fmt: skip


def in_flash_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state of transformers' XLM-RoBERTa or Jina v3 under the names of jinaai's code."""
    made = {}
    for name, tensor in state.items():
        if any(f"{part}." in name for part in ("key", "value", "k_proj", "v_proj")):
            continue
        for query, others in (("self.query", ("self.key", "self.value")), ("q_proj", ("k_proj", "v_proj"))):
            if query in name:
                tensor = torch.cat([tensor, *(state[name.replace(query, other)] for other in others)])
        for new, old in FLASH_NAMES.items():
            name = name.replace(new, old)
        made[name] = tensor.contiguous()
    return made


def test_jina_reranker_2(tmp_path: Path) -> None:
    """As jinaai/jina-reranker-v2-base-multilingual is published: its config says no model_type."""
    folder = folder_of(tmp_path / "plain", "xlm-roberta", config={"type_vocab_size": 1, "layer_norm_eps": 1e-5})
    published = tmp_path / "published"
    shutil.copytree(folder, published)
    state = in_flash_names(load_file(folder / "model.safetensors"))
    assert {"roberta.emb_ln.weight", "roberta.encoder.layers.1.mixer.Wqkv.bias", "classifier.out_proj.weight"} <= state.keys()
    save_file(state, published / "model.safetensors", metadata={"format": "pt"})
    names = ("AutoModel", "XLMRobertaModel"), ("AutoModelForSequenceClassification", "XLMRobertaForSequenceClassification")
    code = {auto: f"modeling_xlm_roberta.{name}" for auto, name in names}
    said = {"auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig", **code}, "num_labels": 1}
    edit(published, position_embedding_type="absolute", use_flash_attn=True, emb_pooler=None, **said)
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "model_type"}))
    (published / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": 64}')

    theirs = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    model = ftbert.load(published)
    batch = make_batch(theirs[0].auto_model, "encoder", "right")
    with torch.no_grad():
        want = theirs[0].auto_model(**batch).logits
    texts = [*TEXTS, "hello " * 90]
    for one in (model, ftbert.load(convert(published, tmp_path / "copy"))):
        assert_close(one(**batch).logits, want, atol=3e-5)
        ranked, expected = one.rerank("hello world", texts), theirs.rank("hello world", texts)
        assert [(row["corpus_id"], pytest.approx(row["score"], abs=2e-5)) for row in expected] == [
            (row["corpus_id"], row["score"]) for row in ranked
        ]
        alone = [one.predict(("hello world", text)) for text in texts]
        assert np.abs(one.predict([("hello world", text) for text in texts]) - alone).max() < 1e-6
    assert_close(model.reference()(**batch).logits, want, atol=1e-6)
    state["roberta.encoder.layers.0.mixer.norm_q.weight"] = torch.ones(4)
    save_file(state, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"extra roberta\.encoder\.layers\.0\.mixer\.norm_q\.weight"):
        ftbert.load(published)
    with pytest.raises(ValueError, match=r"auto_map names modeling_xlm_roberta\.XLMRobertaModel, .* has no row for"):
        ftbert.load(edit(published, model_type="xlm-roberta", position_embedding_type="alibi"))


@pytest.mark.parametrize("attend", [True, False])
def test_jina_colbert_2(attend: bool, tmp_path: Path) -> None:
    """As jinaai/jina-colbert-v2 is published, against sentence-transformers on the same weights in transformers' class."""
    plain, published = tmp_path / "plain", tmp_path / "published"
    write(plain, "xlm-roberta", model_max_length=64, tokenizer_class="XLMRobertaTokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(plain), local_files_only=True)
    markers = ["[QueryMarker]", "[DocumentMarker]"]
    tokenizer.add_tokens(markers)
    tokenizer.save_pretrained(plain)
    inner = make_model("jina_embeddings_v3", "encoder", 0, vocab_size=400, max_position_embeddings=66, pad_token_id=tokenizer.pad_token_id)
    width, hidden = 24, inner.config.hidden_size
    linear = {"linear.weight": torch.randn(width, hidden, generator=torch.Generator().manual_seed(4)) / 8}
    metadata = {
        "dim": width, "query_maxlen": 9, "doc_maxlen": 30, "attend_to_mask_tokens": attend, "mask_punctuation": True,
        "query_token_id": markers[0], "doc_token_id": markers[1], "similarity": "cosine",
    }  # fmt: skip
    inner.save_pretrained(plain)
    (plain / "artifact.metadata").write_text(json.dumps(metadata))
    shutil.copytree(plain, published)
    save_file(load_file(plain / "model.safetensors") | linear, plain / "model.safetensors", metadata={"format": "pt"})
    edit(plain, architectures=["HF_ColBERT"])
    state = {f"roberta.{name}": tensor for name, tensor in in_flash_names(inner.state_dict()).items()}
    assert {"roberta.emb_ln.weight", "roberta.encoder.layers.1.mixer.Wqkv.bias"} <= state.keys()
    pooler = {f"roberta.pooler.dense.{name}": torch.zeros(shape) for name, shape in (("weight", (hidden, hidden)), ("bias", hidden))}
    save_file({**pooler, **state, **linear}, published / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((published / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    (published / "config.json").write_text(json.dumps(config))
    code = "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta."
    names = ("AutoModel", "XLMRobertaModel"), ("AutoModelForPreTraining", "XLMRobertaForPreTraining")
    edit(
        published, model_type="xlm-roberta", architectures=["HF_ColBERT"], position_embedding_type="rotary",
        rotary_emb_base=theta, lora_adaptations=None, auto_map={auto: code + name for auto, name in names},
    )  # fmt: skip

    theirs = MultiVectorEncoder(str(plain), device="cpu", local_files_only=True)
    texts = [*TEXTS, "hello, world. the end!", "naive cafe " * 30]
    for one in (ftbert.load(published), ftbert.load(convert(published, tmp_path / "copy"))):
        for task in ("query", "document"):
            want, found = getattr(theirs, f"encode_{task}")(texts), one.encode_multi_vector(texts, task=task)
            for text, mine, other in zip(texts, found, want, strict=True):
                assert mine.shape == tuple(other.shape)
                assert np.abs(mine - np.asarray(other)).max() < 3e-5
                assert np.abs(mine - one.encode_multi_vector(text, task=task)).max() < 3e-6
        scores = theirs.similarity(theirs.encode_query(["hello"]), theirs.encode_document(texts))[0]
        ranked = one.rerank("hello", texts)
        assert [row["corpus_id"] for row in ranked] == scores.argsort(descending=True, stable=True).tolist()
        assert np.allclose([row["score"] for row in ranked], scores.sort(descending=True).values, atol=1e-4)
    with pytest.raises(ValueError, match="position_embedding_type 'absolute' is not supported of jinaai"):
        ftbert.load(edit(published, position_embedding_type="absolute"))


# ---- BERT with ALiBi ------------------------------------------------------------------------------------------------

JINA = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {
        "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
        "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
    },
}  # fmt: skip


def jina(folder: Path, **overrides: Any) -> Any:
    """As jinaai/jina-embeddings-v2-base-en is published; the model of it."""
    reference = make_model("alibi_bert", "encoder", 0, **overrides)
    reference.save_pretrained(folder)
    edit(folder, **JINA)
    return reference


def test_jina_embeddings_2(tmp_path: Path) -> None:
    reference = jina(tmp_path / "jina", max_position_embeddings=8192, num_attention_heads=12)
    model = ftbert.load(tmp_path / "jina")
    bias = model.config.relative_bias
    assert bias is not None and (bias.span, bias.heads, model.config.max_seq) == (8192, 12, 8192)
    table = model.encoder.weight("attention.relative_bias")
    assert table[0, 8191] == 0 and table[0, 8181] == table[0, 8201] == -5 and table[7, 0] == -8191 / 256
    assert table[8, 8190] == pytest.approx(-(2**-0.5)) and table[11, 8190] == pytest.approx(-(2**-3.5))
    ids = torch.randint(5, 96, (2, 700), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(700) < torch.tensor([[700], [513]])).long()
    with torch.no_grad():
        want = reference(ids, attention_mask=mask).last_hidden_state
    converted = convert(tmp_path / "jina", tmp_path / "copy")
    for one in (model, ftbert.load(converted), ftbert.load(reference)):
        assert_close(one(ids, mask).last_hidden_state[mask.bool()], want[mask.bool()], atol=3e-5)
    with pytest.raises(RuntimeError, match="sequence of 8193 tokens: the model has positions for 8192"):
        model(torch.full((1, 8193), 7))
    fast = ftbert.optimize(reference)
    assert type(fast) is type(reference)
    with torch.no_grad():
        assert_close(fast(ids, attention_mask=mask).last_hidden_state[mask.bool()], want[mask.bool()], atol=3e-5)


def test_mosaic_bert(tmp_path: Path) -> None:
    """Queries, keys and values in one matrix, the biases among the tensors; its config says nothing of them."""
    reference = jina(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for i in range(2):
        at = f"encoder.layer.{i}.attention.self."
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{at}{name}.{kind}") for name in ("query", "key", "value")]
            state[f"{at}Wqkv.{kind}"] = torch.cat(parts)
    state["encoder.alibi"] = torch.zeros(1, 3, 64, 64)
    save_file({f"bert.{name}": tensor for name, tensor in state.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoModelForMaskedLM": "mosaicml/mosaic-bert-base--bert_layers.BertForMaskedLM"}
    said = {"architectures": ["BertForMaskedLM"], "position_embedding_type": "absolute", "feed_forward_type": None}
    model = ftbert.load(edit(tmp_path, auto_map=code, **said))
    batch = make_batch(reference, "encoder", "right")
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        want = reference(**batch).last_hidden_state
    assert_close(model(**batch).last_hidden_state[kept], want[kept], atol=3e-5)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute' is not supported: only 'alibi'"),
        ({"position_embedding_type": None}, "position_embedding_type None is not supported: only 'alibi'"),
        ({"feed_forward_type": "original"}, "feed_forward_type 'original' is not supported: geglu or reglu"),
        ({"feed_forward_type": ["geglu"]}, "feed_forward_type .* is not supported"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0: expected at least 1"),
        ({"num_attention_heads": 0}, "number of attention heads 0"),
        ({"is_decoder": True}, "this checkpoint is a decoder"),
        ({"auto_map": None, "architectures": ["BertModel"]}, "position_embedding_type 'alibi' is not supported: only 'absolute'"),
    ],
)  # fmt: skip
def test_configs_with_alibi_that_are_refused(entries: dict[str, Any], words: str, tmp_path: Path) -> None:
    jina(tmp_path)
    with pytest.raises(ValueError, match=words):
        ftbert.load(edit(tmp_path, **entries))


def test_jinas_other_layers_are_refused(tmp_path: Path) -> None:
    """jina-embeddings-v2-base-code has norms over queries and keys and other names, under the same name of its class."""
    jina(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["encoder.layer.0.attention.self.layer_norm_q.weight"] = torch.ones(48)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"extra encoder\.layer\.0\.attention\.self\.layer_norm_q\.weight"):
        ftbert.load(tmp_path)
