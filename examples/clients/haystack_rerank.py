"""haystack's ranker for TEI against `ftbert serve RERANKER`; prints the query and the ranked texts with scores."""

import json
import os
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
query = "How many people live in Berlin?"
texts = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums.", "The soup needs salt."]
ranker = HuggingFaceTEIRanker(url=url, token=Secret.from_token(os.environ.get("API_KEY", "none")))
ranked = ranker.run(query, [Document(content=text) for text in texts])["documents"]
print(json.dumps([query, [[document.content, document.score] for document in ranked]]))
