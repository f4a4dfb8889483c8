"""openai's client for Azure against `ftbert serve embed=MODEL`; prints each text with its vector."""

import json
import os
import sys

from openai import AzureOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = AzureOpenAI(azure_endpoint=url, api_version="2024-10-21", api_key=os.environ.get("API_KEY", "none"))
answer = client.embeddings.create(model="embed", input=texts)
print(json.dumps({texts[one.index]: one.embedding for one in answer.data}))
