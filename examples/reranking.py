"""Order documents by how well they answer a query, with Qwen3-Reranker: a language model that says "yes" or "no".

    python examples/reranking.py Qwen/Qwen3-Reranker-0.6B

The argument: a folder or hub id, of this or another language model. `ftbert serve` takes the template from the folder:

    ftbert convert Qwen/Qwen3-Reranker-0.6B reranker
    python examples/reranking.py --template > reranker/chat_template.jinja
    ftbert serve reranker
"""

from __future__ import annotations

import sys

import ftbert

# As published: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
QWEN3_RERANKER = """\
{%- macro of(role) %}{{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}{% endmacro -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ of("system") or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ of("query") }}
<Document>: {{ of("document") }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""


def main(folder: str, query: str = "What is the capital of China?") -> None:
    documents = ["Beijing has been the capital of China for most of 800 years.", "Tea is grown on the hills of Fujian."]
    model = ftbert.load(folder)
    for one in model.rerank(query, documents, chat_template=QWEN3_RERANKER, return_documents=True):
        print(f"{one['score']:.4f}  {one['text']}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--template":
        print(QWEN3_RERANKER)
    else:
        main(*sys.argv[1:])
