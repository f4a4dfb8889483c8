"""Texts that a model writes: transformers' tokens, sampling, stop strings, streams, several texts at a time."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Place, has_bf16, has_int8
from language_models import FAMILIES, loaded, made, random_llama, texts
from small_tokenizers import tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import ftbert
from ftbert.converters import convert
from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.prompts import spelled_ends, tokenizer_for
from ftbert.decoding.requests import Request
from ftbert.decoding.rules import Rules
from ftbert.decoding.sampling import Sampling
from ftbert.decoding.stated import stated

PROMPTS = ["hello world", "the café 中文", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> ftbert.Model:
    return ftbert.load(folder)


def theirs(family: str, ids: list[int], **how: Any) -> list[int]:
    reference = made(family)
    end = reference.generation_config.eos_token_id
    found = reference.generate(torch.tensor([ids]), do_sample=False, pad_token_id=0, **how)[0, len(ids) :].tolist()
    return found[:-1] if found and found[-1] == end else found


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Past windows; two texts at a time, the third in the place of the one that ends first."""
    lengths, most = (20, 9, 3), 64
    ids = [text.tolist()[:n] for text, n in zip(texts(family), lengths, strict=True)]
    got = loaded(family, Place("cpu", torch.float32)).generate_ids(ids, max_new_tokens=most, batch_size=2)
    assert got == [theirs(family, row, max_new_tokens=most) for row in ids]


def test_texts_go_on_to_the_end_of_the_context() -> None:
    ids = texts("qwen2")[1].tolist()
    (got,) = loaded("qwen2", Place("cpu", torch.float32)).generate_ids([ids], max_new_tokens=1000)
    assert len(ids) + len(got) == made("qwen2").config.max_position_embeddings
    assert got == theirs("qwen2", ids, max_length=made("qwen2").config.max_position_embeddings)


def test_a_text_does_not_depend_on_those_beside_it(place: Place) -> None:
    model, ids = loaded("mistral", place), [text.tolist()[:20] for text in texts("mistral")]
    how = {"max_new_tokens": 20, "temperature": 1.5, "seed": 3}
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits products of other sizes round differently, and a draw may change")
    alone = [model.generate_ids([row], **{**how, "seed": 3 + i})[0] for i, row in enumerate(ids)]
    for batch_size in (1, 2, 3):
        assert model.generate_ids(ids, batch_size=batch_size, **how) == alone


def test_many_texts_in_few_slots(place: Place) -> None:
    model = loaded("llama", place)
    ids = [torch.randint(3, 90, (1 + i % 7,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(12)]
    got = model.generate_ids(ids, max_new_tokens=8, batch_size=5)
    assert len(got) == 12 and all(0 < len(one) <= 8 for one in got)
    if place.dtype == torch.float32:  # in 16 bits products of other sizes round differently
        assert got == [model.generate_ids([row], max_new_tokens=8)[0] for row in ids]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("slots", "step_tokens"), [(1, 8192), (3, 8192), (5, 12), (2, 5), (3, 1)])
def test_steps_ahead_and_pieces_of_prompts_change_no_token(place: Place, ahead: bool, slots: int, step_tokens: int) -> None:
    """Texts that end at a token, at a length, in the step of another's prompt; no step has more tokens than allowed."""
    if place.dtype != torch.float32:
        pytest.skip("in 16 bits products of other sizes round differently")
    model, generator = loaded("llama", place), torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (30, 1, 7, 12, 2, 25, 3)]
    most, sampling = [9, 1, 4, 12, 2, 7, 12], Sampling(1.0, seed=4)
    alone = [model.generate_ids([row], max_new_tokens=n, temperature=1.0, seed=4 + i)[0] for i, (row, n) in enumerate(zip(prompts, most, strict=True))]
    ends = {alone[3][5], alone[6][2]}
    want = [row[: next((i for i, one in enumerate(row) if one in ends), len(row))] for row in alone]
    decoder = Counted(decoder_of(model, slots, 48))
    generation = Generation(decoder, slots, model.config.vocab, model.device, step_tokens=step_tokens, reuse=False, ahead=ahead)
    for i, (ids, n) in enumerate(zip(prompts, most, strict=True)):
        generation.add(Request(ids, n, sampling.at(i), Rules(ends=frozenset(ends))))
    got: list[list[int]] = [[] for _ in prompts]
    while made := generation.step():
        for place_of, token, end, *_ in made:
            if end != "eos":
                got[place_of].append(token)
    assert got == want and decoder.lengths() == [0] * slots and not generation.running and not generation.waiting
    assert max(decoder.sizes) <= max(step_tokens, slots)
    assert sum(decoder.sizes) >= sum(map(len, prompts)) + sum(len(row) - 1 for row in want)


class Counted:
    """A decoder, and the tokens of its calls."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self.sizes = decoder, list[int]()

    def forward(self, ids: torch.Tensor, *rest: Any) -> Any:
        self.sizes.append(len(ids))
        return self._decoder.forward(ids, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def test_a_stream_goes_on_where_inference_mode_has_ended(model: ftbert.Model) -> None:
    (want,) = model.generate(PROMPTS[:1], max_new_tokens=9)
    with torch.inference_mode():
        stream = model.stream(PROMPTS[0], max_new_tokens=9)
        first = next(stream)
    assert first + "".join(stream) == want and stream.reason


# ---- sampling -------------------------------------------------------------------------------------------------------


def test_ids_of_numpy_and_torch(model: ftbert.Model) -> None:
    want = model.generate_ids([[3, 4, 5]], max_new_tokens=4)
    assert model.generate_ids([np.array([3, 4, 5])], max_new_tokens=4) == want
    assert model.generate_ids(torch.tensor([[3, 4, 5]]), max_new_tokens=4) == want
    with pytest.raises(TypeError, match="integer"):
        model.generate_ids([[3.5]])


def test_seeds(model: ftbert.Model) -> None:
    draw = functools.partial(model.generate, "hello", max_new_tokens=24, temperature=2.0)
    assert draw(seed=5) == draw(seed=5) != draw(seed=6)
    assert draw() != draw()
    assert draw(top_k=1) == draw(temperature=0) == draw(top_p=1e-6)


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_special_token_ends_a_text(model: ftbert.Model, folder: Path, tmp_path: Path) -> None:
    """Here <s>, which is none of those that end texts by themselves."""
    ids = tokenizer("bytes")("hello")["input_ids"]
    free = model.generate_ids([ids], max_new_tokens=12)[0]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    said = {"eos_token_id": 2, "sequence_bias": [[[*free[1:4], 1], 1e4]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    other = ftbert.load(tmp_path)
    assert other.generate_ids([ids], max_new_tokens=5) == [[*free[:4], 1]]
    stream = other.stream("hello", max_new_tokens=12, stop=["<s>"])
    want = model.generate("hello", max_new_tokens=4)
    assert "".join(stream) == want[0] and stream.reason == "stop" and stream.tokens == 5
    assert other.generate("hello", max_new_tokens=12, stop="<s>") == want
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "stop_strings": ["no", "<s>"]}))
    assert ftbert.load(tmp_path).generate("hello", max_new_tokens=12) == want
    assert len(ftbert.load(tmp_path).generate("hello", max_new_tokens=12, stop=[])[0]) > len(want[0])


def test_a_stream_is_the_text(model: ftbert.Model) -> None:
    for how in ({}, {"temperature": 1.5, "seed": 2}, {"chat": True}):
        stream = model.stream(PROMPTS[0], max_new_tokens=40, **how)
        pieces = list(stream)
        assert "".join(pieces) == model.generate(PROMPTS[:1], max_new_tokens=40, **how)[0]
        assert len(pieces) > 1 and stream.reason in ("eos", "length") and 0 < stream.tokens <= 40


def test_stop_strings_end_texts(model: ftbert.Model) -> None:
    whole = model.generate(PROMPTS, max_new_tokens=40)
    for text in whole:
        stop = text[11:14]
        assert model.generate(PROMPTS, max_new_tokens=40, stop=["never comes", stop]) == [
            one[: one.find(stop)] if stop in one else one for one in whole
        ]
    stream = model.stream(PROMPTS[0], stop=whole[0][11:14], max_new_tokens=40)
    assert "".join(stream) == whole[0][: whole[0].find(whole[0][11:14])]
    assert stream.reason == "stop" and stream.tokens < 40


def test_the_folder_says_which_tokens_end_a_text(folder: Path, tmp_path: Path) -> None:
    """Of generation_config.json, which comes before the config."""
    from transformers import AutoModelForCausalLM

    model, reference = ftbert.load(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("bytes")(PROMPTS)["input_ids"]
    how = {"max_new_tokens": 40, "seed": 1, "temperature": 3.0}
    free = [row[-1] for row in model.generate_ids(ids, max_new_tokens=5)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[0], 2]}))
    try:
        stopped = ftbert.load(folder).generate_ids(ids, max_new_tokens=40)
    finally:
        reference.generation_config.save_pretrained(folder)
    assert len(stopped[0]) <= 4 and not any(free[0] in row or 2 in row for row in stopped)
    assert not any({2, 7} & set(row) for row in model.generate_ids(ids, **how))


def test_special_tokens_that_are_spelled_as_ends_end_a_text(folder: Path, tmp_path: Path) -> None:
    """Whatever the config names; ids without a tokenizer end by the config alone."""
    for file in folder.iterdir():
        if file.name not in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        described = json.loads((folder / name).read_text())
        (tmp_path / name).write_text(json.dumps({**described, "eos_token_id": None}))
    ids = tokenizer("bytes")("hello")["input_ids"]
    free = ftbert.load(tmp_path).generate_ids([ids], max_new_tokens=30)[0]
    end = next(one for one in free[3:] if one > 2 and one not in [*ids, *free[:3]])
    # That token's spelling becomes that of the end of a turn.
    described = json.loads(tokenizer("bytes").backend_tokenizer.to_str())
    vocab, spelled = described["model"]["vocab"], tokenizer("bytes").convert_ids_to_tokens(end)
    described["model"]["vocab"] = {"<|im_end|>" if word == spelled else word: place for word, place in vocab.items()}
    described["model"]["merges"] = [pair for pair in described["model"]["merges"] if spelled not in (*pair, "".join(pair))]
    described["added_tokens"].append({**described["added_tokens"][2], "id": end, "content": "<|im_end|>"})
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), unk_token="<unk>", eos_token="</s>")
    words.save_pretrained(tmp_path)
    model = ftbert.load(tmp_path)
    assert stated(model).ends == set() and spelled_ends(tokenizer_for(model)) == {2, end}
    text = model.stream("hello", max_new_tokens=30)
    assert "".join(text) == model.generate("hello", max_new_tokens=30)[0]
    assert text.reason == "eos" and text.tokens == next(i for i, one in enumerate(free) if one in (2, end))
    assert model.generate_ids([ids], max_new_tokens=30) == [free]


def test_a_converted_folder_writes_the_same(model: ftbert.Model, folder: Path, tmp_path: Path) -> None:
    copy = ftbert.load(convert(folder, tmp_path / "copy"))
    assert stated(copy).ends == stated(model).ends == {2, 7}
    assert copy.generate(PROMPTS, max_new_tokens=12, chat=True) == model.generate(PROMPTS, max_new_tokens=12, chat=True)


def test_chat_goes_through_the_template(model: ftbert.Model, folder: Path) -> None:
    ids = tokenizer("bytes")("<s>user: hello\nanswer:")["input_ids"]
    (want,) = model.generate_ids([ids], max_new_tokens=12)
    decode = functools.partial(tokenizer("bytes").decode, skip_special_tokens=True)
    assert model.generate("hello", max_new_tokens=12, chat=True) == [decode(want)]


def test_conversations(model: ftbert.Model) -> None:
    """Texts and conversations together; the answer of one that ends with the assistant's words goes on with them."""
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    before = "<s>system: be brief\n<s>user: hello\n"
    decode, how = functools.partial(tokenizer("bytes").decode, skip_special_tokens=True), {"max_new_tokens": 12}

    def after(text: str) -> str:
        return str(decode(model.generate_ids([tokenizer("bytes")(text, add_special_tokens=False)["input_ids"]], **how)[0]))

    answer = after(before + "answer:")
    assert model.generate([system, user], **how) == [answer]
    assert "".join(model.stream((system, user), **how)) == answer
    assert model.generate(["hello", [system, user], [user]], **how) == [
        *model.generate("hello", **how), answer, *model.generate("hello", chat=True, **how)
    ]  # fmt: skip
    begun = [system, user, {"role": "assistant", "content": "hello wor"}]
    assert model.generate(begun, **how) == [after(before + "<s>assistant: hello wor")]
    other = "{{ messages[-1].content }}?{% if add_generation_prompt %}!{% endif %}"
    assert model.generate([[system, user], "a"], chat_template=other, **how) == [after("hello?!"), after("a?!")]


def test_the_tokenizer_is_transformers(model: ftbert.Model, folder: Path, place: Place) -> None:
    assert model.tokenizer("hello")["input_ids"] == tokenizer("bytes")("hello")["input_ids"]
    assert "user: hello" in model.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    with pytest.raises(ValueError, match="no folder with a tokenizer"):
        _ = loaded("llama", place).tokenizer


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=has_bf16), pytest.param("int8", marks=has_int8)])
def test_narrow_products(folder: Path, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream and the cache are float32 there. The first token is that of a call without the cache."""
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int8: it was calibrated
        model = ftbert.load(folder, dtype=dtype)
    ids = tokenizer("bytes")(PROMPTS[0])["input_ids"]
    hidden = model(torch.tensor([ids])).last_hidden_state[0, -1:]
    logits = model.head("causal_lm")(hidden, model.encoder.weight("embeddings.word"))
    got = model.generate_ids([ids, ids[:3]], max_new_tokens=6)
    assert got[0][0] == int(logits.argmax()) and [len(row) for row in got] == [6, 6]
