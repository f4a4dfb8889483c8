"""cohere's second API against `ftbert serve embed=MODEL`; prints each text's vector, then its int8 vector."""

import json
import os
import sys

from cohere import ClientV2

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
client = ClientV2(os.environ.get("API_KEY", "none"), base_url=url)
answer = client.embed(model="embed", input_type="search_document", texts=texts, embedding_types=["float", "int8"])
for vectors in (answer.embeddings.float_, answer.embeddings.int8):
    print(json.dumps(dict(zip(texts, vectors, strict=True))))
