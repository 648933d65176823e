"""An agent that looks up a price, calculates and answers; at most three model calls an episode.

A black box to polar: it uses the openai SDK and the standard library and is run as a file. Base
URL and key come from OPENAI_BASE_URL and OPENAI_API_KEY, the episode from POLAR_METADATA
(`{"item", "quantity", "prices"}`). Every answer whose end it received is journalled before it is
used (AGENT_JOURNAL, appended and synced): an auditor compares that with the log.

It writes result.json (`{"answer": number or null}`) and exits 0 however well it did.
"""

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

SYSTEM = "Tools: GET <item>, CALC <expression>. Then reply: ANSWER <number>."
EXAMPLES = (
    ("user", "What is the price of 4 x lamp?"),
    ("assistant", "GET lamp"),
    ("user", "lamp = 12"),
    ("assistant", "CALC 4 * 12"),
    ("user", "Result: 48"),
    ("assistant", "ANSWER 48"),
    ("user", "What is the price of 7 x chair?"),
    ("assistant", "GET chair"),
    ("user", "chair = 21"),
    ("assistant", "CALC 7 * 21"),
    ("user", "Result: 147"),
    ("assistant", "ANSWER 147"),
)
MAX_CALLS = 3
MAX_TOKENS = 12

GET = re.compile(r"GET:?\s+([a-z]+)\.?")
CALC = re.compile(r"CALC:?\s*([0-9]{1,6}) ?\* ?([0-9]{1,6})")
ANSWER = re.compile(r"ANSWER:?\s*([0-9]+)\.?")


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
    # One write of a short line to a file opened for appending is not torn by other agents.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)


def step(reply: str, call: int, prices: dict[str, int]) -> tuple[str | None, int | None]:
    """(next user message, answer) that follow from a reply; (None, None) ends without an answer."""
    text = reply.strip()
    if (match := GET.fullmatch(text)) and call < MAX_CALLS:
        price = prices.get(match[1])
        return (None, None) if price is None else (f"{match[1]} = {price}", None)
    if (match := CALC.fullmatch(text)) and call < MAX_CALLS:
        return f"Result: {int(match[1]) * int(match[2])}", None
    if match := ANSWER.fullmatch(text):
        return None, int(match[1])
    return None, None


def main() -> int:
    """Play one episode."""
    episode = json.loads(os.environ["POLAR_METADATA"])
    client = OpenAI(max_retries=4, timeout=300)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": role, "content": content} for role, content in EXAMPLES]
    turn: str | None = f"What is the price of {episode['quantity']} x {episode['item']}?"
    messages.append({"role": "user", "content": turn})
    answer = None
    for call in range(1, MAX_CALLS + 1):
        response = client.chat.completions.create(
            model=os.environ.get("AGENT_MODEL", "policy"), messages=messages, max_tokens=MAX_TOKENS
        )
        reply = response.choices[0].message.content or ""
        journal(response.id, reply)
        # The model's own text goes back unchanged: other text would be other tokens.
        messages.append({"role": "assistant", "content": reply})
        turn, answer = step(reply, call, episode["prices"])
        if turn is None:
            break
        messages.append({"role": "user", "content": turn})
    Path("result.json").write_text(json.dumps({"answer": answer}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
