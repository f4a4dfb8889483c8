"""Peers of the benchmark (peers.py) that are runtimes of their own, on the CPU; `RUNTIMES` lists them."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from peers import Batch, Call, Peer
from torch import Tensor


class OnnxFloat(Peer):
    """The transformers model through torch.onnx with dynamic axes."""

    name = "onnxruntime fp32"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32,)
    needs = "onnxruntime"

    def setup(self, reference: Any) -> None:
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self.threads
            self.session = onnxruntime.InferenceSession(
                str(self.model_file(reference, Path(folder))), options, providers=["CPUExecutionProvider"]
            )

    def model_file(self, reference: Any, folder: Path) -> Path:
        return export_onnx(reference, folder / "model.onnx")

    def prepare(self, batch: Batch) -> Call:
        feed = {"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()}
        return lambda: torch.from_numpy(self.session.run(None, feed)[0])


class OnnxInt8(OnnxFloat):
    """Dynamic quantisation of every matrix product, int8 weights by channel."""

    name = "onnxruntime int8"
    dtypes = (*Peer.dtypes, torch.int8)
    tolerance = None

    def model_file(self, reference: Any, folder: Path) -> Path:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        target = folder / "int8.onnx"
        quantize_dynamic(
            export_onnx(reference, folder / "model.onnx"), target, weight_type=QuantType.QInt8, per_channel=True
        )
        return target


class OpenVino(Peer):
    name = "OpenVINO fp32"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32,)
    needs = "openvino"
    precision = "f32"

    def setup(self, reference: Any) -> None:
        import openvino

        with tempfile.TemporaryDirectory() as folder:
            config = {"INFERENCE_PRECISION_HINT": self.precision, "INFERENCE_NUM_THREADS": self.threads}
            exported = openvino.Core().read_model(export_onnx(reference, Path(folder, "model.onnx")))
            model = self.network(exported, reference)
            self.compiled = openvino.Core().compile_model(model, "CPU", config | {"PERFORMANCE_HINT": "LATENCY"})

    def network(self, exported: Any, reference: Any) -> Any:  # noqa: ARG002
        """What is compiled of the exported model."""
        return exported

    def prepare(self, batch: Batch) -> Call:
        feed = {"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()}
        return lambda: torch.from_numpy(self.compiled(feed)[0])


class OpenVinoBf16(OpenVino):
    name = "OpenVINO bf16"
    dtypes = (torch.bfloat16,)
    precision = "bf16"


class CTranslate2(Peer):
    """Drops padding on the CPU too; its own kernels and oneDNN or MKL."""

    name = "CTranslate2 fp32"
    needs = "ctranslate2"
    computes: ClassVar[str] = "float32"

    def setup(self, reference: Any) -> None:
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            from transformers import BertTokenizerFast  # type: ignore[attr-defined]

            reference.save_pretrained(Path(folder, "model"))
            config = Path(folder, "model", "config.json")  # the converter asks for what transformers no longer writes
            entries = json.loads(config.read_text(encoding="utf-8")) | {"position_embedding_type": "absolute"}
            config.write_text(json.dumps(entries), encoding="utf-8")
            words = [f"w{i}" for i in range(reference.config.vocab_size - 5)]  # the converter wants a tokenizer
            vocab = Path(folder, "vocab.txt")
            vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
            BertTokenizerFast(vocab=str(vocab)).save_pretrained(Path(folder, "model"))
            converter = ctranslate2.converters.TransformersConverter(str(Path(folder, "model")))
            converter.convert(str(Path(folder, "ct2")))
            self.encoder = ctranslate2.Encoder(
                str(Path(folder, "ct2")), device="cpu", compute_type=self.computes, intra_threads=self.threads
            )

    def prepare(self, batch: Batch) -> Call:
        import ctranslate2
        import numpy as np

        ids = ctranslate2.StorageView.from_array(batch.ids.int().numpy())
        lengths = ctranslate2.StorageView.from_array(np.asarray(batch.lengths, dtype=np.int32))
        return lambda: torch.from_numpy(np.array(self.encoder.forward_batch(ids, lengths).last_hidden_state))


def export_onnx(reference: Any, path: Path) -> Path:
    """input_ids and attention_mask int64 [batch, seq] -> last_hidden_state, both axes free."""

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = reference

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            out: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return out

    ids, mask = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    axes = {0: "batch", 1: "seq"}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), open(os.devnull, "w") as silence, torch.no_grad():
        warnings.simplefilter("ignore")
        from contextlib import redirect_stdout

        with redirect_stdout(silence):
            # The exporter that traces: the newer one needs a further package and gives the same graph here.
            torch.onnx.export(
                Hidden().eval(), (ids, mask), str(path), input_names=["input_ids", "attention_mask"],
                output_names=["last_hidden_state"], opset_version=17, dynamo=False,
                dynamic_axes={"input_ids": axes, "attention_mask": axes, "last_hidden_state": axes},
            )  # fmt: skip
    return path


RUNTIMES: tuple[type[Peer], ...] = (OnnxFloat, OnnxInt8, OpenVino, OpenVinoBf16, CTranslate2)
