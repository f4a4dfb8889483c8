"""Logits with a cache of keys and values: any cut of a text into calls gives what one call gives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place
from families import make_model
from language_models import FAMILIES, LENGTHS, error, loaded, made, run, texts
from torch import Tensor

import ftbert
from ftbert.decoding.decoder import cache_bytes, decoder_of

POSITIONS, SLOTS = 48, 4
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}


def decoder(family: str, place: Place, slots: int = SLOTS, positions: int = POSITIONS) -> Any:
    model = loaded(family, place)
    head = model.head("causal_lm")
    weight = model.encoder.weight("embeddings.word") if head.tied else head.out_weight
    return torch.classes.ftbert.Decoder(model.encoder, weight, None, slots, positions)


@functools.cache
def whole(family: str, place: Place) -> list[Tensor]:
    """Each text in one call by itself."""
    of = decoder(family, place)
    return [run(of, place, [i], [text])[0] for i, text in enumerate(texts(family))]


def limit(place: Place) -> float:
    return 1e-6 if place.dtype == torch.float32 else 64 * place.eps**2


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_call_gives_the_logits_of_transformers(place: Place, family: str) -> None:
    with torch.no_grad():
        for ids, got in zip(texts(family), whole(family, place), strict=True):
            want = made(family)(ids[None]).logits[0]
            assert error(got, want) < (1e-9 if place.dtype == torch.float32 else 256 * place.eps**2)


@pytest.mark.parametrize("first", [1, 6, 16])
def test_steps_give_the_logits_of_one_call(place: Place, family: str, first: int) -> None:
    """The start of a text, then a token a call, of several texts at a time, which end one after another."""
    of, ids = decoder(family, place), texts(family)
    order, slots = [1, 0], [3, 1]
    got = [[part] for part in run(of, place, slots, [ids[i][:first] for i in order])]
    for at in range(first, max(LENGTHS)):
        rows = [n for n, i in enumerate(order) if at < LENGTHS[i]]
        made = run(of, place, [slots[n] for n in rows], [ids[order[n]][at : at + 1] for n in rows], all_rows=False)
        for n, part in zip(rows, made, strict=True):
            got[n].append(part)
    assert of.lengths() == [0, LENGTHS[0], 0, LENGTHS[1]]
    for n, i in enumerate(order):
        assert error(torch.cat(got[n]), whole(family, place)[i]) < limit(place)


@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_steps_of_many_texts_with_other_heads(place: Place, size: int) -> None:
    """So many that on a GPU a block reads all of a text's keys, round after round, the first before it has a query."""
    small = {**HEADS, "head_dim": size, "num_hidden_layers": 2, "max_position_embeddings": 512}
    model = ftbert.load(make_model("llama", "causal_lm", 0, **small), device=place.device, dtype=place.dtype)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, model.config.vocab, (n,), generator=generator) for n in range(200, 272)]
    slots = list(range(len(ids)))
    of, other = (decoder_of(model, len(ids), 280) for _ in range(2))
    want = run(of, place, slots, ids, all_rows=False)
    run(other, place, slots, [one[:-3] for one in ids], all_rows=False)
    for at in (-3, -2, -1):
        got = run(other, place, slots, [one[at:][:1] for one in ids], all_rows=False)
    assert error(torch.cat(got), torch.cat(want)) < limit(place)


def test_a_batch_is_its_sequences(place: Place, family: str) -> None:
    got = run(decoder(family, place), place, [2, 0, 1], texts(family))
    last = run(decoder(family, place), place, [2, 0, 1], texts(family), all_rows=False)
    for all_rows, one, want in zip(got, last, whole(family, place), strict=True):
        assert error(all_rows, want) < limit(place)
        assert error(one, want[-1:]) < limit(place)


def test_a_copied_prefix_is_the_prefix(place: Place, family: str) -> None:
    of, text = decoder(family, place), texts(family)[0]
    run(of, place, [1], [text])
    of.copy_prefix(1, [3, 0], 21)
    assert of.lengths() == [21, 40, 0, 21]
    for got in run(of, place, [3, 0], [text[21:]] * 2):
        assert error(got, whole(family, place)[0][21:]) < limit(place)


def test_a_truncated_slot_goes_on_from_there(place: Place, family: str) -> None:
    of, text = decoder(family, place), texts(family)[0]
    run(of, place, [0], [texts(family)[1].flip(0)])
    of.truncate(0, 0)
    run(of, place, [0], [torch.cat([text[:11], text.flip(0)[:20]])])
    of.truncate(0, 11)
    (got,) = run(of, place, [0], [text[11:]])
    assert error(got, whole(family, place)[0][11:]) < limit(place)


def test_a_full_cache_says_so_and_changes_nothing(place: Place) -> None:
    of, text = decoder("llama", place, slots=2, positions=20), texts("llama")[0]
    run(of, place, [0], [text[:15]])
    with pytest.raises(RuntimeError, match="cache is full: it has 20 positions .* sequence 1 with 15 .* gets 6 more"):
        run(of, place, [1, 0], [text[:20], text[15:21]])
    assert of.lengths() == [15, 0]
    (got,) = run(of, place, [0], [text[15:20]])
    assert error(got, whole("llama", place)[0][15:20]) < limit(place)


def test_a_cache_goes_with_its_decoder(place: Place) -> None:
    """As after each call of generate: 32 caches of 6 MiB, one at a time."""
    of = decoder("llama", place, slots=1, positions=1)

    def held() -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages << 12 if place.device == "cpu" else torch.cuda.memory_allocated()

    size = cache_bytes(loaded("llama", place), 1, 1)
    slots = 1 + (6 << 20) // (size * 96)
    of.with_cache(slots, 96)
    before = held()
    for _ in range(32):
        of.with_cache(slots, 96)
    assert held() - before < 32 << 20


def test_arguments_that_do_not_fit(place: Place) -> None:
    of, ids = decoder("llama", place), texts("llama")[0][:4].to(place.device)
    cu, slots = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for words, arguments in {
        r"slots: expected 0 to 3, got 4": (ids, cu, slots + 3),
        r"slots: expected each once, got 0 twice": (ids, cu, slots * 0),
        r"cu_seqlens: expected it to run from 0 to 3": (ids[:3], cu, slots),
        r"at least one token a sequence, got 0 of sequence 0": (ids, cu * 0 + cu[2] * (cu == 4), slots),
        r"cu_seqlens: expected contiguous Int \[3\]": (ids, cu[:2], slots),
        r"slots: expected contiguous Int \[2\] on cpu, got Long": (ids, cu, slots.long()),
        r"slots: expected at least one sequence": (ids[:0], cu[:1], slots[:0]),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            of.forward(*arguments)
    with pytest.raises(RuntimeError, match="length: expected 0 to 0, the tokens that slot 2 has, got 1"):
        of.truncate(2, 1)
    with pytest.raises(RuntimeError, match="to: expected other slots than 1"):
        of.copy_prefix(1, [2, 1], 0)
    assert of.lengths() == [0] * SLOTS
    with pytest.raises(RuntimeError, match="of 1 to 96 positions, which the model has; got 1 slots of 97"):
        decoder("llama", place, 1, 97)
    model = loaded("llama", place)
    with pytest.raises(RuntimeError, match=r"weight: expected .* \[vocab, 128\]"):
        torch.classes.ftbert.Decoder(model.encoder, torch.zeros(7, 5, dtype=place.dtype, device=place.device), None, 1, 9)


@pytest.mark.parametrize(
    ("family", "attention", "words"),
    [
        ("bert", "auto", "its tokens see those that follow: it is an encoder"),
        ("llama", "general", "its attention runs by the general path"),
    ],
)
def test_models_without_a_cache(place: Place, family: str, attention: str, words: str) -> None:
    task = "encoder" if family == "bert" else "causal_lm"
    model = ftbert.load(make_model(family, task, 0), device=place.device, dtype=place.dtype, attention=attention)
    word = model.encoder.weight("embeddings.word")
    with pytest.raises(RuntimeError, match=f"this model has no cache of keys and values: {words}"):
        torch.classes.ftbert.Decoder(model.encoder, word, None, 1, 8)


def test_steps_of_every_range_of_lengths(place: Place) -> None:
    """Recorded steps serve lengths up to a power of two: past 256 another recording, then the first again."""
    model = ftbert.load(make_model("llama", "causal_lm", 0, max_position_embeddings=300, **HEADS), device=place.device, dtype=place.dtype)
    of = torch.classes.ftbert.Decoder(model.encoder, model.head("causal_lm").out_weight, None, 3, 300)
    ids = torch.randint(3, model.config.vocab, (266,), generator=torch.Generator().manual_seed(0))
    (want,) = run(of, place, [0], [ids])
    run(of, place, [1, 2], [ids[:250], ids[:9]])
    got = [run(of, place, [1], [ids[at : at + 1]], all_rows=False)[0] for at in range(250, 266)]
    short = [run(of, place, [2], [ids[at : at + 1]], all_rows=False)[0] for at in range(9, 13)]
    assert error(torch.cat(got), want[250:]) < limit(place)
    assert error(torch.cat(short), want[9:13]) < limit(place)
    assert of.recorded() == (2 if place.device == "cuda" else 0)


def test_recorded_steps_are_those_that_are_not(place: Place) -> None:
    """The same bits, in slots that change, and logits that later steps leave alone."""
    model, text = loaded("llama", place), texts("llama")[0]
    slots = [[2, 0], [0, 2], [0, 2], [2, 0], [1, 3], [3, 1]]
    of = [decoder("llama", place), decoder("llama", place)]
    got: list[list[Tensor]] = [[], []]
    for one, graphs, logits in zip(of, (True, False), got, strict=True):
        model.encoder.use_cuda_graphs(graphs)
        try:
            run(one, place, [0, 1, 2, 3], [text[:5], text[:9], text[:3], text[:20]])
            for at, where in enumerate(slots):
                ids = text[20 + at : 22 + at].to(place.device).int()
                cu, index = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], where))
                logits.append(one.forward(ids, cu, index, False))
        finally:
            model.encoder.use_cuda_graphs(True)
    assert of[0].lengths() == of[1].lengths() == [9, 11, 7, 22]
    assert all(torch.equal(*pair) for pair in zip(*got, strict=True))
    assert [one.recorded() for one in of] == ([1, 0] if place.device == "cuda" else [0, 0])


def test_inference_mode_changes_nothing(place: Place) -> None:
    """A cache that was made in it works outside, and the other way round."""
    with torch.inference_mode():
        of = decoder("llama", place)
        run(of, place, [0], [texts("llama")[0][:11]])
    text = texts("llama")[0]
    of.truncate(0, 9)
    of.copy_prefix(0, [1, 2], 9)
    with torch.inference_mode():
        got = [run(of, place, [2, 0], [text[at : at + 1]] * 2, all_rows=False) for at in (9, 10)]
    got += [run(of, place, [2, 0], [text[at : at + 1]] * 2, all_rows=False) for at in (11, 12)]
    of.truncate(2, 0)
    for slot in (0, 1):
        assert error(torch.cat([both[slot] for both in got]), whole("llama", place)[0][9:13]) < limit(place)
    assert of.lengths() == [13, 9, 0, 0]


def test_a_cache_is_used_on_other_streams(place: Place) -> None:
    """Calls follow each other, and their memory is not given away meanwhile."""
    if place.device == "cpu":
        pytest.skip("streams are a GPU's")
    text, streams = texts("llama")[0], [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10_000_000)  # what is launched here is late
        of = decoder("llama", place)
    got = []
    for at in range(0, 40):
        with torch.cuda.stream(streams[at % 3]):
            if at % 5 == 0:
                torch.cuda._sleep(3_000_000)
            cu, slots = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
            got.append(of.forward(text[at : at + 1].to(place.device), cu, slots, False))
    del of
    torch.cuda.synchronize()
    assert error(torch.cat(got).float().cpu(), whole("llama", place)[0]) < limit(place)
