"""What a model says about the texts that it writes: generation_config.json, that of a live model, else its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any

from ftbert.caller import warn_caller
from ftbert.decoding.rules import Rules
from ftbert.input_file import read_json_object
from ftbert.packed_model import PackedModel, kept

_FILE = "generation_config.json"


@dataclass(frozen=True)
class Stated:
    """ends: tokens after which a text is complete. The others are what `generate` does where its caller says nothing;
    None: nothing is stated. rules: without ends."""

    ends: frozenset[int] = frozenset()
    rules: Rules = field(default_factory=Rules)
    max_new_tokens: int | None = None
    max_length: int | None = None
    stop: tuple[str, ...] = ()


_NUMBERS = ("repetition_penalty",)
_COUNTS = ("no_repeat_ngram_size", "min_length", "min_new_tokens")
_IDS = ("suppress_tokens", "begin_suppress_tokens")
# Entries that change greedy texts of transformers' generate and are not computed here, with the values that change
# nothing. How tokens are drawn (do_sample, temperature, top_k, ...) is the caller's choice alone.
_NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "penalty_alpha": (0,), "dola_layers": (),
    "constraints": (), "force_words_ids": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "guidance_scale": (1,), "remove_invalid_values": (False,),
    "watermarking_config": (), "token_healing": (False,), "max_time": (), "num_return_sequences": (1,),
    "encoder_repetition_penalty": (1,), "encoder_no_repeat_ngram_size": (0,),
}  # fmt: skip


def stated(model: PackedModel) -> Stated:
    """Read once a model. Warns then of what is not computed, by name. ValueError for a value of another kind."""
    return kept(model, "stated", lambda: _stated(model))


def _stated(model: PackedModel) -> Stated:
    where, found = _document(model)
    made = _read(found, where, model.checkpoint.config.huggingface.get("eos_token_id"))
    left = [name for name, neutral in _NOT_COMPUTED.items() if found.get(name) not in (None, *neutral)]
    if left:
        warn_caller(
            f"{where}: {', '.join(f'{name}={found[name]!r}' for name in left)}: not computed here, so texts are "
            "not those of transformers' generate",
        )
    return made


def _document(model: PackedModel) -> tuple[str, Mapping[str, Any]]:
    if model.folder is not None and (path := Path(model.folder, _FILE)).is_file():
        return str(path), read_json_object(path)
    if (live := model.checkpoint.generation) is not None:
        return "generation_config", live
    return f"{model.folder or 'config'}", model.checkpoint.config.huggingface


def read_rules(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """transformers' rules that are found and not None, as arguments of Rules. ValueError for values of another kind."""
    rules: dict[str, Any] = {name: value for name in _COUNTS if (value := _count(found, name, where)) is not None}
    for name in _NUMBERS:
        if (value := found.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _wrong(found, name, where, "a number")
            rules[name] = float(value)
    for name in _IDS:
        if (value := found.get(name)) is not None:
            if not isinstance(value, list | tuple) or not all(map(_is_id, value)):
                raise _wrong(found, name, where, "a list of token ids")
            rules[name] = tuple(value)
    if (words := found.get("bad_words_ids")) is not None:
        listed = isinstance(words, list | tuple) and all(isinstance(one, list | tuple) for one in words)
        if not listed or not all(map(_is_id, chain.from_iterable(words))):
            raise _wrong(found, "bad_words_ids", where, "lists of token ids")
        rules["bad_words_ids"] = tuple(map(tuple, words))
    if (biases := found.get("sequence_bias")) is not None:
        try:
            pairs = biases.items() if isinstance(biases, dict) else biases
            rules["sequence_bias"] = tuple((tuple(map(int, ids)), float(bias)) for ids, bias in pairs)
            if any(isnan(bias) for _, bias in rules["sequence_bias"]):
                raise ValueError
        except (TypeError, ValueError):
            raise _wrong(found, "sequence_bias", where, "pairs of token ids and a number") from None
    return rules


def _read(found: Mapping[str, Any], where: str, other_ends: Any) -> Stated:
    rules = read_rules(found, where)
    stop = found.get("stop_strings")
    stops = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(one, str) and one for one in stops):
        raise _wrong(found, "stop_strings", where, "a text or several, none empty")
    ends = found.get("eos_token_id")
    ends = other_ends if ends is None else ends
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(map(_is_id, listed)):
        raise ValueError(f"{where}: eos_token_id: expected an integer or several; got {ends!r}")
    try:
        made = Rules(**rules)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    # 0 is transformers' word for no limit of its own.
    most, longest = (_count(found, name, where) or None for name in ("max_new_tokens", "max_length"))
    return Stated(frozenset(listed), made, most, longest, stops)


def _count(found: Mapping[str, Any], name: str, where: str) -> int | None:
    value = found.get(name)
    if value is not None and not (_is_id(value) and value >= 0):
        raise _wrong(found, name, where, "an integer of at least 0")
    return value


def _wrong(found: Mapping[str, Any], name: str, where: str, wanted: str) -> ValueError:
    return ValueError(f"{where}: {name}: expected {wanted}; got {found.get(name)!r}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
