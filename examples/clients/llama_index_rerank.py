"""llama-index's reranker for TEI against `ftbert serve RERANKER`; prints the query and the ranked texts with scores."""

import json
import os
import sys

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
query = "How many people live in Berlin?"
texts = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums.", "The soup needs salt."]
token = f"Bearer {os.environ.get('API_KEY', 'none')}"  # unlike the embeddings, it does not add "Bearer"
reranker = TextEmbeddingInference(base_url=url, top_n=3, auth_token=token)
ranked = reranker.postprocess_nodes([NodeWithScore(node=TextNode(text=text)) for text in texts], query_str=query)
print(json.dumps([query, [[node.text, node.score] for node in ranked]]))
