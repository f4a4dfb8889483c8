"""Scores with products of positions (DeBERTa): lengths past tiles and tables, gaps, both paths, what is refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from compare import assert_close, assert_no_worse
from conftest import VOCAB_WORDS, Place, has_bf16, has_int8
from families import make_batch, make_model

import ftbert
from ftbert._library import load_library
from ftbert.converters import convert
from ftbert.converters.deberta import log_buckets
from ftbert.converters.families import find_family
from ftbert.gpus import Gpu
from ftbert.quantization import quantize

load_library()
ops = torch.ops.ftbert

V3: dict[str, Any] = {"position_buckets": 256, "max_relative_positions": -1, "max_position_embeddings": 512}


def rows_of(buckets: list[int], span: int) -> torch.Tensor:
    one_side = torch.tensor(buckets)
    return torch.cat([-one_side.flip(0)[:-1], one_side]).add(span - 1).clamp(0, 2 * span - 1).int()


def has_fused(place: Place) -> bool:
    return place.device == "cpu" or (place.dtype != torch.float32 and Gpu.of("cuda").capability >= 80)


@pytest.mark.parametrize("terms", ["both", "keys", "queries"])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("span", [256, 5, 40])
@pytest.mark.parametrize(("heads", "size"), [(2, 32), (11, 64), (2, 128)])
def test_attention_with_positions(place: Place, heads: int, size: int, span: int, gaps: bool, terms: str) -> None:
    """Plain distances, and buckets whose rows are as far apart as those of v3. Of eleven heads a GPU's blocks have 128
    queries."""
    lengths = [1, 0, 129, 600, 7, 33]
    rows = rows_of(log_buckets(256, 512) if span == 256 else list(range(span + 1)), span).to(place.device)
    stride = -(-2 * span // 32) * 32
    generator = torch.Generator().manual_seed(span)
    qkv = torch.randn(sum(lengths), 3 * heads * size, generator=generator).to(place.dtype).to(place.device)
    both = torch.randn(2, heads, size, stride, generator=generator).to(place.dtype).to(place.device)
    keys, queries = both[0] * (terms != "queries"), both[1] * (terms != "keys")
    given = {"position_rows": rows, "position_keys": None if terms == "queries" else keys}
    given |= {"position_queries": None if terms == "keys" else queries}
    columns, cu = None, reference.offsets(lengths, place.device)
    if gaps:
        steps = torch.randint(1, 4, (sum(lengths),), generator=generator)
        columns = torch.cat([part.cumsum(0) for part in steps.split(lengths)]).int().to(place.device)
    want = []
    reach = len(rows) // 2
    for i, part in enumerate(qkv.double().split(lengths)):
        q, k, v = part.view(-1, 3, heads, size).permute(1, 2, 0, 3)
        at = torch.arange(lengths[i], device=place.device) if columns is None else columns.split(lengths)[i]
        row = rows[(at - at[:, None]).clamp(-reach, reach) + reach].long().expand(heads, -1, -1)
        scores = q @ k.transpose(1, 2) + (q @ keys.double()).gather(2, row)
        scores += (k @ queries.double()).gather(2, row.transpose(1, 2)).transpose(1, 2)
        want.append(((scores / math.sqrt(3 * size)).softmax(-1) @ v).transpose(0, 1).flatten(1))
    limit = max(2e-5, 16 * place.eps)
    q, k, v = ops.add_qkv_bias(qkv, None, cu, max(lengths), heads)
    scores = ops.add_position_products((q.float() @ k.float().transpose(-1, -2)).contiguous(), q, k, cu, columns, **given)
    weights = ops.softmax(scores, cu, 1 / math.sqrt(3 * size), None, None, qkv.dtype)
    got = ops.transpose((weights.float() @ v.float()).to(qkv.dtype).contiguous(), cu, sum(lengths))
    assert_close(got, torch.cat(want), atol=limit, what="general")
    fused = partial(ops.attention, qkv, cu, max(lengths), heads, columns=columns, scale=1 / math.sqrt(3 * size), **given)
    if not has_fused(place):
        with pytest.raises(RuntimeError, match="products with positions"):
            fused()
        return
    got = fused()
    assert_close(got, torch.cat(want), atol=limit, what="fused")
    assert torch.equal(fused(), got)


@pytest.mark.parametrize("path", ["auto", "general"])
@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_long_texts_by_both_paths(place: Place, family: str, path: str) -> None:
    """512 tokens, of all buckets; each text as if it were alone; ids at padding and neighbours change no bit."""
    sizes = {"max_position_embeddings": 512} if family == "deberta" else V3
    model = make_model(family, "encoder", 2, **sizes)
    fast = ftbert.load(model, device=place.device, dtype=place.dtype, attention=path)
    assert fast.info()["attention"] == ("fused" if path == "auto" and has_fused(place) else "general")
    lengths = [512, 3, 300, 1, 0, 140]
    ids = torch.randint(5, 90, (6, 512), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(512) < torch.tensor(lengths)[:, None]).long()
    got = fast(ids.to(place.device), mask.to(place.device)).last_hidden_state.cpu()
    with torch.no_grad():
        want = model(ids, mask).last_hidden_state
    kept = mask.bool()
    assert_close(got[kept], want[kept], atol=3e-5 if place == Place("cpu", torch.float32) else 256 * place.eps)
    assert not got[~kept].any()
    other = torch.where(kept, ids, 7)
    assert torch.equal(fast(other.to(place.device), mask.to(place.device)).last_hidden_state.cpu(), got)
    for i, length in enumerate(lengths):
        alone = fast(ids[i : i + 1, :length].to(place.device)).last_hidden_state.cpu()
        assert_close(alone[0], got[i, :length], atol=1e-5 if place.dtype == torch.float32 else 64 * place.eps)


@pytest.mark.parametrize(("buckets", "furthest"), [(256, 512), (8, 20), (32, 40), (5, 90), (4, 512), (512, 1024)])
def test_buckets_are_those_of_transformers(buckets: int, furthest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    span, most = buckets, 3 * furthest
    distances = torch.arange(-most, most + 1)
    theirs = (make_log_bucket_position(distances, buckets, furthest).long() + span).clamp(0, 2 * span - 1)
    listed = torch.tensor(log_buckets(buckets, furthest))
    ours = (distances.sign() * listed[distances.abs().clamp(max=len(listed) - 1)] + span).clamp(0, 2 * span - 1)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("deberta-v2", {"pos_att_type": ["c2p", "p2p"]}, r"pos_att_type .?p2p.? is not supported: c2p and p2c"),
        ("deberta-v2", {"pos_att_type": "c2p|c2p"}, "each once at most"),
        ("deberta-v2", {"pos_att_type": []}, "relative_attention is true, and pos_att_type"),
        ("deberta-v2", {"position_buckets": 3}, "position_buckets 3 contradicts max_relative_positions 20"),
        ("deberta-v2", {"position_buckets": 64}, "position_buckets 64 contradicts max_relative_positions 20"),
        ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd 'batch_norm' is not supported"),
        ("deberta-v2", {"attention_head_size": 5}, "attention_head_size 5 is not supported"),
        ("deberta", {"talking_head": True}, "talking_head is not supported"),
        ("deberta", {"pooler_hidden_size": 5}, "pooler_hidden_size 5 is not supported"),
    ],
)
def test_configs_that_are_refused(family: str, entries: dict[str, Any], message: str) -> None:
    document = make_model(family, "encoder", 0).config.to_dict() | entries
    with pytest.raises(ValueError, match=message):
        find_family(document).config(document)


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_without_positions_among_the_scores(family: str) -> None:
    """The scale counts pos_att_type all the same."""
    model = make_model(family, "encoder", 0, relative_attention=False, norm_rel_ebd="none")
    batch = make_batch(model, "encoder", "holes")
    with torch.no_grad():
        want = model(**batch).last_hidden_state
    kept = batch["attention_mask"].bool()
    assert_close(ftbert.load(model)(**batch).last_hidden_state[kept], want[kept], atol=3e-5)


def test_texts_past_the_longest_of_the_config() -> None:
    """An error where there is a table of positions for embeddings; distances have none that is too large."""
    ids = torch.randint(5, 90, (1, 100), generator=torch.Generator().manual_seed(1))
    model = make_model("deberta-v2", "encoder", 0)
    with torch.no_grad():
        assert_close(ftbert.load(model)(ids).last_hidden_state, model(ids).last_hidden_state, atol=3e-5)
    with pytest.raises(RuntimeError, match="100"):
        ftbert.load(make_model("deberta-v2", "encoder", 1))(ids)


def test_positions_that_a_file_holds_and_nothing_reads(tmp_path: Path) -> None:
    """Published files of v3 keep a table of positions, which transformers leaves out."""
    from safetensors.torch import load_file, save_file

    model = make_model("deberta-v2", "sequence_classification", 0)
    model.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    extra = {"deberta.embeddings.position_embeddings.weight": torch.ones(64, 16)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    fast = ftbert.load(convert(tmp_path / "theirs", tmp_path / "ours"))
    batch = make_batch(model, "sequence_classification", "right")
    with torch.no_grad():
        assert_close(fast(**batch).logits, model(**batch).logits, atol=3e-5)


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=has_bf16), pytest.param("int8", marks=has_int8)])
@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_in_bf16_and_in_8_bits_on_the_cpu(tmp_path: Path, family: str, dtype: str) -> None:
    """Calibration sees a shared projection's tokens and its table; the table itself stays in float."""
    from transformers import BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB_WORDS) + "\n", encoding="utf-8")
    sizes = {"vocab_size": len(VOCAB_WORDS), "max_position_embeddings": 130}
    model = make_model(family, "encoder", 2, **sizes)
    model.save_pretrained(tmp_path / "theirs")
    BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=128).save_pretrained(tmp_path / "theirs")
    batch = make_batch(model, "encoder", "left")
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        want = model(**batch).last_hidden_state[kept]
    if dtype == "int8":
        texts = [" ".join(VOCAB_WORDS[i : i + 40]) for i in range(5, 45, 2)]
        quantize(tmp_path / "theirs", tmp_path / "int8", texts, dtype="int8", any_loss=True)
        fast = ftbert.load(tmp_path / "int8")
    else:
        fast = ftbert.load(tmp_path / "theirs", dtype=dtype)
    got = fast(**batch).last_hidden_state[kept]
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.998
    assert fast.info()["attention_products"] == "fp32"
    if dtype == "bf16":
        with torch.no_grad():
            assert_no_worse(got, model.bfloat16()(**batch).last_hidden_state[kept], want)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_convolution_beside_the_first_layer(place: Place, size: int) -> None:
    """Its neighbours are columns of the padded row: gaps and sequences' ends are zeros."""
    model = make_model("deberta-v2", "encoder", 1, conv_kernel_size=size, conv_act="tanh")
    fast = ftbert.load(model, device=place.device, dtype=place.dtype)
    for mask in ("right", "left", "holes"):
        batch = make_batch(model, "encoder", mask)
        kept = batch["attention_mask"].bool()
        with torch.no_grad():
            want = model(**batch).last_hidden_state[kept]
        got = fast(**{name: value.to(place.device) for name, value in batch.items()}).last_hidden_state.cpu()
        assert_close(got[kept], want, atol=3e-5 if place == Place("cpu", torch.float32) else 256 * place.eps)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"conv_groups": 3}, "conv_groups 3 is not supported"),
        ({"conv_kernel_size": 4}, "convolution.kernel: expected an odd number of columns, got 4"),
        ({"conv_act": "sine"}, "convolution.activation"),
        ({"num_hidden_layers": 1}, "a convolution beside the last layer"),
    ],
)
def test_convolutions_that_are_refused(entries: dict[str, Any], message: str) -> None:
    document = make_model("deberta-v2", "encoder", 0).config.to_dict() | {"conv_kernel_size": 3} | entries
    with pytest.raises(ValueError, match=message):
        find_family(document).config(document).weight_specs()
