"""mistralai against `ftbert serve chat=MODEL`; prints the answer to a question, whole and as it came."""

import json
import os
import sys
from typing import Any

from mistralai.client import Mistral

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = Mistral(api_key=os.environ.get("API_KEY", "none"), server_url=url)
messages = [{"role": "user", "content": "Where is Oslo?"}]
asked: dict[str, Any] = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 40}
whole = client.chat.complete(**asked).choices[0].message.content
pieces = [event.data.choices[0].delta.content or "" for event in client.chat.stream(**asked)]
print(json.dumps([whole, "".join(pieces)]))
