"""What a sentence-transformers folder says about its text, and what ftbert refuses to guess."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ftbert
from ftbert.text import TextSettings

ST = "sentence_transformers.models."


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))


def modules(*names: str) -> list[dict[str, str]]:
    return [
        {"type": name, "path": f"{i}_{name.rsplit('.', 1)[-1]}" if i else ""} for i, name in enumerate(names)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that sentence-transformers could have written."""
    write(tmp_path, "modules.json", modules(ST + "Transformer", ST + "Pooling"))
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    return tmp_path


def test_a_bare_folder_gets_mean_pooling(tmp_path: Path) -> None:
    assert TextSettings.from_folder(tmp_path) == TextSettings("mean")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "cls"})  # nothing names it
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 7})
    assert TextSettings.from_folder(tmp_path) == TextSettings("mean")
    write(tmp_path, "config.json", {"architectures": ["RobertaForCausalLM"]})
    assert TextSettings.from_folder(tmp_path) == TextSettings("last")
    write(tmp_path, "config.json", {"format": "ftbert", "huggingface": {"architectures": ["RobertaForCausalLM"]}})
    assert TextSettings.from_folder(tmp_path) == TextSettings("last")


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": False}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["max"]}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean_sqrt_len_tokens", "pooling_mode_cls_token": True}, "mean_sqrt_len"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_weightedmean_tokens": True, "pooling_mode_cls_token": True}, "cls+mean+weightedmean"),
        ({"pooling_mode": ["mean", "cls", "mean"]}, "mean+cls+mean"),
    ],
)
def test_both_spellings_of_pooling(folder: Path, config: dict[str, Any], pooling: str) -> None:
    write(folder, "1_Pooling/config.json", config)
    assert TextSettings.from_folder(folder).pooling == pooling


def test_modules_say_where_the_rest_is(folder: Path) -> None:
    kinds = modules(ST + "Transformer", "sentence_transformers.sentence_transformer.modules.pooling.Pooling")
    kinds += [{"type": ST + "Normalize", "path": "2_Normalize"}, {"type": ST + "Dropout", "path": ""}]
    kinds[1]["path"] = "elsewhere"
    write(folder, "modules.json", kinds)
    write(folder, "elsewhere/config.json", {"pooling_mode": "cls", "include_prompt": False})
    write(folder, "sentence_bert_config.json", {})
    write(folder, "sentence_roberta_config.json", {"max_seq_length": 77, "do_lower_case": True, "query_length": 9})
    expected = TextSettings("cls", False, True, max_length=77, lower_case=True, query_length=9, stated=True)
    assert TextSettings.from_folder(folder) == expected


T, P, N, D = ST + "Transformer", ST + "Pooling", ST + "Normalize", ST + "Dense"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *[
            (modules(T, P, ST + kind), rf"module '{ST}{kind}' is not supported.*optimize\(SentenceTransformer")
            for kind in ("WordWeights", "CNN", "LSTM", "Router", "Asym", "WeightedLayerPooling")
        ],
        (modules(ST + "BoW"), f"module '{ST}BoW' is not supported"),
        (modules("custom_st.Transformer", P), "module 'custom_st.Transformer' is not supported"),
        (modules(T), "got Transformer"),
        (modules(T, D, P), "got Transformer, Dense, Pooling"),
        (modules(T, N, P), "got Transformer, Normalize, Pooling"),
        (modules(T, P, P), "got Transformer, Pooling, Pooling"),
        ({"type": T}, "expected a list of modules"),
        ([{"type": T, "path": ""}, {"type": P, "path": "../1_Pooling"}], "must stay inside"),
        ([{"type": T, "path": ""}, {"type": P, "path": "/1_Pooling"}], "must stay inside"),
        ([{"type": T, "path": ""}, {"type": P, "path": 1}], "must stay inside"),
        ([{"type": T, "path": "", "name": "0"}, {"type": P, "path": "1_Pooling", "name": "0"}], "one name"),
    ],
)
def test_another_chain_of_modules_is_refused(folder: Path, content: Any, words: str) -> None:
    write(folder, "modules.json", content)
    with pytest.raises(ValueError, match=r"modules\.json: .*" + words):
        TextSettings.from_folder(folder)


def routed(folder: Path, place: str, **routes: list[str]) -> None:
    """The file of a Router in `place`: modules of each route, as sentence-transformers names their folders."""
    named = {name: [f"{name}_{i}_{kind}" for i, kind in enumerate(kinds)] for name, kinds in routes.items()}
    types = {one: ST + kind for name, kinds in routes.items() for one, kind in zip(named[name], kinds, strict=True)}
    (folder / place).mkdir(exist_ok=True)
    write(folder, str(Path(place, "router_config.json")), {"types": types, "structure": named, "parameters": {}})


def test_routes_that_are_not_computed(folder: Path) -> None:
    """Two chains for queries and documents: behind one network, and each with its own."""
    write(folder, "modules.json", modules(T, P, ST + "Router"))
    routed(folder, "2_Router", query=["Dense", "Normalize"], document=["Dense"])
    with pytest.raises(ValueError, match=rf"module '{ST}Router' \(query: Dense, Normalize; document: Dense\) is not supported"):
        TextSettings.from_folder(folder)
    listed = modules(ST + "Router", N)
    write(folder, "modules.json", [listed[0] | {"path": ""}, listed[1]])
    routed(folder, "", query=["Transformer", "Pooling"], document=["Transformer", "Pooling"])
    words = r"\(query: Transformer, Pooling; document: Transformer, Pooling\) has several networks, document_0_Transformer, query_0_"
    for call in (TextSettings.from_folder, ftbert.load):
        with pytest.raises(ValueError, match=words):
            call(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length must be a positive integer; got -1"),
        ("sentence_bert_config.json", {"max_seq_length": 8.5}, "positive integer; got 8.5"),
        ("sentence_bert_config.json", {"query_length": True}, "positive integer; got True"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 32}}, "query_expansion is not supported"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs is not supported"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask' is not supported"),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config are not supported: hidden_act"),
        ("sentence_bert_config.json", {"model_kwargs": {"x": 1, "dtype": "a"}}, "model are not supported: x"),
        ("sentence_bert_config.json", {"tokenizer_args": {"vocab_file": "/a"}}, "tokenizer are not supported: vocab_file"),
        ("sentence_bert_config.json", {"processor_kwargs": {"subfolder": ".."}}, "not supported: subfolder"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts must be an object of texts"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must be an object of texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "'a' is none of the prompts"),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim must be a positive integer; got 0"),
        ("1_Pooling/config.json", {"pooling_mode": {"a": 1}}, "is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "first"]}, r"pooling cls \+ first is not supported"),
        ("1_Pooling/config.json", [], "expected a JSON object"),
    ],
)
def test_what_cannot_be_done_is_refused(folder: Path, name: str, content: Any, words: str) -> None:
    write(folder, name, content)
    with pytest.raises(ValueError, match=re.escape(name) + ": .*" + words):
        TextSettings.from_folder(folder)


def test_missing_pooling(folder: Path) -> None:
    (folder / "1_Pooling/config.json").unlink()
    with pytest.raises(ValueError, match=r"1_Pooling/config\.json: missing"):
        TextSettings.from_folder(folder)


def test_prompts_width_and_similarity(folder: Path) -> None:
    stored = {"prompts": {"query": "query: ", "doc": None}, "default_prompt_name": "query"}
    name = "config_sentence_transformers.json"
    write(folder, name, stored | {"truncate_dim": 8, "similarity_fn_name": "dot"})
    settings = TextSettings.from_folder(folder)
    assert settings.prompts == {"query": "query: ", "document": "", "doc": ""}
    assert (settings.default_prompt, settings.truncate_dim, settings.similarity) == ("query: ", 8, "dot")
    write(folder, name, {"similarity_fn_name": "maxsim"})
    assert TextSettings.from_folder(folder) == TextSettings(stated=True)
    write(folder, name, stored | {"model_type": "CrossEncoder"})  # sentence-transformers takes nothing over from it
    write(folder, "1_Pooling/config.json", {"pooling_mode": "cls"})
    assert TextSettings.from_folder(folder) == TextSettings()


SPLADE = "sentence_transformers.sparse_encoder.models.SpladePooling"
SKIP = "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"


@pytest.mark.parametrize(
    ("model_type", "kinds", "words"),
    [
        ("SparseEncoder", [T, ST + "SpladePooling"], "SpladePooling needs logits: expected transformer_task fill-mask"),
        ("SparseEncoder", [T, P], "module .*Pooling' is not supported; encode_sparse"),
        ("SparseEncoder", [T, P, "sentence_transformers.sparse_encoder.models.SparseAutoEncoder"], "module .*Pooling' is not"),
        ("SparseEncoder", [ST + "Router", SPLADE], r"expected a Router alone, with SparseStaticEmbedding .*; got query: .*MLMTransformer, and behind it .*SpladePooling"),
        ("SparseEncoder", ["sentence_transformers.sparse_encoder.models.SparseStaticEmbedding"], "SparseStaticEmbedding' is not supported"),
        (None, [ST + "MLMTransformer", SPLADE, N], "Normalize' is not supported"),
        (None, [SPLADE, ST + "MLMTransformer"], "expected a Transformer and SpladePooling; got SpladePooling, MLMTransformer"),
        ("MultiVectorEncoder", [T, P], "Pooling' is not supported in a model of one vector for each token"),
        (None, [T, "sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling", SKIP], "HierarchicalTokenPooling' is not"),
        ("ColBERT", ["pylate.models.Transformer"], "pylate.models.Transformer' is not supported"),
    ],
)
def test_vectors_of_another_kind_that_cannot_be_done(folder: Path, model_type: str | None, kinds: list[str], words: str) -> None:
    write(folder, "modules.json", modules(*kinds))
    write(folder, "config_sentence_transformers.json", {"model_type": model_type} if model_type else {})
    write(folder, "router_config.json", {"types": {"0": SPLADE.replace("SpladePooling", "SparseStaticEmbedding"), "1": ST + "MLMTransformer"}, "structure": {"query": ["0"], "document": ["1"]}})
    with pytest.raises(ValueError, match=re.escape(str(folder)) + ".*" + words):
        TextSettings.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy 'mean' is not supported; expected max or sum"),
        ("1_SpladePooling/config.json", {"activation_function": ["relu"]}, "activation_function .* is not supported"),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "'feature-extraction' is not supported"),
    ],
)
def test_a_splade_module_that_cannot_be_done(folder: Path, name: str, content: Any, words: str) -> None:
    write(folder, "modules.json", modules(ST + "MLMTransformer", SPLADE))
    assert TextSettings.from_folder(folder).sparse is not None
    write(folder, name, content)
    with pytest.raises(ValueError, match=re.escape(name) + ": .*" + words):
        TextSettings.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "long"}}, "query_expansion must have a strategy"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min"}}, "length must be a positive integer; got None"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "keep_only_token_ids is not supported"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": "abc"}, "skiplist_words must be a list of words"),
        ("1_Dense/config.json", {"in_features": 4, "out_features": 3, "module_input_name": "sentence_embedding"}, "expected token_embeddings"),
    ],
)
def test_vectors_of_tokens_that_cannot_be_done(folder: Path, name: str, content: Any, words: str) -> None:
    write(folder, "modules.json", modules(T, D, SKIP))
    write(folder, "1_Dense/config.json", {"in_features": 4, "out_features": 3})
    assert TextSettings.from_folder(folder).multi is not None
    write(folder, name, content)
    with pytest.raises(ValueError, match=words):
        TextSettings.from_folder(folder)


@pytest.mark.parametrize("ids", [{}, {"true_token_id": -1}, {"true_token_id": True}, {"true_token_id": 3, "false_token_id": "no"}])
def test_a_logit_score_of_no_token(folder: Path, ids: dict[str, Any]) -> None:
    write(folder, "modules.json", modules(T, "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"))
    write(folder, "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    write(folder, "1_LogitScore/config.json", ids)
    with pytest.raises(ValueError, match=r"1_LogitScore/config\.json: (true|false)_token_id must be the id of a token"):
        TextSettings.for_scores(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"in_features": 0, "out_features": 3}, "in_features must be a positive integer; got 0"),
        ({"in_features": 4}, "out_features must be a positive integer; got None"),
        ({"in_features": 4, "out_features": 3, "activation_function": 7}, "activation_function must be the name of"),
        ({"in_features": 4, "out_features": 3, "module_input_name": "token_embeddings"}, "module_input_name .* expected"),
        ({"in_features": 4, "out_features": 3, "module_output_name": "scores"}, "module_output_name .* expected"),
    ],
)
def test_a_dense_module_that_cannot_be_done(folder: Path, config: dict[str, Any], words: str) -> None:
    write(folder, "modules.json", modules(T, P, D))
    write(folder, "2_Dense/config.json", config)
    with pytest.raises(ValueError, match=r"2_Dense/config\.json: " + words):
        TextSettings.from_folder(folder)


@pytest.mark.parametrize("config", [{"architectures": 7}, {"architectures": {"a": 1}}, {"huggingface": [1]}])
def test_a_bare_folder_with_a_config_of_wrong_types(tmp_path: Path, config: Any) -> None:
    write(tmp_path, "config.json", config)
    with pytest.raises(ValueError, match=r"config\.json: architectures must be a list"):
        TextSettings.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, None])
@pytest.mark.parametrize("name", ["sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"])
def test_a_broken_file_is_named(folder: Path, name: str, content: bytes | None) -> None:
    """None: a pipe, which is not waited for."""
    (folder / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(content)
    words = "expected a file, it is a named pipe" if content is None else "(not valid JSON|expected)"
    with pytest.raises(ValueError, match=re.escape(name) + ": " + words):
        TextSettings.from_folder(folder)
