"""Steps and memory of fine-tuning before and after `ftbert.norm.patch`.

    python benchmarks/bench_norm_training.py --device cuda [--out FILE]      a minute on an H100
    python benchmarks/bench_norm_training.py --quick                         small models, on the CPU

BERT-base for classification, 32x128 tokens under bf16 autocast, and eight layers of Llama's shape, hidden 2048, 4,096
tokens in bf16: transformers' models with random weights, eager, AdamW. The original and its patched copies take turns;
losses of the first steps are compared. "saved": distinct memory that autograd holds for the backward pass, parameters
left out; "kept", "peak": what a GPU's allocator has above weights and the optimizer's state, between the passes and at
most. The memory-efficient mode has to save norms x tokens x hidden x bytes on the Llama, within 2 %.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import attempt, gpu_events, log, provenance, results_file, write  # noqa: E402
from norm_timing import requested_bytes  # noqa: E402
from norm_training_report import AFTER, BEFORE, EFFICIENT, failures, lines_of  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from ftbert import norm  # noqa: E402

WAYS: dict[str, bool | str | None] = {BEFORE: None, AFTER: False, EFFICIENT: True, "after patch, auto": "auto"}
LOSSES = 8
Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Task:
    """promised: bytes that the memory-efficient mode saves."""

    name: str
    model: nn.Module
    loss: Loss
    autocast: bool
    promised: int | None = None


def bert(device: torch.device, quick: bool) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    batch, seq = (2, 16) if quick else (32, 128)
    small = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    model = BertForSequenceClassification(small if quick else BertConfig())
    ids, labels = torch.randint(1000, 30000, (batch, seq), device=device), torch.arange(batch, device=device) % 2
    shape = "small BERT" if quick else "BERT-base"
    return Task(f"{shape}, {batch}x{seq}, bf16 autocast", model, lambda m: m(ids, labels=labels).loss, True)


def llama(device: torch.device, quick: bool) -> Task:
    from transformers import LlamaConfig, LlamaModel

    hidden, layers, batch, seq = (64, 2, 2, 16) if quick else (2048, 8, 2, 2048)
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, intermediate_size=hidden * 11 // 4, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaModel(config).bfloat16()
    model.score = nn.Linear(hidden, 1, bias=False, dtype=torch.bfloat16)
    ids, target = torch.randint(0, 32000, (batch, seq), device=device), torch.randn(batch, seq, device=device)

    def loss(m: Any) -> Tensor:
        return nn.functional.mse_loss(m.score(m(ids).last_hidden_state)[..., 0].float(), target)

    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    name = f"{layers} layers of Llama's shape, hidden {hidden}, {batch}x{seq}, bf16"
    return Task(name, model, loss, False, norms * batch * seq * hidden * 2)


class Trained:
    """A copy of a task's model with its optimizer."""

    def __init__(self, task: Task, memory_efficient: bool | str | None, device: torch.device) -> None:
        self.task, self.device = task, device
        self.model = copy.deepcopy(task.model).to(device).train()
        if memory_efficient is not None:
            norm.patch(self.model, memory_efficient=memory_efficient)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, fused=device.type == "cuda")

    def forward(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16) if self.task.autocast else nullcontext():
            return self.task.loss(self.model)

    def step(self) -> Tensor:
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def losses(self) -> list[float]:
        """Of the first steps, without dropout of hidden states: torch draws other masks for bf16 than for the float32
        that its own LayerNorm gives under autocast."""
        torch.manual_seed(0)  # of attention's dropout
        dropouts = [module for module in self.model.modules() if isinstance(module, nn.Dropout)]
        for module in dropouts:
            module.eval()
        found = [float(self.step()) for _ in range(LOSSES)]
        for module in dropouts:
            module.train()
        return found

    def seconds(self, steps: int) -> float:
        self.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - began) / steps

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory(self) -> dict[str, int]:
        """Bytes of a step, after others."""
        saved: dict[int, int] = {}

        def count(value: Tensor) -> Tensor:
            storage = value.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
            loss = self.forward()
        held = {value.untyped_storage().data_ptr() for value in (*self.model.parameters(), *self.model.buffers())}
        found = {"saved_bytes": sum(size for at, size in saved.items() if at not in held)}
        del loss
        if self.device.type == "cuda":
            self.synchronize()
            before, _ = requested_bytes(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            loss = self.forward()
            found["kept_bytes"] = requested_bytes(self.device)[0] - before
            loss.backward()  # type: ignore[no-untyped-call]
            found["peak_bytes"] = requested_bytes(self.device)[1] - before
            self.optimizer.zero_grad(set_to_none=True)
        return found


def measure(task: Task, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Each way's losses, memory and milliseconds of a step; on a GPU also of its kernels alone."""
    rows: dict[str, dict[str, Any]] = {}
    ready: dict[str, Trained] = {}
    for way, memory_efficient in WAYS.items():
        found = attempt(lambda value=memory_efficient: Trained(task, value, device))
        facts = found if isinstance(found, str) else attempt(lambda one=found: {"losses": one.losses()} | one.memory())
        rows[way] = {"failed": facts} if isinstance(facts, str) else facts
        if not isinstance(facts, str):
            ready[way] = found
    times: dict[str, list[float]] = {way: [] for way in ready}
    for _ in range(rounds):
        for way, trained in ready.items():
            times[way].append(trained.seconds(steps))
    for way, trained in ready.items():
        rows[way]["step_ms"] = 1e3 * statistics.median(times[way])
        if device.type == "cuda":
            events = attempt(lambda one=trained: gpu_events(one.step))
            rows[way]["kernels_ms"] = events if isinstance(events, str) else sum(event["dur"] for event in events) / 1e3
    result: dict[str, Any] = {"name": task.name, "ways": rows}
    if task.promised:
        result["promised_bytes"] = task.promised
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="in each round")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/norm-training-DEVICE.json, "
                        "with --quick out/bench-norm-training-DEVICE.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    rounds, steps = (3, 1) if options.quick else (options.rounds, options.steps)
    device = torch.device(options.device)
    out = options.out or results_file(f"norm-training-{device.type}", not options.quick)
    document: dict[str, Any] = {"provenance": provenance(device, "bf16", rounds=rounds), "results": []}
    words: list[str] = []
    for make in (bert, llama):
        torch.manual_seed(0)
        with device:  # weights are drawn there
            task = make(device, options.quick)
        result = measure(task, device, rounds, steps)
        document["results"].append(result)
        print("\n".join(("", *lines_of(result))), flush=True)
        words += [f"{result['name']}: {word}" for word in failures(result)]
        write(out, document)
    for word in words:
        print(f"FAILED {word}")
    log(f"wrote {out}")
    return int(bool(words))


if __name__ == "__main__":
    sys.exit(main())
