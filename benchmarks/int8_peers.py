"""The peers of a run in int8 on the CPU, beside onnxruntime (runtimes.py), and ours in wider types beside them."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from peers import EIGHT_BITS_LIMIT, Batch, Call, Ftbert, Peer
from quantized import calibration_batches
from runtimes import CTranslate2, OpenVino
from torch import Tensor

_networks: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()


class FtbertFp32(Ftbert):
    """In a run in int8, the same without it."""

    name = "ftbert, fp32"
    devices = ("cpu",)
    dtypes = (torch.int8,)
    wider: ClassVar[torch.dtype] = torch.float32

    def setup(self, reference: Any) -> None:
        self.dtype = self.wider
        super().setup(reference)


class FtbertBf16(FtbertFp32):
    name = "ftbert, bf16"
    wider = torch.bfloat16


class TorchInt8(Peer):
    """Weights by row, what a product reads by tensor and dynamic."""

    name = "torch dynamic int8"
    dtypes = (torch.int8,)
    tolerance = None

    def setup(self, reference: Any) -> None:
        from torch.ao import quantization

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, in favour of a package of its own
            self.model = quantization.quantize_dynamic(
                copy.deepcopy(reference), {torch.nn.Linear: quantization.per_channel_dynamic_qconfig}, torch.qint8
            )

    def prepare(self, batch: Batch) -> Call:
        return lambda: self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state


class OpenVinoInt8(OpenVino):
    """NNCF's quantization after training: SmoothQuant, fixed scales, corrected biases. calibration: ids and masks of
    batches; None: those of random tokens that our model is quantized with."""

    name = "OpenVINO int8"
    dtypes = (torch.int8,)
    needs = "nncf"
    tolerance = EIGHT_BITS_LIMIT
    calibration: ClassVar[Sequence[tuple[Tensor, Tensor]] | None] = None

    def network(self, exported: Any, reference: Any) -> Any:
        if reference not in _networks:
            _networks[reference] = self.quantized(exported, self.calibration or calibration_batches(reference))
        return _networks[reference]

    def quantized(self, exported: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> Any:
        import nncf

        nncf.set_log_level(logging.ERROR)
        feeds = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()} for ids, mask in batches]
        with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
            return nncf.quantize(
                exported, nncf.Dataset(feeds), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(feeds)
            )


class OpenVinoInt8Bf16(OpenVinoInt8):
    """What is not in int8 is in bf16: OpenVINO's own choice where the CPU multiplies it."""

    name = "OpenVINO int8, bf16"
    precision = "bf16"


class CTranslate2Int8(CTranslate2):
    """Weights by row, what a product reads by token and dynamic, all else in float32."""

    name = "CTranslate2 int8"
    dtypes = (torch.int8,)
    tolerance = EIGHT_BITS_LIMIT
    computes = "int8_float32"


INT8_PEERS: tuple[type[Peer], ...] = (
    FtbertFp32, FtbertBf16, TorchInt8, OpenVinoInt8, OpenVinoInt8Bf16, CTranslate2Int8,
)  # fmt: skip
