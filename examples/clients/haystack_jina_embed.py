"""haystack's Jina embedder against `ftbert serve embed=MODEL`; prints each text with its vector."""

import json
import os
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
key = Secret.from_token(os.environ.get("API_KEY", "none"))
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
where = f"{url}/v1/embeddings"
embedder = JinaDocumentEmbedder(key, "embed", base_url=where, task="retrieval.passage", progress_bar=False)
answer = embedder.run([Document(content=text) for text in texts])
print(json.dumps({one.content: one.embedding for one in answer["documents"]}))
