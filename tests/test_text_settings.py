"""What a sentence-transformers folder says about its text, and what ftbert refuses to guess."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftbert.text_settings import TextSettings

ST = "sentence_transformers.models."


def write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))


def modules(*names: str) -> list[dict[str, str]]:
    return [
        {"type": name, "path": f"{i}_{name.rsplit('.', 1)[-1]}" if i else ""} for i, name in enumerate(names)
    ]


def test_a_bare_folder_gets_mean_pooling(tmp_path: Path) -> None:
    assert TextSettings.from_folder(tmp_path) == TextSettings("mean", False, None, False, "")


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
    ],
)
def test_both_spellings_of_pooling(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    write(tmp_path, "1_Pooling/config.json", config)
    assert TextSettings.from_folder(tmp_path).pooling == pooling


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode_weightedmean_tokens": True},
    ],
)
def test_unsupported_pooling_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, "1_Pooling/config.json", config)
    with pytest.raises(
        ValueError, match=r"config\.json: pooling (cls \+ mean|weightedmean) is not supported"
    ):
        TextSettings.from_folder(tmp_path)


def test_modules_say_where_the_rest_is(tmp_path: Path) -> None:
    kinds = modules(ST + "Transformer", "sentence_transformers.sentence_transformer.modules.pooling.Pooling")
    kinds += [{"type": ST + "Normalize", "path": "2_Normalize"}, {"type": ST + "Dropout", "path": ""}]
    kinds[0]["path"] = "0_Transformer"
    kinds[1]["path"] = "elsewhere"
    write(tmp_path, "modules.json", kinds)
    write(tmp_path, "elsewhere/config.json", {"pooling_mode": "cls"})
    write(tmp_path, "0_Transformer/sentence_bert_config.json", {"max_seq_length": 77, "do_lower_case": True})
    assert TextSettings.from_folder(tmp_path) == TextSettings("cls", True, 77, True)


@pytest.mark.parametrize("kind", [ST + "Dense", "custom_st.Transformer", ST + "LSTM"])
def test_an_unsupported_module_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "modules.json", modules(ST + "Transformer", ST + "Pooling", kind))
    with pytest.raises(ValueError, match=f"modules.json: module '{kind}' is not supported"):
        TextSettings.from_folder(tmp_path)


def test_the_length_may_stand_in_other_files(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 10**30})
    assert TextSettings.from_folder(tmp_path).max_length is None
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 384})
    assert TextSettings.from_folder(tmp_path).max_length == 384
    write(tmp_path, "sentence_roberta_config.json", {"max_seq_length": 128})
    assert TextSettings.from_folder(tmp_path).max_length == 128
    write(tmp_path, "sentence_roberta_config.json", {"max_seq_length": -1})
    with pytest.raises(ValueError, match="positive integer; got -1"):
        TextSettings.from_folder(tmp_path)


def test_the_default_prompt(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "doc": ""}, "default_prompt_name": "query"}
    write(tmp_path, "config_sentence_transformers.json", prompts)
    assert TextSettings.from_folder(tmp_path).prompt == "query: "
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(ValueError, match="include_prompt is false"):
        TextSettings.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 3])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sentence_bert_config.json").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"sentence_bert_config\.json: (not valid JSON|expected a JSON object)"
    ):
        TextSettings.from_folder(tmp_path)
