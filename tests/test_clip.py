"""CLIP's and SigLIP's texts: checkpoints of both towers, the pooled output, vectors; images are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close, assert_same
from conftest import Place, randomise
from families import make_batch, make_config, make_model, packed
from tokenizers_offline import sentence_folder, write

import ftbert
from ftbert.converters.families import FAMILIES, find_family
from ftbert.converters.from_huggingface import convert
from ftbert.converters.own_code import read_config
from ftbert.end_rows import end_of_packed, end_of_padded

TEXTS = ["hello world", "the end", "naive cafe " * 9, "query document two spaces"]
# Of the tokenizers that `write` makes: [SEP] ends a text.
TOKENS: dict[str, Any] = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]", "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 24,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def towers(kind: str, **text: Any) -> Any:
    """A random model of texts and images."""
    from transformers import AutoConfig, AutoModel

    settings = make_config(f"{kind}_text_model", 2, vocab_size=300, max_position_embeddings=24, **text).to_dict()
    shared = {"projection_dim": 28} if kind == "clip" else {}
    vision = {**VISION, "hidden_size": 64} if kind == "siglip" else VISION
    config = AutoConfig.for_model(kind, text_config=settings, vision_config=vision, **shared)
    return randomise(AutoModel.from_config(config))


@pytest.mark.parametrize("end_id", [-1, 7])
def test_the_token_that_ends_a_text(place: Place, end_id: int) -> None:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 12, (40, 9), generator=made)
    kept = torch.randint(0, 3, (40, 9), generator=made) > 0
    kept[3] = False
    cu = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    index = torch.where(kept.flatten(), kept.flatten().cumsum(0) - 1, -1).int()
    want = []
    for row, mask, start in zip(ids, kept, cu.tolist(), strict=False):
        some = row[mask].tolist()
        first = some.index(max(some)) if end_id < 0 and some else some.index(end_id) if end_id in some else 0
        want.append(start + first if some else -1)
    there = [one.to(place.device) for one in (ids, index, ids[kept], cu)]
    assert end_of_padded(there[0], there[1], end_id).tolist() == want
    assert end_of_packed(there[2], there[3], end_id).tolist() == want
    assert end_of_packed(there[2][:0], there[3][:1].repeat(3), end_id).tolist() == [-1, -1]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_a_checkpoint_of_both_towers_is_read_as_its_text_model(tmp_path: Path, kind: str) -> None:
    reference = towers(kind)
    reference.save_pretrained(tmp_path / "theirs")
    batch = make_batch(reference.text_model, "encoder", "left")
    kept = batch["attention_mask"].bool()
    batch["input_ids"][~kept] = 1
    batch = {name: tensor[:, :24] for name, tensor in batch.items()}
    batch = {name: tensor[[0, 2, 3]] for name, tensor in batch.items()} if kind == "siglip" else batch
    ids, plain = batch["input_ids"], torch.ones_like(batch["input_ids"])
    want = reference.text_model(ids, attention_mask=plain)
    features = reference.get_text_features(ids, attention_mask=plain).pooler_output
    with pytest.warns(UserWarning, match="outside the encoder is left out"):
        models = [ftbert.load(tmp_path / "theirs"), ftbert.load(convert(tmp_path / "theirs", tmp_path / "ours"))]
    for model in models:
        out = model(ids, plain)
        assert_close(out.last_hidden_state, want.last_hidden_state, atol=3e-5)
        assert_close(out.pooler_output, want.pooler_output, atol=3e-5)
        if kind == "clip":
            assert model.tasks == ["pooled", "text_embeds"]
            assert_close(out.text_embeds, features, atol=3e-5)
        flat, cu, longest, _ = packed({"input_ids": ids, "attention_mask": plain})
        for one, other in zip(model.logits_packed(flat, cu, longest), (out.pooler_output, features), strict=False):
            assert_close(one, other, atol=3e-5)
    assert type(models[1].reference()).__name__ == ("CLIPTextModelWithProjection" if kind == "clip" else "SiglipTextModel")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_optimize_computes_the_text_half(kind: str) -> None:
    model = towers(kind)
    ids = make_batch(model.text_model, "encoder", "right")["input_ids"][:, :24]
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "pixel_values": pixels}
    with torch.no_grad():
        want, features = model(**given), model.get_text_features(ids, output_hidden_states=True)
        ftbert.optimize(model)
        got, ours = model(**given), model.get_text_features(ids, output_hidden_states=True)
    assert type(got) is type(want)
    for name in ("logits_per_text", "logits_per_image", "text_embeds", "image_embeds"):
        assert_close(got[name], want[name], atol=1e-4)
    assert_close(ours.pooler_output, features.pooler_output, atol=1e-4)
    for one, other in zip(ours.hidden_states, features.hidden_states, strict=True):  # the last before the final norm
        assert_close(one, other, atol=1e-4)
    assert not model.text_model.forward.fallbacks


def test_a_pooled_output_of_padding_runs_the_original() -> None:
    model = make_model("siglip_text_model", "encoder", 0)
    batch = make_batch(model, "encoder", "right")
    with torch.no_grad():
        want = model(**batch)
        ftbert.optimize(model)
        with pytest.warns(UserWarning, match="padding in the column that the pooled output is of"):
            assert torch.equal(model(**batch).pooler_output, want.pooler_output)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("config", ["modules", "plain"])
def test_vectors_of_texts(tmp_path: Path, kind: str, config: str) -> None:
    """As get_text_features gives them, of SigLIP padded to the model's length; a folder of sentence-transformers with a
    CLIPModel module, or of transformers."""
    from transformers import AutoTokenizer

    reference = towers(kind, eos_token_id=3)
    folder = tmp_path / "0_CLIPModel" if config == "modules" else tmp_path
    write(folder, "bert", **TOKENS)
    reference.save_pretrained(folder)
    if config == "modules":
        module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
        (tmp_path / "modules.json").write_text(json.dumps([module]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = "max_length" if kind == "siglip" else True
    batch = tokenizer(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    with torch.no_grad():
        mask = {} if kind == "siglip" else {"attention_mask": batch["attention_mask"]}
        want = reference.get_text_features(batch["input_ids"], **mask).pooler_output.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [ftbert.load(tmp_path), ftbert.load(convert(tmp_path, tmp_path.with_name(f"{tmp_path.name}_ours")))]
    for model in models:
        assert_same(model.encode(TEXTS, normalize=False), want)
        assert model.get_embedding_dimension() == want.shape[1]
        assert_same(model.encode(TEXTS[1:2], normalize=False), want[1:2])
        for image in (np.zeros((4, 4, 3), np.uint8), b"PNG"):
            with pytest.raises(TypeError, match=r"texts\[1\] must be a str; got (ndarray|bytes)"):
                model.encode(["a", image])


def test_a_folder_that_sentence_transformers_writes_today(tmp_path: Path) -> None:
    """Its Transformer with the methods for texts and images, as modules.json and sentence_bert_config.json say it."""
    reference = towers("clip", eos_token_id=3)
    behind = {"in_features": 28, "out_features": 12, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
    said = {
        "modality_config": {
            "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
            "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
        },
        "module_output_name": "sentence_embedding",
    }
    folder = sentence_folder(tmp_path, model=reference, tokenizer=TOKENS, sentence=said, behind=[behind], normalize=True)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0], *modules[2:]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ftbert.load(folder).encode(TEXTS, normalize=None)
    assert found.shape == (4, 12) and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"model_type": "clip_vision_model"}, "model type 'clip_vision_model' is not supported: it reads images"),
        ({"model_type": "clip", "architectures": ["CLIPForImageClassification"]}, "CLIPForImageClassification.*which reads images"),
        ({"model_type": "siglip", "text_config": {"hidden_size": "x"}}, "transformers' siglip refuses this config"),
        ({"model_type": "clip_text_model", "num_attention_heads": 7}, "hidden size 512 is not a multiple"),
        ({"model_type": "clip_text_model", "max_position_embeddings": 0}, "positions.rows: expected an integer >= 1"),
    ],
    ids=str,
)
def test_what_is_no_text_model_is_refused(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        found = read_config(document)
        find_family(found).config(found)


@pytest.mark.parametrize("family", ["clip_text_model", "siglip_text_model"])
def test_a_text_longer_than_the_table_is_refused(family: str) -> None:
    model = ftbert.load(make_model(family, "encoder", 1))
    with pytest.raises(RuntimeError, match="the model has positions for 53"):
        model(torch.full((1, 54), 7))
    assert FAMILIES[family].bases == ("text_model.",)


def test_an_id_of_the_end_that_is_none_is_refused(tmp_path: Path) -> None:
    make_model("clip_text_model", "encoder", 0).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="config.json: eos_token_id: expected a whole number, got '</s>'"):
        ftbert.load(tmp_path)
