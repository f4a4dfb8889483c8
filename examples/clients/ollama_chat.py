"""ollama against `ftbert serve chat=MODEL`; prints the answer to a question, whole and as it came."""

import json
import os
import sys

from ollama import Client

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
client = Client(url, headers={"Authorization": "Bearer " + os.environ.get("API_KEY", "none")})
messages = [{"role": "user", "content": "Where is Oslo?"}]
options = {"temperature": 0, "num_predict": 40}
whole = client.chat(model="chat", messages=messages, options=options).message.content
pieces = [part.message.content for part in client.chat(model="chat", messages=messages, options=options, stream=True)]
print(json.dumps([whole, "".join(pieces)]))
