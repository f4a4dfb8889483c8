"""mistralai against `ftbert serve embed=MODEL`; prints each text's vector, then its int8 vector."""

import json
import os
import sys

from mistralai.client import Mistral

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = Mistral(api_key=os.environ.get("API_KEY", "none"), server_url=url)
for number in ("float", "int8"):
    answer = client.embeddings.create(model="embed", inputs=texts, output_dtype=number)
    print(json.dumps({texts[one.index]: one.embedding for one in answer.data}))
