"""One model over several GPUs, from a single process or from a process for each GPU: how similar each text is to the
first.

    python examples/tensor_parallel.py MODEL --device cuda:0,cuda:1 --dtype fp16 TEXT TEXT ...
    torchrun --nproc-per-node 2 examples/tensor_parallel.py MODEL --dtype fp16 TEXT TEXT ...

With torchrun every process makes the same calls and gets the same results; --device cuda is then its own GPU. Without
one, --device cpu,cpu shares the CPU's cores, which shows that it works and is no faster.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed

import ftbert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("texts", metavar="TEXT", nargs="+")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="with commas")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    if distributed.is_torchelastic_launched():
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    device = options.device.split(",") if "," in options.device else options.device
    model = ftbert.load(options.model, device, options.dtype, parallel="tensor")

    vectors = model.encode(options.texts)
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        for text, similarity in zip(options.texts, vectors @ vectors[0], strict=True):
            print(f"{similarity:.4f} {text}")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
