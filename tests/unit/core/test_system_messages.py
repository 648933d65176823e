"""System messages for templates that take one, in front."""

import json
from typing import Any

from polar.core.dialects.base import ModelRequest
from polar.core.dialects.chat import ChatDialect
from polar.core.dialects.system_messages import system_first


def request_of(*messages: tuple[str, Any]) -> ModelRequest:
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return ChatDialect().parse_request(json.dumps(body).encode(), {})


def test_a_late_system_message_stays_in_its_place() -> None:
    before = [("system", "Be brief."), ("user", "u"), ("assistant", "a")]
    request = system_first(request_of(*before, ("system", "Time!"), ("user", "v")))
    assert [(m["role"], m["content"]) for m in request.messages] == [
        *before, ("user", "<system>\nTime!\n</system>"), ("user", "v"),
    ]  # fmt: skip
    assert request.notes == ("messages[3]: system is given as user",)


def test_those_in_front_become_one() -> None:
    request = system_first(request_of(("developer", "A"), ("developer", "B"), ("user", "u")))
    assert request.messages == ({"role": "system", "content": "A\nB"}, {"role": "user", "content": "u"})
    assert request.notes == ("messages: 2 system messages in front are one",)


def test_what_needs_no_change_is_the_same_request() -> None:
    for messages in ([("system", "A"), ("user", "u")], [("user", "u")], [("developer", "A")]):
        request = request_of(*messages)
        assert system_first(request) is request
