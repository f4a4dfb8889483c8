"""openai against `ftbert serve chat=MODEL`; prints the answer to a question, whole and as it came."""

import json
import os
import sys
from typing import Any

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("API_KEY", "none"))
messages = [{"role": "user", "content": "Where is Oslo?"}]
asked: dict[str, Any] = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 40}
whole = client.chat.completions.create(**asked).choices[0].message.content
pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
print(json.dumps([whole, "".join(pieces)]))
