"""langchain-openai against `ftbert serve embed=MODEL`; prints each text with its vector."""

import json
import os
import sys

from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."]
key = SecretStr(os.environ.get("API_KEY", "none"))
# Without check_embedding_ctx_length=False it sends the token ids of OpenAI's models.
embeddings = OpenAIEmbeddings(model="embed", base_url=f"{url}/v1", api_key=key, check_embedding_ctx_length=False)
print(json.dumps(dict(zip(texts, embeddings.embed_documents(texts), strict=True))))
