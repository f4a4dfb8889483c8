"""voyageai against `ftbert serve embed=MODEL`; prints each text's vector, then its int8 vector."""

import json
import os
import sys

from voyageai import Client

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = Client(api_key=os.environ.get("API_KEY", "none"), base_url=f"{url}/v1")
for number in ("float", "int8"):
    answer = client.embed(texts, model="embed", input_type="document", output_dtype=number)
    print(json.dumps(dict(zip(texts, answer.embeddings, strict=True))))
