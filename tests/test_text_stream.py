"""Tokens to text while they come: whole characters, stop strings, special tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import tokenizer
from transformers.generation.stopping_criteria import StopStringCriteria

from ftbert.decoding.prompts import dropped
from ftbert.decoding.text_stream import TextStream


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["bytes", "mark"]), text=st.text(min_size=0, max_size=30), noise=st.lists(st.integers(3, 330), max_size=12),
    before=st.integers(0, 8),
)  # fmt: skip
def test_pieces_join_to_the_text(kind: str, text: str, noise: list[int], before: int) -> None:
    words = tokenizer(kind)
    ids = [one for one in words(text, add_special_tokens=False)["input_ids"] + noise if one < len(words)]
    prompt = words("hello world, the end.", add_special_tokens=False)["input_ids"][: max(before, 1)]
    decode = functools.partial(words.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stream = TextStream(decode, prompt)
    pieces = [stream.push(one) for one in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    got, want = decode(prompt) + "".join(pieces) + stream.end(), decode(prompt + ids)
    # In a run of byte tokens that is no UTF-8 as a whole, decoders replace also the characters that were there before.
    assert got == want or (kind == "mark" and "\ufffd" in want)


@pytest.mark.parametrize("kind", ["bytes", "mark"])
def test_bytes_that_are_no_text_do_not_pile_up(kind: str) -> None:
    """A thousand of them come soon, each looked at a few times; a character behind them comes whole."""
    words, longest = tokenizer(kind), 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(words.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    byte = words.convert_tokens_to_ids("\u0142" if kind == "bytes" else "<0x80>")  # a byte that begins no character
    assert decode([byte]) == "\ufffd"
    stream = TextStream(decode, [5, 6])
    got = ""
    for at in range(1000):
        got += stream.push(byte)
        assert len(got) >= at - 20
    got += "".join(stream.push(one) for one in words("a é z", add_special_tokens=False)["input_ids"]) + stream.end()
    assert got.count("\ufffd") >= 1000 and got.endswith("z") and longest < 40


@settings(max_examples=150, deadline=None)
@given(text=st.text("abc", max_size=40), stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), data=st.data())
def test_stop_strings_across_tokens(text: str, stop: list[str], data: st.DataObject) -> None:
    """Tokens of any lengths: what is given never holds part of a stop string that comes, and nothing else is lost."""
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream, got = TextStream(lambda ids: "".join(tokens[one] for one in ids), (), stop), ""
    for place in range(len(tokens)):
        got += stream.push(place)
        if stream.stopped:
            break
        assert not any(one in got for one in stop)
    got += stream.end()
    seen = "".join(tokens[: place + 1])
    assert stream.stopped == any(one in seen for one in stop) == any(one in text for one in stop)
    assert got == seen[: min((at for one in stop if (at := seen.find(one)) >= 0), default=len(seen))]


@functools.cache
def whole_tokens(kind: str) -> list[int]:
    """Special ones, and those that are whole characters: transformers compares the others byte by byte."""
    return [one for one in range(len(tokenizer(kind))) if "\ufffd" not in tokenizer(kind).decode([5, one])]


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["bytes", "mark"]), data=st.data())
def test_stop_strings_are_those_of_transformers(kind: str, data: st.DataObject) -> None:
    """They may be, hold and surround special tokens, and the text does not show those."""
    words = tokenizer(kind)
    ids = data.draw(st.lists(st.sampled_from([0, 1, 2, *whole_tokens(kind)]), min_size=1, max_size=12))
    prompt = words("hello world", add_special_tokens=False)["input_ids"]
    kept = functools.partial(words.decode, clean_up_tokenization_spaces=False)
    decode = functools.partial(kept, skip_special_tokens=True)
    whole = kept(prompt + ids)[len(kept(prompt)) :]
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(whole)), st.integers(1, 9)), min_size=1, max_size=3))
    stop = [part for start, count in cuts if (part := whole[start : start + count])] or ["never"]
    stop += [decode(ids)[:6] or "never"]  # which special tokens may part
    theirs = StopStringCriteria(words, stop)
    ended = next((i + 1 for i in range(len(ids)) if theirs(torch.tensor([ids[: i + 1]]), None)), len(ids) + 1)  # type: ignore[arg-type]
    stream, got, pushed = TextStream(decode, prompt, stop, dropped(words)), "", 0
    while pushed < len(ids) and not stream.stopped:
        got += stream.push(ids[pushed])
        pushed += 1
    assert (pushed if stream.stopped else pushed + 1) == ended
    got += stream.end()
    assert decode(prompt + ids).startswith(decode(prompt) + got)
    assert stream.stopped or decode(prompt) + got == decode(prompt + ids)


@pytest.mark.parametrize(("stop", "last", "want"), [
    ("<s>", None, "hello world"), ("ld<s>", None, "hello wor"), ("ld</s>", 2, "hello world"), ("ld<s></s>", 2, "hello wor"),
])  # fmt: skip
def test_stop_strings_that_hold_special_tokens(stop: str, last: int | None, want: str) -> None:
    """Also the one after which the text is complete anyway. The tokens: hello world<s>."""
    words = tokenizer("bytes")
    decode = functools.partial(words.decode, skip_special_tokens=True)
    stream = TextStream(decode, (), [stop], dropped(words))
    pieces = [stream.push(one) for one in [*words("hello world", add_special_tokens=False)["input_ids"], 1]]
    assert "".join(pieces) + stream.end(last) == want and stream.stopped == (stop != "ld</s>")
