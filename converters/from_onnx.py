"""fp32 ONNX export of a BERT-family model -> ftbert checkpoint folder.

python -m ftbert.converters.from_onnx SRC DST      SRC: an .onnx file, or a folder with one
"""

from __future__ import annotations

import argparse
import sys

from ftbert.converters.from_huggingface import convert
from ftbert.converters.onnx_source import find_onnx


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert an fp32 ONNX export to an ftbert checkpoint folder.")
    parser.add_argument("source", help=".onnx file, or a folder with one")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace an existing target")
    options = parser.parse_args(arguments)
    try:
        path = find_onnx(options.source)
        if path is None:
            raise ValueError(f"{options.source}: expected an .onnx file, or a folder with one")
        print(convert(path, options.target, force=options.force))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
