"""cohere's second API against `ftbert serve rank=RERANKER`; prints the query and the ranked texts with scores."""

import json
import os
import sys

from cohere import ClientV2

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
query = "How many people live in Berlin?"
texts = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums.", "The soup needs salt."]
client = ClientV2(os.environ.get("API_KEY", "none"), base_url=url)
answer = client.rerank(model="rank", query=query, documents=texts)
print(json.dumps([query, [[texts[one.index], one.relevance_score] for one in answer.results]]))
