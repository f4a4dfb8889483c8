"""langchain-openai against `ftbert serve chat=MODEL`; prints the answer to a question, whole and as it came."""

import json
import os
import sys

from langchain_openai import ChatOpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key=os.environ.get("API_KEY", "none"), model="chat", temperature=0, max_tokens=40
)
question = "Where is Oslo?"
print(json.dumps([chat.invoke(question).content, "".join(piece.content for piece in chat.stream(question))]))
