"""generate and chat on the command line, words of other programs for the same, and errors."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Place, randomise
from families import make_model
from language_models import loaded, random_llama

import ftbert
from ftbert import cli
from ftbert.decoding.text_stream import TextStream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> ftbert.Model:
    return ftbert.load(folder)


def test_errors_say_what_is_wrong(model: ftbert.Model, place: Place) -> None:
    long = "hello world " * 80
    for words, kind, call in [
        ("prompt 1 is empty", ValueError, lambda: model.generate(["a", ""])),
        ("prompt 0: expected a str, or a list of messages .*; got 1$", TypeError, lambda: model.generate([1])),
        (r"prompt 0: expected a str, or a list of messages .*; got \['a'\]", TypeError, lambda: model.stream(["a"])),
        ("prompt 1: .*; got \\[\\]", TypeError, lambda: model.generate(["a", []])),
        ("a message alone is no prompt; pass a list of messages", TypeError, lambda: model.generate({"role": "user", "content": "a"})),  # type: ignore[arg-type]
        ("stop must be a str or several, none empty; got \\(5,\\)", ValueError, lambda: model.generate("a", stop=5)),  # type: ignore[arg-type]
        ("prompt 0, message 1: expected 'content', a str; got None", TypeError, lambda: model.stream([{"role": "user", "content": "a"}, {"role": "user"}])),
        ("prompt 1, message 0: expected 'role', a str; got 1", TypeError, lambda: model.generate(["a", [{"role": 1, "content": ""}]])),
        ("prompt 0, message 0: content is not valid Unicode", ValueError, lambda: model.generate([{"role": "user", "content": "\ud800"}])),
        ("does not take these messages: only users", ValueError, lambda: model.generate("a", chat_template="{{ raise_exception('only users') }}")),
        ("the chat template is not valid", ValueError, lambda: model.generate("a", chat_template="{% for m in %}")),
        (r"prompt 0 has \d+ tokens; the context of this model is 64", ValueError, lambda: model.generate(long)),
        (r"prompt 0 has \d+ tokens; the context of this model is 64", ValueError, lambda: model.stream(long)),
        ("prompt 0 is not valid Unicode", ValueError, lambda: model.generate("\ud800")),
        ("prompt 0: expected token ids from 0 to", ValueError, lambda: model.generate_ids([[1, -1]])),
        ("prompt 1 has no tokens", ValueError, lambda: model.generate_ids([[1], []])),
        ("max_new_tokens must be a positive integer; got 0", ValueError, lambda: model.generate("a", max_new_tokens=0)),
        ("temperature must be a number of at least 0; got -1", ValueError, lambda: model.stream("a", temperature=-1)),
        ("temperature must be a number of at least 0; got nan", ValueError, lambda: model.stream("a", temperature=float("nan"))),
        ("top_k must be a positive integer; got -1", ValueError, lambda: model.generate("a", top_k=-1)),
        ("top_p must be above 0 and at most 1; got 2", ValueError, lambda: model.generate("a", top_p=2)),
        ("stop must be a str or several, none empty", ValueError, lambda: model.generate("a", stop=["b", ""])),
        ("seed must be an integer", ValueError, lambda: model.generate("a", seed=-1)),
    ]:
        with pytest.raises(kind, match=words):
            call()  # type: ignore[no-untyped-call]
    assert model.generate([]) == []
    live = loaded("llama", place)
    with pytest.raises(ValueError, match="no folder with a tokenizer"):
        live.generate("a")
    encoder = ftbert.load(make_model("bert", "masked_lm", 0), device=place.device, dtype=place.dtype)
    with pytest.raises(ValueError, match=r"generates no text: it has no head for the next token, .* its heads: masked_lm"):
        encoder.generate_ids([[1]])
    with pytest.raises(ValueError, match="generates no text: its head has a layer before the one over the vocabulary"):
        ftbert.load(make_model("modernbert-decoder", "causal_lm", 0)).generate_ids([[1]])
    both_ways = ftbert.load(randomise(make_model("llama", "causal_lm", 0, is_causal=False), 0))
    with pytest.raises(RuntimeError, match="its tokens see those that follow: it is an encoder"):
        both_ways.generate_ids([[1]])


@pytest.mark.parametrize(("how", "kind", "words"), [
    ({"do_sample": True}, ValueError, r"do_sample=True: pass temperature too: 1.0 draws"),
    ({"do_sample": False, "temperature": 0.5}, ValueError, "do_sample=False: leave temperature=0.5 out"),
    ({"max_length": 20}, TypeError, "max_length.*: max_new_tokens=... counts the generated tokens"),
    ({"num_beams": 4}, TypeError, "no beams: temperature above 0 draws, 0 takes the most likely token; got 4"),
    ({"repeat_penalty": 1.1}, TypeError, "repetition_penalty=... counts all tokens"),
    ({"max_tokens": 3, "max_new_tokens": 4}, TypeError, "max_tokens and max_new_tokens are one argument"),
    ({"temprature": 1}, TypeError, "has no argument 'temprature'; nearest: temperature"),
    ({"attention_mask": [[1]]}, TypeError, "ids to generate_ids as lists without padding"),
    ({"suppress_tokens": 3}, ValueError, "generate: suppress_tokens: expected a list of token ids; got 3"),
])  # fmt: skip
def test_words_of_others_are_answered(model: ftbert.Model, how: dict[str, Any], kind: type[Exception], words: str) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(kind, match=words):
            call("a", **how)
    with pytest.raises(kind, match=words):
        model.generate_ids([[1]], **how)


def test_words_of_others_that_mean_the_same(model: ftbert.Model) -> None:
    usual = {"max_new_tokens": 30, "stop": "o"}
    (want,) = model.generate("hello", **usual)
    same = {"max_tokens": 30, "stop_strings": ["o"], "do_sample": False, "num_beams": 1, "top_k": 0, "pad_token_id": 2, "temperature": None}
    assert model.generate(prompts="hello", **same) == model.generate(prompt="hello", **same) == [want]
    message = [{"role": "user", "content": "hello"}]
    assert "".join(model.stream(messages=message, max_tokens=9)) == model.generate("hello", chat=True, max_new_tokens=9)[0]
    drawn = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9}
    assert model.generate("hello", do_sample=True, **drawn) == model.generate("hello", **drawn)
    with pytest.raises(TypeError, match="'stop_strings'.*generate_ids takes and gives ids"):
        model.generate_ids([[1]], stop_strings="a")


def test_a_tokenizer_without_a_template(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match="no chat template; pass one as chat_template"):
        ftbert.load(tmp_path).generate("a", chat=True)
    assert ftbert.load(tmp_path).generate("a", max_new_tokens=3) == ftbert.load(folder).generate("a", max_new_tokens=3)


def test_the_command_prints_the_text(
    model: ftbert.Model, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (want,) = model.generate("the café", max_new_tokens=20, stop="\x00\x00")
    usual = ["--max-new-tokens", "20", "--stop", "\x00\x00"]
    assert cli.main(["generate", str(folder), "the café", *usual]) == 0
    out, err = capsys.readouterr()
    assert out == want + "\n" and re.fullmatch(r"ftbert: \d+ tokens after \d+ in [\d.]+ s, [\d.]+/s; (length|eos)\n", err)
    monkeypatch.setattr("sys.stdin", io.StringIO("the café"))
    assert cli.main(["generate", str(folder), "-", "--json", *usual]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"] == want and 0 < said["tokens"] <= 20 and said["prompt_tokens"] > 0
    assert cli.main(["generate", str(folder), ""]) == 1
    assert capsys.readouterr().err == "ftbert: error: prompt 0 is empty\n"


def test_flags_of_llama_cpp_that_mean_the_same(model: ftbert.Model, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-n", "9", "--temp", "0.8", "-s", "3", "--top-k", "0", "-sys", "be brief", "--min-p", "0.01"]
    assert cli.main(["generate", str(folder), "hello", *flags]) == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (want,) = model.generate(messages, max_new_tokens=9, temperature=0.8, seed=3, min_p=0.01)
    assert capsys.readouterr().out == want + "\n"


def test_the_command_takes_a_systems_message(model: ftbert.Model, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["generate", str(folder), "hello", "--max-new-tokens", "9", "--system", "be brief"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert cli.main(usual) == 0
    assert capsys.readouterr().out == model.generate(messages, max_new_tokens=9)[0] + "\n"
    other = "{{ messages[0].content }}, {{ messages[1].content }}"
    (tmp_path / "chat.jinja").write_text(other)
    for template in (other, str(tmp_path / "chat.jinja")):
        assert cli.main([*usual, "--chat-template", template]) == 0
        assert capsys.readouterr().out == model.generate("be brief, hello", max_new_tokens=9)[0] + "\n"


def test_a_conversation_on_the_command_line(
    model: ftbert.Model, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a pipe; what is too long is told and left out."""
    said = ["hello", "the café", "word " * 60, "/clear", "a", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(said)))
    assert cli.main(["chat", str(folder), "--max-new-tokens", "8", "--repetition-penalty", "1.2"]) == 1
    out, err = capsys.readouterr()
    messages, want = list[dict[str, str]](), ""
    for line in (said[0], said[1], said[4]):
        messages = [] if line == "a" else messages
        messages.append({"role": "user", "content": line})
        (answer,) = model.generate(messages, max_new_tokens=8, repetition_penalty=1.2)
        messages.append({"role": "assistant", "content": answer})
        want += answer + "\n"
    assert out == want and re.fullmatch(r"ftbert: error: prompt 0 has \d+ tokens; the context of this model is 64, .*\n", err)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert cli.main(["chat", str(folder), "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == model.generate("hello", chat=True, max_new_tokens=8)[0] + "\n"


def test_ctrl_c_ends_the_text(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    push, seen = TextStream.push, list[int]()

    def interrupted(self: TextStream, token: int) -> str:
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(token)
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupted)
    assert cli.main(["generate", str(folder), "hello"]) == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n") and err.startswith("ftbert: 6 tokens after") and err.endswith("; interrupted\n")
