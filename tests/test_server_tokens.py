"""Token classification and masked tokens, in Python and over HTTP, against transformers' pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import randomise
from served import Served, as_command, in_thread
from tokenizers_offline import TEXTS, write

import ftbert
from ftbert.server import schemas
from ftbert.text import STRATEGIES

msgspec = pytest.importorskip("msgspec")

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
FAMILIES = ("bert", "roberta", "xlm-roberta")  # WordPiece, byte-level BPE, Unigram
LENGTH = 40  # tokens that the tokenizer says it takes; some of TEXTS have more


def save(folder: Path, family: str, kind: str, **sizes: Any) -> Path:
    """A random model of transformers with a trained tokenizer of the family."""
    write(folder, family, model_max_length=LENGTH, clean_up_tokenization_spaces=kind == "MaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([",", "."])
    config = transformers.AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, **sizes,
    )  # fmt: skip
    model = randomise(getattr(transformers, f"AutoModelFor{kind}").from_config(config))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # what a token is counts most, so that results differ
        if kind == "TokenClassification":
            model.classifier.bias.zero_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def tagger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = dict(enumerate(LABELS))
    folder = tmp_path_factory.mktemp("taggers") / request.param
    return save(folder, request.param, "TokenClassification", id2label=names, label2id={b: a for a, b in names.items()})


@pytest.fixture(scope="module")
def tags(tagger: Path) -> Iterator[Served]:
    with in_thread(("tags", tagger)) as server:
        yield server


@cache
def pipeline(task: str, folder: Path) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu")


def expected(folder: Path, texts: list[str], strategy: str, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of words, for tokenizers that know none
        return pipeline("token-classification", folder)(texts, aggregation_strategy=strategy, **options)


def same(got: Any, want: Any) -> None:
    """Equal in shape, order and all but the last digits of scores."""
    if isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other)
        return
    assert {**got, "score": 0} == {**want, "score": 0}
    assert got["score"] == pytest.approx(float(want["score"]), abs=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ignored", [["O"], [], ["LOC", "B-PER"]])
def test_entities_are_the_pipelines(tagger: Path, tags: Served, strategy: str, ignored: list[str]) -> None:
    want = expected(tagger, TEXTS, strategy, ignore_labels=ignored)
    assert sum(map(len, want)) > 10
    options = {"aggregation_strategy": strategy, "ignore_labels": ignored}
    same(ftbert.load(tagger).token_classify(TEXTS, **options), want)
    same(tags.post("/token_classify", {"inputs": TEXTS, **options}), want)
    reply = tags.call("POST", "/token_classify", {"inputs": TEXTS, "parameters": options})
    same(reply.json(), want)
    msgspec.json.decode(reply.body, type=schemas.Entities)


def test_routes_of_a_token_classifier(tagger: Path, tags: Served) -> None:
    want = expected(tagger, TEXTS, "none")
    for path in ("/token_classify", "/v1/token_classify", "/predict", "/", "/invocations"):
        same(tags.post(path, {"inputs": TEXTS[0]}), want[0])
        same(tags.post(path, {"inputs": TEXTS[:2]}), want[:2])
        same(tags.post(path, {"inputs": [[text] for text in TEXTS]}), want)
    assert tags.call("GET", "/info").json()["model_type"] == {
        "token_classifier": {
            "id2label": {str(i): label for i, label in enumerate(LABELS)},
            "label2id": {label: i for i, label in enumerate(LABELS)},
        }
    }
    assert tags.post("/token_classify", {"inputs": ""}) == []
    for path, body, status in (
        ("/embed", {"inputs": "a"}, 424), ("/fill_mask", {"inputs": "a"}, 424), ("/token_classify", {"inputs": []}, 400),
        ("/token_classify", {"inputs": "a", "aggregation_strategy": "last"}, 422),
        ("/token_classify", {"inputs": "a", "parameters": {"stride": 8}}, 422),
        ("/predict", {"inputs": "a", "raw_scores": True}, 422), ("/predict", {"inputs": "a", "prompt_name": "query"}, 422),
        ("/token_classify", {"inputs": [["a", "b"]]}, 422),
        ("/token_classify", {"inputs": "hello " * 80, "truncate": False}, 422),
    ):  # fmt: skip
        assert tags.call("POST", path, body).status == status, (path, body)


def test_long_texts_and_many(tagger: Path, tags: Served) -> None:
    """Cut before they are tokenised, in several batches, as if each were alone."""
    long = " ".join(["Hello World naïve café the end"] * 2000)
    texts = [TEXTS[i % len(TEXTS)] for i in range(700)]
    texts[5] = long
    want = expected(tagger, [*TEXTS, long], "first")
    want = [want[i % len(TEXTS)] if i != 5 else want[-1] for i in range(700)]
    assert want[5]
    same(tags.post("/token_classify", {"inputs": texts, "aggregation_strategy": "first"}), want)
    same(ftbert.load(tagger).token_classify(texts, aggregation_strategy="first", max_tokens=300), want)
    left = tags.post("/token_classify", {"inputs": long, "truncation_direction": "left", "ignore_labels": []})
    assert left[-1]["end"] == len(long) and long[left[0]["start"] :].startswith(long[left[0]["start"] : left[0]["end"]])


def test_token_classify_refuses(tagger: Path, tiny_bert: Any, tmp_path: Path) -> None:
    model = ftbert.load(tagger)
    assert model.token_classify([]) == [] and model.token_classify("") == []
    with pytest.raises(ValueError, match="aggregation_strategy must be one of none"):
        model.token_classify("a", aggregation_strategy="last")
    with pytest.raises(TypeError, match="ignore_labels must be a list"):
        model.token_classify("a", ignore_labels="O")
    with pytest.raises(TypeError, match=r"texts\[1\] must be a str"):
        model.token_classify(["a", ("b", "c")])
    with pytest.raises(ValueError, match="head"):
        ftbert.load(tiny_bert(tmp_path)).token_classify("a")


# ---- masked tokens ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def filler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fillers") / request.param, request.param, "MaskedLM")


@pytest.fixture(scope="module")
def fills(filler: Path) -> Iterator[Served]:
    with in_thread(("fills", filler)) as server:
        yield server


def masked(folder: Path) -> list[str]:
    mask = pipeline("fill-mask", folder).tokenizer.mask_token
    return [f"{text[:12]} {mask} {TEXTS[0]} , ok ." for text in TEXTS if mask not in text] + [mask, f"{mask} and {mask}, {mask}!"]


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_k": 40}, {"targets": ["hello", "world", "hello", "zebra"]}])
def test_fillings_are_the_pipelines(filler: Path, fills: Served, options: dict[str, Any]) -> None:
    texts = masked(filler)
    cut = {"truncation": True}
    want = [pipeline("fill-mask", filler)(text, tokenizer_kwargs=cut, **options) for text in texts]
    assert len(want[0]) == (options.get("top_k", 5) if "targets" not in options else len({one["token"] for one in want[0]}))
    same(fills.post("/fill_mask", {"inputs": texts, **options}), want)
    reply = fills.call("POST", "/fill_mask", {"inputs": texts, "parameters": options})
    same(reply.json(), want)
    msgspec.json.decode(reply.body, type=schemas.Fillings)
    for path in ("/fill_mask", "/v1/fill_mask"):
        same(fills.post(path, {"inputs": texts[-1], **options}), want[-1])


def test_requests_of_one_batch_keep_their_targets(filler: Path, fills: Served) -> None:
    """Together in a batch, more masks than are computed at once, over several batches."""
    from concurrent.futures import ThreadPoolExecutor

    mask = pipeline("fill-mask", filler).tokenizer.mask_token
    asked: list[dict[str, Any]] = [
        {"inputs": f"hello {mask}"}, {"inputs": f"hello {mask}", "targets": "the"}, {"inputs": [f"{mask} end", f"{mask} {mask}"]},
        {"inputs": [" ".join([mask] * n) for n in (15, 1, 18, 7) * 10], "top_k": 1, "targets": ["the", "end"]},
    ]  # fmt: skip
    alone = [fills.post("/fill_mask", body) for body in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: fills.post("/fill_mask", body), asked * 6))
    same(together, alone * 6)
    assert [len(one) if isinstance(one[0], list) else 1 for one in alone[3]][:4] == [15, 1, 18, 7]


def test_an_embedding_model_fills_masks_beside(filler: Path, fills: Served, tagger: Path) -> None:
    mask = pipeline("fill-mask", filler).tokenizer.mask_token
    info = fills.call("GET", "/info").json()
    assert (info["mask_token"], list(info["model_type"])) == (mask, ["embedding"])
    assert len(fills.post("/embed", {"inputs": f"a {mask}"})[0]) == 32
    with in_thread(("tags", tagger), ("fills", filler)) as both:  # the first that can
        same(both.post("/fill_mask", {"inputs": mask}), fills.post("/fill_mask", {"inputs": mask}))
        assert both.call("POST", "/fill_mask", {"inputs": mask, "model": "tags"}).status == 424
        assert both.call("GET", "/info").json()["mask_token"] is None
    for body, said in (
        ({"inputs": [mask, "none"]}, "text 1 has none"), ({"inputs": mask, "top_k": 101}, "from 1 to 100"),
        ({"inputs": mask, "targets": []}, "1 to 100 words"), ({"inputs": mask, "targets": ""}, "in the vocabulary"),
        ({"inputs": mask, "targets": ["a", "b" * 201]}, "got one of 201"),
        ({"inputs": "hello " * 80 + mask}, "text 0 has none"),
    ):  # fmt: skip
        reply = fills.call("POST", "/fill_mask", body)
        assert (reply.status, said in reply.json()["error"]) == (422, True), (body, reply.body)



def test_through_processes_and_by_a_client(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    tags, fills = (save(tmp_path / kind, "bert", kind) for kind in ("TokenClassification", "MaskedLM"))
    arguments = [f"tags={tags}", f"fills={fills}", "--workers", "1", "--batch-tokens", "256"]
    with as_command(tmp_path, *arguments) as server:
        texts = masked(fills) * 5
        same(server.post("/fill_mask", {"inputs": texts, "targets": ["hello", "the"]}),
             [pipeline("fill-mask", fills)(text, targets=["hello", "the"]) for text in texts])  # fmt: skip
        same(server.post("/fill_mask", {"inputs": texts}), [pipeline("fill-mask", fills)(text) for text in texts])
        same(server.post("/token_classify", {"inputs": TEXTS * 5}), expected(tags, TEXTS, "none") * 5)
        url = f"http://127.0.0.1:{server.port}"
        found = hub.InferenceClient(url).token_classification(TEXTS[0], aggregation_strategy="simple", ignore_labels=[])
        for one, other in zip(found, expected(tags, [TEXTS[0]], "simple", ignore_labels=[])[0], strict=True):
            assert (one.entity_group, one.word, one.start, one.end) == tuple(other[k] for k in ("entity_group", "word", "start", "end"))
        words = hub.InferenceClient(f"{url}/fill_mask").fill_mask(texts[0], top_k=3, targets=["hello", "the"])
        assert [one.token_str for one in words] == [one["token_str"] for one in pipeline("fill-mask", fills)(texts[0], targets=["hello", "the"])]
