"""The encoder's description: JSON -> the core's config -> the list of weights and Python's dataclasses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ROTARY, make_config, make_model
from hypothesis import given, settings
from hypothesis import strategies as st

import ftbert
from ftbert.checkpoint import ModelConfig, NormConfig, RelativeBiasConfig
from ftbert.converters import convert
from ftbert.converters.families import FAMILIES, find_family

NORM = {"eps": 1e-12}
SMALL: dict[str, Any] = {
    "vocab": 9, "hidden": 8, "embedding": 8, "positions": {"kind": "absolute", "rows": 5}, "embedding_norm": NORM,
    "layer": {
        "attention": {"heads": 2, "head_size": 4}, "attention_norm": NORM,
        "ffn": {"inter": 16, "activation": "gelu"}, "ffn_norm": NORM,
    },
    "layers": [{"repeat": 2}, {"norm_place": "pre"}],
}  # fmt: skip

FLAGS = st.booleans()
TYPES = st.sampled_from(["model", "e4m3", "int8"])
WHOLE = st.integers(1, 20)


def described(**entries: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object of these; what is absent from it, the core fills in."""
    return st.fixed_dictionaries({}, optional=entries)


def norms(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.builds(dict, eps=st.floats(1e-12, 1)).flatmap(lambda norm: described(**more).map(norm.__or__))


NORMS = norms(bias=FLAGS, kind=st.just("layer")) | norms(
    bias=FLAGS, kind=st.just("rms"), offset=st.floats(-9, 9), rounding=st.sampled_from(["once", "before_gamma"])
).filter(lambda norm: norm is None or norm.get("kind") == "rms" or not norm.keys() & {"offset", "rounding"})


@st.composite
def rotary(draw: st.DrawFn, head_size: int) -> dict[str, Any]:
    dims = 2 * draw(st.integers(1, head_size // 2))
    turned = st.lists(st.floats(1e-9, 10), min_size=dims // 2, max_size=dims // 2)
    which = draw(st.builds(dict, theta=st.floats(1, 1e7)) | st.builds(dict, frequencies=turned))
    return {"dims": dims, **which, **draw(described(amplitude=st.floats(0.1, 2), interleaved=FLAGS))}


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, head_size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    sides = st.none() | st.integers(0, 9)
    window = draw(st.none() | st.lists(sides, min_size=2, max_size=2))
    attention = draw(described(
        scale=st.floats(1e-3, 10), soft_cap=st.floats(1e-3, 99), window=st.just(window), qk_norm=NORMS, qkv_bias=FLAGS,
        out_bias=FLAGS, rotary=rotary(head_size) if head_size > 1 else st.none(), qkv_type=TYPES, out_type=TYPES,
        **({} if window and window[1] else {"causal": FLAGS}),
    ))  # fmt: skip
    heads = {"heads": kv_heads * draw(st.integers(1, 3)), "kv_heads": kv_heads, "head_size": head_size}
    ffn = draw(described(gated=FLAGS, up_bias=FLAGS, down_bias=FLAGS, up_type=TYPES, down_type=TYPES))
    sizes = {"inter": draw(WHOLE), "activation": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"]))}
    places = ("attention_norm", "ffn_norm", "attention_result_norm", "ffn_result_norm")
    of_layer = described(norm_place=st.sampled_from(["post", "pre"]), **dict.fromkeys(places, NORMS))
    return {"attention": heads | attention, "ffn": sizes | ffn, **draw(of_layer)}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kinds = draw(st.lists(layers(), min_size=1, max_size=3))
    picked = draw(st.lists(st.integers(0, len(kinds) - 1), max_size=7))
    shared = draw(FLAGS)
    entries = [kinds[k] | ({"weights_of": picked.index(k)} if shared else {}) for k in picked]
    hidden, projected = draw(st.integers(1, 30)), draw(FLAGS)
    kind = draw(st.sampled_from(["absolute", "from_padding", "none"]))
    return ModelConfig.from_json({
        "vocab": draw(WHOLE), "hidden": hidden, "embedding": draw(WHOLE) if projected else hidden, "layers": entries,
        "embedding_projection": projected, "positions": {"kind": kind, "rows": draw(st.integers(9, 99))},
        **draw(described(
            padding_id=st.integers(0, 7), token_types=st.integers(0, 2), embedding_scale=st.floats(1e-3, 100),
            embedding_norm=NORMS, final_norm=NORMS, pooler=FLAGS, word_type=st.sampled_from(["model", "int8"]),
        )),
    })  # fmt: skip


@given(configs())
@settings(deadline=None, max_examples=60)
def test_what_python_writes_the_core_reads(config: ModelConfig) -> None:
    assert ModelConfig.from_json(config.to_json()) == config
    specs = {spec.name: spec for spec in config.weight_specs()}
    assert len(specs) == len(config.weight_specs())
    in_int8 = config.word_type == "int8"
    assert specs["embeddings.word"].stored == ("int8" if in_int8 else "") and ("embeddings.word.scale" in specs) == in_int8
    for layer in config.layers:
        prefix, hidden = f"layers.{layer.weights_of}.", config.hidden
        want = {
            "attention.qkv": [sum(config.stacked_rows(f"{prefix}attention.qkv.weight")), hidden],
            "attention.out": [hidden, layer.attention.width], "ffn.up": [layer.ffn.inter * (1 + layer.ffn.gated), hidden],
            "ffn.down": [hidden, layer.ffn.inter],
        }  # fmt: skip
        for name, shape in want.items():
            part = layer.ffn if name.startswith("ffn") else layer.attention
            stored = getattr(part, name.split(".")[1] + "_type")
            assert specs[f"{prefix}{name}.weight"] == (f"{prefix}{name}.weight", shape, True, stored.replace("model", ""))
            of_input = {"e4m3": {"scale": [1]}, "int8": {"smooth": shape[1:]}}.get(stored, {})
            beside = {f"input.{end}": count for end, count in of_input.items()}
            beside |= {} if stored == "model" else {"weight.scale": shape[:1]}
            for end in ("weight.scale", "input.scale", "input.smooth"):
                one = f"{prefix}{name}.{end}"
                assert specs.get(one) == ((one, beside[end], False, "fp32") if end in beside else None)
        biases = {"attention.qkv": layer.attention.qkv_bias, "attention.out": layer.attention.out_bias}
        biases |= {"ffn.up": layer.ffn.up_bias, "ffn.down": layer.ffn.down_bias}
        of_norms = {"attention.norm": layer.attention_norm, "attention.result_norm": layer.attention_result_norm}
        of_norms |= {f"attention.{x}_norm": layer.attention.qk_norm for x in "qk"}
        of_norms |= {"ffn.norm": layer.ffn_norm, "ffn.result_norm": layer.ffn_result_norm}
        biases |= {name: norm is not None and norm.bias for name, norm in of_norms.items()}
        for name, there in biases.items():
            assert (f"{prefix}{name}.bias" in specs) == there
        for name, norm in of_norms.items():
            assert (f"{prefix}{name}.weight" in specs) == (norm is not None)
    assert not any(spec.matrix for spec in specs.values() if len(spec.shape) == 1 or spec.name.startswith("embeddings.word"))


def test_null_takes_back_what_all_layers_have() -> None:
    document = copy.deepcopy(SMALL)
    document["layers"][1] |= {"attention_norm": None, "attention": {"window": [64, 0]}}
    config = ModelConfig.from_json(document)
    norm = NormConfig(1e-12, "layer", bias=True, offset=0, rounding="once")
    assert [layer.attention_norm for layer in config.layers] == [norm, norm, None]
    assert [layer.attention.window for layer in config.layers] == [None, None, (64, 0)]
    assert "layers.2.attention.norm.weight" not in config.weight_shapes()


def test_the_core_says_what_is_absent() -> None:
    """docs/checkpoint.md's defaults; and what it says is a description of the same model."""
    document = SMALL | {"layers": [{"repeat": 2}, {"attention": {"rotary": {"theta": 100}}, "norm_place": "pre"}]}
    whole, specs = torch.ops.ftbert.read_config(json.dumps(document))
    assert torch.ops.ftbert.read_config(whole) == (whole, specs)
    read = json.loads(whole)
    attention = {
        "heads": 2, "head_size": 4, "kv_heads": 2, "scale": 0.5, "causal": False, "relative_bias": False,
        "qkv_bias": True, "out_bias": True, "qkv_type": "model", "out_type": "model",
    }  # fmt: skip
    norm = {"eps": 1e-12, "kind": "layer", "bias": True, "offset": 0, "rounding": "once"}
    ffn = {
        "inter": 16, "activation": "gelu", "gated": False, "up_bias": True, "down_bias": True, "up_type": "model",
        "down_type": "model",
    }  # fmt: skip
    layer = {
        "repeat": 1, "norm_place": "post", "attention": attention, "attention_norm": norm, "ffn": ffn, "ffn_norm": norm,
    }  # fmt: skip
    turned = {"rotary": {"theta": 100, "dims": 4, "amplitude": 1, "interleaved": False}}
    last = layer | {"norm_place": "pre", "attention": attention | turned}
    assert read.pop("layers") == [{**one, "weights_of": i} for i, one in enumerate([layer, layer, last])]
    assert read == {
        "vocab": 9, "hidden": 8, "embedding": 8, "positions": {"kind": "absolute", "rows": 5}, "embedding_norm": norm,
        "padding_id": 0, "token_types": 0, "embedding_scale": 1, "embedding_projection": False, "projection_bias": True, "pooler": False,
        "word_type": "model", "states_before_final_norm": False,
    }  # fmt: skip


def merged(path: str, value: Any) -> dict[str, Any]:
    """SMALL with this value there; ... takes the key out."""
    document = copy.deepcopy(SMALL)
    *around, last = path.split(".")
    place: Any = document
    for key in around:
        place = place[int(key) if key.isdigit() else key]
    if value is ...:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("layer.attention.heads", "x", "layer.attention.heads: expected an integer >= 1, got 'x'"),
        ("layer.attention.heads", 2.0, "layer.attention.heads: expected an integer >= 1, got 2"),
        ("layer.attention.heads", 10**30, "layer.attention.heads: expected an integer >= 1, got 1e+30"),
        ("layer.attention.heads", ..., "layer.attention.heads: missing"),
        ("layers.1.attention", {"heads": 0}, "layers[1].attention.heads: expected an integer >= 1, got 0"),
        ("layers.1.attention", {"kv_heads": 3}, "layers[1].attention.kv_heads: 3 does not divide heads 2"),
        ("layers.1.attention", {"causal": True, "window": [4, 4]}, "layers[1].attention.causal: contradicts a window"),
        ("layers.1.attention", {"window": [4]}, "layers[1].attention.window: expected [left, right], got 1 numbers"),
        ("layers.1.attention", {"window": [4, -1]}, "layers[1].attention.window: expected distances from 0"),
        ("layers.1.attention", {"relative_bias": True}, "the model's table is for 0 heads, the layer has 2"),
        ("layers.1.attention", {"rotary": {"theta": 1e4, "dims": 6}}, "layers[1].attention.rotary.dims: expected an even"),
        ("layers.1.attention", {"rotary": {"theta": 1e4, "dims": 3}}, "layers[1].attention.rotary.dims: expected an even"),
        ("layers.1.attention", {"rotary": {"frequencies": [1.0]}}, "rotary.frequencies: expected one for each pair of 4"),
        ("layers.1.attention", {"rotary": {"frequencies": [1, "x"]}}, "frequencies: expected a number in (0, 1e+06]"),
        ("layers.1.attention", {"rotary": {}}, "layers[1].attention.rotary.theta: missing"),
        ("layers.1.attention", {"scale": 0}, "layers[1].attention.scale: expected a number in (0, 1e+06], got 0"),
        ("layers.1.weights_of", 3, "layers: weights_of 3 is not below the number of layers, 3"),
        ("layers.1", {"weights_of": 0, "ffn": {"inter": 4}}, "layers: 0 and 2 have weights_of 0, but tensors of different"),
        ("layers.1", 5, "layers[1]: expected an object, got 5"),
        ("layers", {}, "layers: expected a list, got an object of 0"),
        ("layers", ..., "layers: missing"),
        ("layers.1.colour", "red", "layers[1].colour: unknown key"),
        ("layer.ffn.colour", "red", "layer.ffn.colour: unknown key"),
        ("colour", "red", "colour: unknown key"),
        ("layer.ffn.activation", "mish", "layer.ffn.activation: unknown activation 'mish'; supported: gelu"),
        ("layer.ffn_norm", {"eps": float("nan")}, "layer.ffn_norm.eps: expected a value"),
        ("layer.ffn_norm", {"eps": 2}, "layer.ffn_norm.eps: expected a number in (0, 1], got 2"),
        ("layer.ffn_norm", {"eps": 1e-5, "kind": "batch"}, "kind: expected one of layer, rms, got 'batch'"),
        ("layer.norm_place", "sandwich", "layer.norm_place: expected one of post, pre, got 'sandwich'"),
        ("relative_bias", {"span": 3, "heads": 2}, "relative_bias: no layer has attention.relative_bias"),
        ("embedding", 4, "embedding: 4 differs from hidden 8: that needs embedding_projection"),
        ("positions", {"kind": "from_padding", "rows": 1}, "no token has a position: they count from padding id 0 + 1"),
        ("word_type", "e4m3", "word_type: expected one of model, int8, got 'e4m3'"),
        ("pooler", 1, "pooler: expected true or false, got 1"),
        ("layers.0.repeat", 10**12, "layers[0].repeat: 1000000000000 layers are more than ftbert runs (4096)"),
        ("layers.0.repeat", 0, "layers[0].repeat: expected an integer >= 1, got 0"),
        ("layers", [{}] * 10**6, "layers: 1000000 layers are more than ftbert runs (4096)"),
        ("layers", [[]] * 10**6, "layers: 1000000 layers are more than ftbert runs (4096)"),
        ("layers", [{"repeat": 1}] * 10**6, "bytes of JSON"),
        ("vocab", json.loads("[" * 40 + "]" * 40), "expected at most 32 levels"),
        # What can be described and is not computed.
        ("embedding_norm", {"eps": 1e-5, "offset": 1}, "an offset of a LayerNorm's weights"),
        ("layers.1.attention", {"qk_norm": {"eps": 1e-5, "offset": 1}}, "an offset of a LayerNorm's weights"),
        ("final_norm", {"eps": 1e-5, "rounding": "before_gamma"}, "LayerNorms that round before_gamma"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_json(merged(path, value))
    assert words in str(caught.value) and len(str(caught.value)) < 3000


def test_all_complaints_come_at_once_and_are_few() -> None:
    wrong = SMALL | {"vocab": 0, "colour": "red", "layers": [{"attention": {"heads": -i}} for i in range(100)]}
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_json(wrong)
    lines = str(caught.value).splitlines()
    assert "vocab" in lines[1] and 20 <= len(lines) <= 23 and "more" in lines[21]


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_text_is_read_or_refused(data: st.DataObject) -> None:
    text = json.dumps(SMALL)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        torch.ops.ftbert.read_config(text)
    except RuntimeError as error:
        assert "the model configuration" in str(error) or "not valid JSON" in str(error)
    else:
        json.loads(text)  # what the core takes for JSON is JSON


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
@settings(deadline=None)
def test_any_json_is_read(value: Any) -> None:
    """The complaint is about the keys, not about the text; NaN and infinity are no JSON."""
    try:
        text = json.dumps(SMALL | {"colour": value}, allow_nan=False)
    except ValueError:
        return
    with pytest.raises(RuntimeError, match=r"colour: unknown key|a number within a double's range"):
        torch.ops.ftbert.read_config(text)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def flat(config: ModelConfig) -> dict[str, Any]:
    """What version 1 said of it."""
    layer, distinct = config.layers[0], len({layer.weights_of for layer in config.layers})
    return {
        "vocab": config.vocab, "hidden": config.hidden, "layers": config.depth, "heads": layer.attention.heads,
        "head_size": layer.attention.head_size, "inter": layer.ffn.inter, "embedding": config.embedding,
        "max_positions": config.positions.rows, "token_types": config.token_types, "padding_id": config.padding_id,
        "layer_norm_eps": layer.ffn_norm.eps if layer.ffn_norm else 0, "activation": layer.ffn.activation,
        "norm_place": layer.norm_place, "positions": config.positions.kind, "pooler": config.pooler,
        "embedding_norm": config.embedding_norm is not None, "embedding_projection": config.embedding_projection,
        "relative_span": config.relative_bias.span if config.relative_bias else 0,
        "distinct_layers": 0 if distinct == config.depth else distinct,
    }  # fmt: skip


# With words that version 1 did not have.
LATER = ("t5", "mt5", "umt5", "esm", "deberta", "deberta-v2", "alibi_bert", "clip_text_model", "siglip_text_model", "siglip2_text_model", "static_embedding")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*ROTARY, *LATER)])
def test_checkpoints_of_version_1(tmp_path: Path, family: str) -> None:
    folder = convert(make_model(family, "encoder", 1), tmp_path / "ours")
    document = json.loads((folder / "config.json").read_text())
    assert document["version"] == 2
    now = ftbert.load(folder)
    (folder / "config.json").write_text(json.dumps(document | {"version": 1, "encoder": flat(now.config)}))
    before = ftbert.load(folder)
    assert before.config == now.config
    ids = torch.arange(5, 17)[None]
    assert torch.equal(before(ids).last_hidden_state, now(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 2.5}, "layers: expected a whole number, got 2.5"),
        ({"heads": "2"}, "heads: expected a whole number"),
        ({"pooler": 1}, "pooler: expected true or false"),
        ({"layer_norm_eps": None}, "layer_norm_eps: expected a finite number"),
        ({"layer_norm_eps": 2.0}, "eps: expected a number in"),
        ({"activation": 3}, "activation: expected a string"),
        ({"colour": "red"}, "unknown 'colour'"),
        ({"layers": 10**12}, "1000000000000 layers are more than ftbert runs"),
        ({"layers": 10**12, "distinct_layers": 10**11}, "1000000000000 layers are more than ftbert runs"),
        ({"distinct_layers": 5}, "distinct_layers: expected 0 to 2, got 5"),
        ({"relative_span": -1}, "relative_bias.span: expected an integer >= 1"),
    ],
    ids=str,
)
def test_version_1_is_refused_where_it_was(change: dict[str, Any], words: str) -> None:
    from ftbert.checkpoint import CheckpointConfig

    encoder = flat(find_family({"model_type": "bert"}).config(make_config("bert", 0).to_dict())) | change
    with pytest.raises(ValueError) as caught:
        CheckpointConfig.parse({"version": 1, "architecture": "bert", "encoder": encoder}, "here")
    assert "here: " in str(caught.value) and words in str(caught.value)


def test_fewer_heads_of_keys_are_split_as_they_are() -> None:
    config = ModelConfig.from_json(merged("layer.attention", {"heads": 4, "head_size": 4, "kv_heads": 2}))
    assert config.stacked_rows("layers.1.attention.qkv.weight") == [16, 8, 8]
    assert config.weight_shapes()["layers.1.attention.qkv.weight"] == [32, 8]


def test_a_relative_bias_is_for_the_heads_that_it_has() -> None:
    document = merged("layer.attention", {"heads": 2, "head_size": 4, "relative_bias": True})
    config = ModelConfig.from_json(document | {"relative_bias": {"span": 3, "heads": 2}})
    assert config.relative_bias == RelativeBiasConfig(3, 2)
    with pytest.raises(ValueError, match="for 1 heads, the layer has 2"):
        ModelConfig.from_json(document | {"relative_bias": {"span": 3, "heads": 1}})
