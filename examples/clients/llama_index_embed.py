"""llama-index's embeddings for TEI against `ftbert serve MODEL`; prints each text with its vector."""

import json
import os
import sys

from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
embedder = TextEmbeddingsInference(model_name="embed", base_url=url, auth_token=os.environ.get("API_KEY", "none"))
print(json.dumps(dict(zip(texts, embedder.get_text_embedding_batch(texts), strict=True))))
