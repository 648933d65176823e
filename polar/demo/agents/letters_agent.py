"""An agent that always makes two streamed model calls; its score is the share of letters a-m.

For tests with a model of random weights: every episode has something to train, whatever the
model says. A black box to polar like shop_agent.py; result.json is `{"answers": [text, text]}`.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_TOKENS = 12


def journal(response_id: str, content: str) -> None:
    """Note that the end of an answer arrived; on disk when this returns."""
    path = os.environ.get("AGENT_JOURNAL")
    if not path:
        return
    line = json.dumps(
        {
            "session": os.environ.get("POLAR_SESSION_ID", ""),
            "response_id": response_id,
            "content_sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
    )
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)


def ask(client: OpenAI, messages: list[Any]) -> str:
    """One streamed answer, journalled once its end has arrived."""
    pieces, response_id = [], ""
    stream: Any = client.chat.completions.create(
        model=os.environ.get("AGENT_MODEL", "policy"), messages=messages, max_tokens=MAX_TOKENS, stream=True
    )
    for chunk in stream:
        response_id = chunk.id or response_id
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
    reply = "".join(pieces)
    journal(response_id, reply)
    return reply


def main() -> int:
    """Two calls, the second on top of the first."""
    episode = json.loads(os.environ["POLAR_METADATA"])
    client = OpenAI(max_retries=4, timeout=300)
    messages: list[Any] = [{"role": "user", "content": f"Write letters, please: {episode['seed_word']}"}]
    answers = [ask(client, messages)]
    messages += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "More, please."}]
    answers.append(ask(client, messages))
    Path("result.json").write_text(json.dumps({"answers": answers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
