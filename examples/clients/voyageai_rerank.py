"""voyageai against `ftbert serve rank=RERANKER`; prints the query and the ranked texts with scores."""

import json
import os
import sys

from voyageai import Client

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
query = "How many people live in Berlin?"
texts = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums.", "The soup needs salt."]
client = Client(api_key=os.environ.get("API_KEY", "none"), base_url=f"{url}/v1")
answer = client.rerank(query, texts, model="rank")
print(json.dumps([query, [[one.document, one.relevance_score] for one in answer.results]]))
