"""langchain-huggingface against `ftbert serve MODEL`; prints each text with its vector."""

import json
import os
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings

url, key = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080", os.environ.get("API_KEY", "none")
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
embeddings = HuggingFaceEndpointEmbeddings()
# It refuses a URL for `model`; its clients take one.
embeddings.client = InferenceClient(url, token=key)
embeddings.async_client = AsyncInferenceClient(url, token=key)
print(json.dumps(dict(zip(texts, embeddings.embed_documents(texts), strict=True))))
