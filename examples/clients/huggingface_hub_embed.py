"""InferenceClient of huggingface_hub against `ftbert serve MODEL`; prints texts with vectors, then similarities."""

import json
import os
import sys

from huggingface_hub import InferenceClient

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = InferenceClient(url, token=os.environ.get("API_KEY", "none"))
vectors = client.feature_extraction(texts)  # float32 numpy [texts, hidden]
print(json.dumps(dict(zip(texts, vectors.tolist(), strict=True))))
print(json.dumps(client.sentence_similarity(texts[0], texts[1:])))
