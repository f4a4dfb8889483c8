"""haystack's embedders for TEI against `ftbert serve MODEL`; prints each text and the query with its vector."""

import json
import os
import sys

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
texts, query = ["A cat sits outside.", "A man plays the guitar.", "The new movie is great."], "Where is the cat?"
token = Secret.from_token(os.environ.get("API_KEY", "none"))
kind, where = "text_embeddings_inference", {"url": url}
of_documents = HuggingFaceAPIDocumentEmbedder(kind, where, token, normalize=True, progress_bar=False)
of_query = HuggingFaceAPITextEmbedder(kind, where, token, normalize=True)
documents = of_documents.run([Document(content=text) for text in texts])["documents"]
found = {document.content: document.embedding for document in documents} | {query: of_query.run(query)["embedding"]}
print(json.dumps(found))
