"""PEFT's adapters, merged at load, against peft's own result on the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from conftest import randomise
from families import make_batch, make_model
from safetensors.torch import load_file, save_file
from tokenizers_offline import TEXTS, sentence_folder, write_files

import ftbert
from ftbert.checkpoint import open_weights
from ftbert.converters import convert
from ftbert.evaluation import check

peft = pytest.importorskip("peft")
BERT = ["query", "value", "dense"]
LLAMA = ["q_proj", "k_proj", "down_proj", "up_proj"]


def adapted(folder: Path, family: str = "bert", task: str = "encoder", **config: Any) -> tuple[Path, Any, Any]:
    """A base with weights, an adapter with nothing at 0 or 1 beside it, and peft's model of both."""
    base = make_model(family, task, 0, seed=1)
    base.save_pretrained(folder / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **config}))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", model.eval(), base


@pytest.mark.parametrize(
    ("family", "task", "config"),
    [
        ("bert", "encoder", {"target_modules": BERT}),
        ("bert", "masked_lm", {"target_modules": BERT, "use_rslora": True, "bias": "all"}),
        ("bert", "encoder", {"target_modules": ["query", "word_embeddings"], "use_dora": True, "r": 3}),
        ("bert", "sequence_classification", {"target_modules": BERT[:2], "task_type": "SEQ_CLS", "bias": "lora_only"}),
        ("bert", "token_classification", {"target_modules": BERT[:2], "task_type": "TOKEN_CLS"}),
        ("llama", "encoder", {"target_modules": LLAMA, "rank_pattern": {"down_proj": 2, r"layers\.1\..*k_proj": 7}, "alpha_pattern": {"q_proj": 9}}),
        ("phi3", "encoder", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
        ("qwen3", "causal_lm", {"target_modules": "all-linear", "use_dora": True, "task_type": "CAUSAL_LM"}),
        ("qwen2", "encoder", {"target_modules": LLAMA[:2], "lora_bias": True, "bias": "lora_only"}),
        ("bert", "encoder", {"target_modules": BERT, "layers_to_transform": [1], "modules_to_save": ["pooler", "LayerNorm"]}),
        ("roberta", "encoder", {"target_modules": r".*layer\.1\..*(query|key)", "use_rslora": True}),
    ],
    ids=str,
)  # fmt: skip
def test_equals_peft(tmp_path: Path, family: str, task: str, config: dict[str, Any]) -> None:
    folder, theirs, _ = adapted(tmp_path, family, task, **config)
    ours = ftbert.load(folder)
    batch = make_batch(theirs.base_model.model, task, "right")
    valid = batch["attention_mask"].bool()
    with torch.inference_mode():
        want = theirs(**batch, output_hidden_states=True)
        plain = ftbert.load(tmp_path / "base")(**batch).last_hidden_state
    got = ours(**batch)
    assert_same(got.last_hidden_state[valid], want.hidden_states[-1][valid])
    assert float((plain - got.last_hidden_state)[valid].abs().max()) > 1e-2  # the adapter counts
    if "logits" in want and task != "causal_lm":
        assert_same(got.logits[valid] if task != "sequence_classification" else got.logits, want.logits[valid] if task != "sequence_classification" else want.logits)
    copy = ftbert.load(convert(folder, tmp_path / "copy"))
    assert torch.equal(copy(**batch).last_hidden_state, got.last_hidden_state)
    assert check(ours).passed and ours.info()["adapter"] == str(folder)


def test_an_adapter_beside_the_weights(tmp_path: Path) -> None:
    folder, _, _ = adapted(tmp_path, target_modules=BERT)
    want = ftbert.load(folder)
    for path in folder.glob("adapter_*"):
        shutil.copy(path, tmp_path / "base")
    said = json.loads((tmp_path / "base/adapter_config.json").read_text())
    (tmp_path / "base/adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": None}))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(ftbert.load(tmp_path / "base")(ids).last_hidden_state, want(ids).last_hidden_state)
    (tmp_path / "base/model.safetensors").unlink()
    with pytest.raises(ValueError, match="base_model_name_or_path names no base, and no weights lie beside the adapter"):
        ftbert.load(tmp_path / "base")


@pytest.mark.parametrize("whole", [False, True])
def test_sentence_transformers(tmp_path: Path, whole: bool) -> None:
    """whole: the base has the modules, and the folder an adapter alone."""
    from sentence_transformers import SentenceTransformer

    base = sentence_folder(tmp_path / "base", pooling="cls", normalize=True)
    theirs = SentenceTransformer(str(base), device="cpu")
    theirs.add_adapter(peft.LoraConfig(r=4, lora_alpha=8, target_modules=BERT))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.2)
    theirs.save_pretrained(str(tmp_path / "made"))
    want = theirs.eval().encode(TEXTS)
    made = tmp_path / "made"
    if whole:
        for path in made.iterdir():
            if not path.name.startswith("adapter_"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    said = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": str(base)}))
    ours = ftbert.load(made)
    assert_same(ours.encode(TEXTS, normalize=None), want)
    assert_same(ftbert.load(convert(made, tmp_path / "copy")).encode(TEXTS, normalize=None), want)


def test_a_tokenizer_of_the_adapters_own(tmp_path: Path) -> None:
    folder, _, _ = adapted(tmp_path, target_modules=BERT)
    write_files(tmp_path / "base", "bert")
    shutil.copy(tmp_path / "base/tokenizer.json", folder)
    assert ftbert.load(folder).folder == tmp_path / "base"
    said = json.loads((folder / "tokenizer.json").read_text())
    said["added_tokens"].append(said["added_tokens"][0] | {"content": "<new>", "id": 300})
    (folder / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"adapter/tokenizer\.json: has other tokens than the base's"):
        ftbert.load(folder)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type 'IA3' is not supported: only 'LORA'"),
        ({"use_qalora": True}, "adapter_config.json: use_qalora True is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices a list of 1 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' is not supported: it changes the base"),
        ({"r": 0}, "r must be a positive integer; got 0"),
        ({"r": 5}, r"(?s)does not fit its base.*lora_A.weight: the base and r 5 ask for \[5, 48\], the adapter has \[4, 48\]"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number; got 'x'"),
        ({"bias": "some"}, "bias 'some' is not supported"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object; got a list of 1"),
        ({"base_model_name_or_path": "nowhere/at/all"}, "adapter_config.json: base_model_name_or_path: nowhere/at/all: expected a model folder"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_merged(tmp_path: Path, entries: dict[str, Any], words: str) -> None:
    folder, _, _ = adapted(tmp_path, target_modules=BERT)
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(said | entries))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        ftbert.load(folder)


LAYER = "base_model.model.encoder.layer.1.attention.self.query."


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: t.pop(LAYER + "lora_B.weight"), "query: one of lora_A and lora_B is missing"),
        (lambda t: [t.pop(LAYER + f"lora_{part}.weight") for part in "AB"], "query: in target_modules, and without lora_A and lora_B"),
        (lambda t: t.update({LAYER + "lora_B.weight": torch.zeros(7, 4)}), r"the base and r 4 ask for \[48, 4\], the adapter has \[7, 4\]"),
        (lambda t: t.update({"base_model.model.encoder.layer.9.output.dense.lora_A.weight": torch.zeros(4, 48)}), "layer.9.*: the base has no such module"),
        (lambda t: t.update({"base_model.model.pooler.dense.bias": torch.zeros(48)}), "neither LoRA's, nor in modules_to_save, nor a bias"),
    ],
    ids=range(5),
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path: Path, spoil: Any, words: str) -> None:
    folder, _, _ = adapted(tmp_path, target_modules=BERT)
    tensors = load_file(folder / "adapter_model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)adapter_model.safetensors: the adapter does not fit its base, .*base.*" + words):
        ftbert.load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="an adapter without its weights; expected adapter_model.safetensors"):
        ftbert.load(folder)


def test_a_bias_that_no_layer_has(tmp_path: Path) -> None:
    folder, _, _ = adapted(tmp_path, "llama", target_modules=LLAMA, lora_bias=True)
    with pytest.raises(ValueError, match=r"q_proj\.lora_B\.bias: the base's layer has no bias to add it to"):
        ftbert.load(folder)


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    folder, _, _ = adapted(tmp_path, target_modules=BERT)
    other = randomise(make_model("roberta", "encoder", 1), 1)
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="does not fit its base"):
        ftbert.load(folder)
    assert open_weights(tmp_path / "base").shapes()  # which is whole by itself
