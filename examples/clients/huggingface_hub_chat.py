"""huggingface_hub against `ftbert serve chat=MODEL`; prints the answer to a question, whole and as it came."""

import json
import os
import sys
from typing import Any

from huggingface_hub import InferenceClient

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = InferenceClient(base_url=url, api_key=os.environ.get("API_KEY"))
messages = [{"role": "user", "content": "Where is Oslo?"}]
asked: dict[str, Any] = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 40}
whole = client.chat_completion(**asked, stream=False).choices[0].message.content
pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**asked, stream=True)]
print(json.dumps([whole, "".join(pieces)]))
