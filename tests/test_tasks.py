"""Models with an adapter for each task: jina-embeddings-v3's layout against transformers' own layers with the adapters
beside them, v5's and folders of PEFT's against peft."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_same
from conftest import has_bf16, has_int8
from families import make_model
from safetensors.torch import load_file, save_file
from served import in_thread
from tokenizers_offline import TEXTS, modules_of, write_files

import ftbert
from ftbert.converters import convert

TASKS = ["retrieval.query", "retrieval.passage", "separation", "text-matching"]
INSTRUCTIONS = dict(zip(TASKS, ["Query hello ", "Document two ", "", ""], strict=True))
RANK, ALPHA = 3, 2.0
FLASH = "jinaai/xlm-roberta-flash-implementation--"
_OLDER = {
    "embeddings.LayerNorm": "emb_ln", "self_attn.o_proj": "mixer.out_proj", "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2", "layers.": "encoder.layers.",
}  # fmt: skip


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


class Jina3:
    """A folder as jinaai/jina-embeddings-v3 is published, and its model: transformers' with the adapters beside."""

    def __init__(self, folder: Path, modules: bool = True) -> None:
        self.folder = folder
        self.base = make_model("jina_embeddings_v3", "encoder", 0, vocab_size=300, max_position_embeddings=64)
        self.base.save_pretrained(folder)
        generator = torch.Generator().manual_seed(4)
        self.parts: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        state = self.base.state_dict()
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if ".k_proj." in name or ".v_proj." in name:
                continue
            if ".q_proj." in name:
                tensor = torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
                name = name.replace("self_attn.q_proj", "mixer.Wqkv")
            for new, old in _OLDER.items():
                name = name.replace(new, old)
            name = f"roberta.{name}"
            if tensor.dim() < 2:
                tensors[name] = tensor.contiguous()
                continue
            module = name.removesuffix(".weight")
            out, inputs = tensor.shape
            table = "_embeddings" in module
            shapes = [(out, RANK), (RANK, inputs)] if table else [(RANK, inputs), (out, RANK)]
            a, b = (torch.randn(len(TASKS), *shape, generator=generator) * 0.15 for shape in shapes)
            self.parts[module] = a, b
            tensors[f"{module}.parametrizations.weight.original"] = tensor.contiguous()
            tensors |= {f"{module}.parametrizations.weight.0.lora_A": a, f"{module}.parametrizations.weight.0.lora_B": b}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        theta = config.pop("rope_parameters")["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
        edit(
            folder / "config.json", model_type="xlm-roberta", architectures=["XLMRobertaModel"],
            position_embedding_type="rotary", rotary_emb_base=theta, lora_adaptations=TASKS, lora_rank=RANK,
            lora_alpha=ALPHA, task_instructions=INSTRUCTIONS, load_trained_adapters=True, use_flash_attn=True,
            auto_map={
                "AutoConfig": f"{FLASH}configuration_xlm_roberta.XLMRobertaFlashConfig",
                "AutoModel": f"{FLASH}modeling_lora.XLMRobertaLoRA",
                "AutoModelForMaskedLM": f"{FLASH}modeling_xlm_roberta.XLMRobertaForMaskedLM",
            },
        )  # fmt: skip
        write_files(folder, "xlm-roberta")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XLMRobertaTokenizer"}))
        if modules:
            listed = modules_of("Transformer", "Pooling", "Normalize")
            listed[0] |= {"type": "custom_st.Transformer", "kwargs": ["task"]}
            (folder / "modules.json").write_text(json.dumps(listed))
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
            (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": INSTRUCTIONS}))

    def states(self, ids: torch.Tensor, task: str | None) -> torch.Tensor:
        """[1, tokens] -> [tokens, hidden]: the product of each layer, and that of the two of its adapter."""
        hooks = []
        if task is not None:
            index = TASKS.index(task)
            modules = dict(self.base.named_modules())
            for published, (a, b) in self.parts.items():
                name = published.removeprefix("roberta.")
                for new, old in _OLDER.items():
                    name = name.replace(old, new)
                few, back = a[index], b[index]
                if "_embeddings" in name:
                    hooks.append(modules[name].register_forward_hook(
                        lambda _, given, made, few=few, back=back: made + few[given[0]] @ back * (ALPHA / RANK)
                    ))  # fmt: skip
                    continue
                stems = [name]
                if "mixer.Wqkv" in name:
                    stems = [name.replace("mixer.Wqkv", f"self_attn.{part}_proj") for part in "qkv"]
                for stem, rows in zip(stems, back.chunk(len(stems)), strict=True):
                    hooks.append(modules[stem].register_forward_hook(
                        lambda _, given, made, few=few, rows=rows: made + given[0] @ few.T @ rows.T * (ALPHA / RANK)
                    ))  # fmt: skip
        with torch.no_grad():
            found = self.base(ids).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return found

    def vectors(self, texts: list[str], task: str | None, prompt: str | None = None) -> np.ndarray[Any, Any]:
        """As XLMRobertaLoRA.encode: the task's instruction, mean, length 1."""
        from transformers import AutoTokenizer

        before = INSTRUCTIONS.get(task or "", "") if prompt is None else prompt
        tokenizer = AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        tokenizer.model_max_length = 64
        rows = [self.states(tokenizer(before + text, return_tensors="pt", truncation=True)["input_ids"], task) for text in texts]
        return torch.nn.functional.normalize(torch.stack([row.mean(0) for row in rows])).numpy()


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina3:
    return Jina3(tmp_path_factory.mktemp("jina"))


@pytest.mark.parametrize("task", [None, *TASKS])
def test_jina_embeddings_3(jina: Jina3, task: str | None) -> None:
    model = ftbert.load(jina.folder)
    want = jina.vectors(TEXTS, task)
    assert_same(model.encode(TEXTS, task=task), want)
    assert_same(ftbert.load(jina.folder, task=task).encode(TEXTS), want)
    if task is not None:
        assert np.abs(want - jina.vectors(TEXTS, None, INSTRUCTIONS[task])).max() > 0.02  # the adapter counts
        assert_same(model.encode(TEXTS, task=task, prompt=""), jina.vectors(TEXTS, task, ""))
        assert_same(model.encode(TEXTS, task=task, prompt_name="retrieval.passage"), jina.vectors(TEXTS, task, "Document two "))
        short = [TEXTS.index(text) for text in ("Hello World", "query: x")]
        chunks = model.encode([TEXTS[place] for place in short], task=task, chunk_tokens=1000)
        assert_same(np.concatenate(chunks), want[short])
        outputs = model.encode(TEXTS[0], task=task, output_value=None)
        assert_same(outputs["sentence_embedding"].numpy(), want[0])


def test_queries_and_documents(jina: Jina3) -> None:
    model = ftbert.load(jina.folder)
    assert_same(model.encode_query(TEXTS), jina.vectors(TEXTS, "retrieval.query"))
    assert_same(model.encode_document(TEXTS), jina.vectors(TEXTS, "retrieval.passage"))
    assert model.prompts["retrieval.query"] == "Query hello "


@has_bf16
def test_a_task_is_merged_once_and_kept(jina: Jina3, monkeypatch: pytest.MonkeyPatch) -> None:
    import ftbert.task_models

    model, made = ftbert.load(jina.folder), []
    real = ftbert.task_models.build
    monkeypatch.setattr(ftbert.task_models, "build", lambda *given: made.append(given[0].task) or real(*given))
    threads = [threading.Thread(target=model.encode, args=(TEXTS[:3],), kwargs={"task": "separation"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.encode(TEXTS, task="text-matching")
    model.encode(TEXTS)
    assert made == ["separation", "text-matching"]
    assert model.info()["tasks"] == "retrieval.query, retrieval.passage, separation, text-matching"
    again = pickle.loads(pickle.dumps(model))
    assert_same(again.encode(TEXTS[:3], task="separation"), model.encode(TEXTS[:3], task="separation"))
    half = model.to(dtype="bf16")
    assert half.for_task("separation").dtype == torch.bfloat16
    assert half.for_task("separation").info()["task"] == "separation"
    assert half.for_task("") is half
    assert ftbert.load(jina.folder, task="separation").for_task("separation").checkpoint.task == "separation"


def test_without_modules_and_converted(tmp_path: Path) -> None:
    made = Jina3(tmp_path / "jina", modules=False)
    model = ftbert.load(made.folder)
    assert_same(model.encode(TEXTS, task="retrieval.query"), made.vectors(TEXTS, "retrieval.query"))
    with pytest.warns(UserWarning, match="adapters for tasks stay behind: retrieval.query, .*task="):
        plain = convert(made.folder, tmp_path / "plain")
    assert_same(ftbert.load(plain).encode(TEXTS), model.encode(TEXTS))
    copy = ftbert.load(convert(made.folder, tmp_path / "copy", task="retrieval.query"))
    assert_same(copy.encode(TEXTS, prompt_name="retrieval.query"), made.vectors(TEXTS, "retrieval.query"))
    with pytest.raises(ValueError, match="task must be 'query', 'document' or None; got 'separation'"):
        copy.encode(TEXTS, task="separation")


@has_int8
def test_int8_of_a_task_is_made_of_a_converted_folder(jina: Jina3) -> None:
    with pytest.raises(ValueError, match="of task 'separation'.*convert"):
        ftbert.load(jina.folder, dtype="int8", task="separation")


def test_wrong_tasks(jina: Jina3, tmp_path: Path) -> None:
    model = ftbert.load(jina.folder)
    with pytest.raises(ValueError, match="task must be 'query', 'document', 'retrieval.query', .* or None; got 'search'"):
        model.encode(TEXTS, task="search")
    with pytest.raises(ValueError, match="task 'search' is none of the model's; they are: 'retrieval.query', "):
        ftbert.load(jina.folder, task="search")
    with pytest.raises(ValueError, match="they are: none: the files hold no adapters for tasks"):
        ftbert.load(make_model("bert", "encoder", 0), task="search")
    for change, words in [
        ({"lora_adaptations": TASKS[:3]}, r"adapters of 3 tasks do not fit:\n  .*lora_A \[4, 1, 3\] .*: expected \[3, "),
        ({"lora_adaptations": "a"}, "lora_adaptations 'a': expected names of tasks"),
        ({"lora_adaptations": [*TASKS[:3], TASKS[0]]}, "lora_adaptations .*: expected names of tasks"),
        ({"lora_rank": 0}, "lora_rank 0: expected at least 1"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute' is not supported of jinaai"),
    ]:
        folder = tmp_path / "wrong"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(jina.folder, folder)
        edit(folder / "config.json", **change)
        with pytest.raises(ValueError, match=words):
            ftbert.load(folder)
    shutil.copy(jina.folder / "config.json", folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    name = "roberta.encoder.layers.1.mlp.fc2.parametrizations.weight.0.lora_B"
    for made, words in ((None, "lora_B is missing"), (tensors[name][:, :-1].contiguous(), "do not make")):
        changed = {key: value for key, value in tensors.items() if key != name} | ({} if made is None else {name: made})
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            ftbert.load(folder)
    edit(folder / "config.json", task_instructions={"separation": 3})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="task_instructions must be an object of texts"):
        ftbert.load(folder).encode(TEXTS)


def test_a_server_takes_tasks(jina: Jina3) -> None:
    model = ftbert.load(jina.folder)
    with in_thread(("m", jina.folder), task="text-matching") as server:

        def vectors(**asked: Any) -> np.ndarray[Any, Any]:
            found = server.post("/v1/embeddings", {"input": TEXTS, **asked})["data"]
            return np.array([one["embedding"] for one in found], dtype=np.float32)

        for asked, task in (
            ({}, "text-matching"), ({"task": "retrieval.passage"}, "retrieval.passage"), ({"task": "separation"}, "separation"),
            ({"input_type": "query"}, "retrieval.query"), ({"task": "document"}, "retrieval.passage"),
        ):
            assert_same(vectors(**asked), model.encode(TEXTS, task=task))
            if "input_type" not in asked:
                assert_same(np.float32(server.post("/embed", {"inputs": TEXTS, **asked})), model.encode(TEXTS, task=task))
        wrong = server.call("POST", "/embed", {"inputs": "a", "task": "search"})
        assert wrong.status == 422 and "`task` must be one of 'query', " in str(wrong.json())
        wrong = server.call("POST", "/v1/embeddings", {"input": "a", "task": "search"})
        assert wrong.status == 422 and "'text-matching'" in str(wrong.json())
        wrong = server.call("POST", "/v1/embeddings", {"input": "a", "task": "separation", "input_type": "query"})
        assert wrong.status == 422 and "different adapters" in str(wrong.json())


# ---- a folder of PEFT's for each task --------------------------------------------------------------------------------

FIFTH = ("retrieval", "text-matching", "clustering")


def fifth(folder: Path, family: str, around: str = "adapters", tasks: tuple[str, ...] = FIFTH) -> Any:
    """As jinaai/jina-embeddings-v5-text-small (qwen3) and -nano (eurobert) are published; peft's model."""
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 400, "max_position_embeddings": 64}
    base = make_model(family, "encoder", 0, **sizes)
    base.save_pretrained(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets), adapter_name=tasks[0])
    for task in tasks[1:]:
        model.add_adapter(task, peft.LoraConfig(r=4, lora_alpha=4, target_modules=targets))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder / around)
    write_files(folder, "roberta")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return model.eval()


def want_of(model: Any, folder: Path, texts: list[str], task: str, prompt: str, last: bool = True) -> np.ndarray[Any, Any]:
    from transformers import AutoTokenizer

    model.set_adapter(task)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    rows = []
    for text in texts:
        ids = tokenizer(prompt + text, return_tensors="pt", truncation=True, max_length=64)["input_ids"]
        with torch.no_grad():
            states = model.base_model.model(input_ids=ids).last_hidden_state[0]
        rows.append(states[-1] if last else states.mean(0))
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()


@pytest.mark.parametrize("family", ["qwen3", "eurobert"])
def test_jina_embeddings_5(tmp_path: Path, family: str) -> None:
    theirs = fifth(tmp_path, family)
    edit(
        tmp_path / "config.json", model_type="jina_embeddings_v5", architectures=["JinaEmbeddingsV5Model"],
        task_names=list(FIFTH), auto_map={"AutoModel": "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"},
        **({"is_decoder": False} if family == "eurobert" else {}),
    )  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "custom_st.Transformer"}]))
    said = {"prompts": {"query": "Query: ", "document": "Document: "}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    model = ftbert.load(tmp_path)
    for task in FIFTH:
        assert_same(model.encode(TEXTS, task=task), want_of(theirs, tmp_path, TEXTS, task, "Document: "))
    query = want_of(theirs, tmp_path, TEXTS, "retrieval", "Query: ")
    assert_same(model.encode_query(TEXTS), query)
    assert_same(model.encode(TEXTS, task="retrieval", prompt_name="query"), query)
    assert_same(model.encode_document(TEXTS), want_of(theirs, tmp_path, TEXTS, "retrieval", "Document: "))
    clusters = ftbert.load(tmp_path, task="clustering")
    assert_same(clusters.encode(TEXTS), want_of(theirs, tmp_path, TEXTS, "clustering", "Document: "))
    with pytest.raises(ValueError, match="computes nothing without: give task, 'retrieval', 'text-matching', 'clustering'"):
        model.encode(TEXTS)
    with pytest.raises(ValueError, match="an adapter for each task and is none without: task="):
        convert(tmp_path, tmp_path.parent / f"{family}-copy")
    copy = ftbert.load(convert(tmp_path, tmp_path.parent / f"{family}-copy", task="retrieval"))
    assert_same(copy.encode_query(TEXTS), query)
    shutil.rmtree(tmp_path / "adapters" / "clustering")
    with pytest.raises(ValueError, match="task_names has 'clustering', and there is no adapters/clustering/adapter_config"):
        ftbert.load(tmp_path)


def test_adapters_in_subfolders(tmp_path: Path) -> None:
    """As PEFT saves several adapters beside their base; also one of another base, which is refused when it is asked for."""
    tasks = ("retrieval_query", "separation")
    theirs = fifth(tmp_path, "eurobert", ".", tasks)
    shutil.copytree(tmp_path / "separation", tmp_path / "checkpoint-10")
    model = ftbert.load(tmp_path)
    assert list(model.checkpoint.tasks) == list(tasks)
    for task in tasks:
        assert_same(model.encode(TEXTS, task=task), want_of(theirs, tmp_path, TEXTS, task, "", last=False))
    assert_same(model.encode_query(TEXTS), model.encode(TEXTS, task="retrieval_query"))
    shutil.copytree(tmp_path / "separation", tmp_path / "classification")
    edit(tmp_path / "classification" / "adapter_config.json", r=5)
    model = ftbert.load(tmp_path)
    with pytest.raises(ValueError, match="the adapter does not fit its base"):
        model.encode(TEXTS, task="classification")
