"""ollama against `ftbert serve embed=MODEL`; prints each text with its vector."""

import json
import os
import sys

from ollama import Client

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = Client(url, headers={"Authorization": "Bearer " + os.environ.get("API_KEY", "none")})
answer = client.embed(model="embed", input=texts)
print(json.dumps(dict(zip(texts, answer.embeddings, strict=True))))
