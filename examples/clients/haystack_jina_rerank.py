"""haystack's Jina ranker against `ftbert serve rank=RERANKER`; prints the query and the ranked texts with scores."""

import json
import os
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.jina import JinaRanker

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
key = Secret.from_token(os.environ.get("API_KEY", "none"))
query = "How many people live in Berlin?"
texts = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums.", "The soup needs salt."]
answer = JinaRanker("rank", key, base_url=f"{url}/v1/rerank").run(query, [Document(content=text) for text in texts])
print(json.dumps([query, [[one.content, one.score] for one in answer["documents"]]]))
