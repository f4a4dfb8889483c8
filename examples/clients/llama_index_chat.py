"""llama-index against `ftbert serve chat=MODEL`, on Ollama's routes; prints an answer, whole and as it came."""

import json
import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.ollama import Ollama

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
headers = {"Authorization": "Bearer " + os.environ.get("API_KEY", "none")}
options = {"num_predict": 40}
chat = Ollama(
    base_url=url, headers=headers, model="chat", temperature=0, context_window=512, additional_kwargs=options
)
question = [ChatMessage(role="user", content="Where is Oslo?")]
pieces = [piece.delta or "" for piece in chat.stream_chat(question)]
print(json.dumps([chat.chat(question).message.content, "".join(pieces)]))
