"""OpenAI's SDK, strict, against Responses: whole and streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from schemas.calls import Delivery
from tests.conformance.scripted import Say, Scripted

WEATHER: Any = {
    "type": "function", "name": "weather", "description": "d", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
PATCH: Any = {
    "type": "custom", "name": "patch", "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"},
}  # fmt: skip
AGENTS: Any = {
    "type": "namespace", "name": "agents", "description": "d",
    "tools": [{"type": "function", "name": "spawn", "description": "d", "parameters": {"type": "object"}}],
}  # fmt: skip
SHELL: Any = {"type": "local_shell"}


@pytest.fixture
async def client(world: Scripted) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{world.url}/v1", api_key=world.key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    """The final response, whichever way."""
    request = {"model": "gpt-x", "input": "hi", "store": False} | fields
    if not stream:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as events:
        seen = [event.type async for event in events]
        assert seen[0] == "response.created"
        assert seen[-1] in ("response.completed", "response.incomplete")
        return await events.get_final_response()


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@both
async def test_text(world: Scripted, client: openai.AsyncOpenAI, *, stream: bool) -> None:
    world.say(Say("Grüße, 🦊!"))
    response = await ask(client, stream=stream, instructions="Be brief.", max_output_tokens=50)
    assert response.output_text == "Grüße, 🦊!"
    assert (response.status, response.model, response.created_at) == ("completed", "gpt-x", 1700000000)
    assert response.usage.input_tokens == 4
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert world.sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert world.sent["max_tokens"] == 50
    record = await world.record()
    assert (record.dialect, record.delivery, record.untrainable) == ("responses", Delivery.DELIVERED, None)
    assert record.answer["content"] == "Grüße, 🦊!"


@both
async def test_parallel_tools_and_their_results(
    world: Scripted, client: openai.AsyncOpenAI, *, stream: bool
) -> None:
    world.say(Say("Two.", "Think.", [("weather", '{"city": "Ulm"}'), ("weather", '{"city": "Rom"}')]))
    first = await ask(client, stream=stream, tools=[WEATHER], include=["reasoning.encrypted_content"])
    reasoning, message, one, two = first.output
    assert [part.text for part in reasoning.summary] == ["Think."]
    assert message.content[0].text == "Two."
    assert (one.call_id, one.name, json.loads(one.arguments)) == ("call-0", "weather", {"city": "Ulm"})
    assert two.arguments == '{"city": "Rom"}'

    # The summary may be gone: what comes back sealed is enough.
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    history += [item.model_dump() for item in first.output]
    history[1]["summary"] = []
    part = {"type": "input_text", "text": "sun"}
    history += [
        {"type": "function_call_output", "call_id": "call-0", "output": "rain"},
        {"type": "function_call_output", "call_id": "call-1", "output": [part]},
    ]
    world.say(Say("Rain and sun."))
    second = await ask(client, stream=stream, input=history, tools=[WEATHER])
    assert second.output_text == "Rain and sun."
    assert world.sent["messages"] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant", "content": "Two.", "reasoning": "Think.",
            "tool_calls": [
                {"id": "call-0", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
                {"id": "call-1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city": "Rom"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "call-0", "content": "rain"},
        {"role": "tool", "tool_call_id": "call-1", "content": "sun"},
    ]  # fmt: skip
    function = {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert world.sent["tools"] == [{"type": "function", "function": function}]


@both
async def test_tools_that_are_no_functions_for_the_harness(
    world: Scripted, client: openai.AsyncOpenAI, *, stream: bool
) -> None:
    world.say(
        Say(
            calls=[
                ("patch", '{"input": "*** Begin\\n"}'),
                ("agents__spawn", "{}"),
                ("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
                ("patch", "no JSON"),
            ]
        )
    )
    tools = [PATCH, AGENTS, SHELL, {"type": "web_search"}]
    response = await ask(client, stream=stream, tools=tools)
    custom, spawn, shell, broken = response.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", "*** Begin\n")
    assert (spawn.type, spawn.name, spawn.namespace) == ("function_call", "spawn", "agents")
    assert (shell.action.command, shell.action.timeout_ms) == (["ls", "-l"], 5)
    assert broken.input == "no JSON"
    offered = {tool["function"]["name"]: tool["function"] for tool in world.sent["tools"]}
    assert list(offered) == ["patch", "agents__spawn", "local_shell"]
    assert "start: /x+/" in offered["patch"]["description"]
    assert (await world.record()).notes == ("tools[3]: the tool web_search is not offered to the model",)

    history = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in response.output)]
    history.append({"type": "custom_tool_call_output", "call_id": "call-0", "output": "done"})
    history.append({"type": "local_shell_call_output", "call_id": "call-2", "output": "total 0"})
    await ask(client, stream=stream, input=history, tools=tools)
    _, turn, patched, listed = world.sent["messages"]
    assert [call["function"]["name"] for call in turn["tool_calls"]] == [
        "patch", "agents__spawn", "local_shell", "patch",
    ]  # fmt: skip
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin\n"}
    assert json.loads(turn["tool_calls"][2]["function"]["arguments"])["command"] == ["ls", "-l"]
    assert (patched["tool_call_id"], listed["content"]) == ("call-0", "total 0")


@both
async def test_structured_output(world: Scripted, client: openai.AsyncOpenAI, *, stream: bool) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    world.say(Say('{"name": "Ulm", "people": 128000}'))
    request: Any = {"model": "gpt-x", "input": "hi", "text_format": City}
    if stream:
        async with client.responses.stream(**request) as events:
            response = await events.get_final_response()
    else:
        response = await client.responses.parse(**request)
    assert response.output_parsed == City(name="Ulm", people=128000)
    shape = world.sent["response_format"]
    assert (shape["type"], shape["json_schema"]["name"]) == ("json_schema", "City")
    assert (await world.record()).untrainable == "constrained_sampling"


@both
async def test_an_answer_cut_by_its_limit(
    world: Scripted, client: openai.AsyncOpenAI, *, stream: bool
) -> None:
    world.say(Say("half", finish="length"))
    request: Any = {"model": "gpt-x", "input": "hi"}
    if stream:
        last = [event async for event in await client.responses.create(**request, stream=True)][-1]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = await client.responses.create(**request)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_errors(world: Scripted, client: openai.AsyncOpenAI) -> None:
    world.refuse(400, "This model maximum context length is 4096 tokens, your prompt has 5000")
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        await ask(client, stream=False)
    assert caught.value.code == "context_length_exceeded"
    world.refuse(429, "busy", Retry_After="7")
    with pytest.raises(openai.RateLimitError) as limited:
        await ask(client, stream=False)
    assert limited.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.BadRequestError, match="hologram") as unknown:
        await ask(client, stream=False, input=[{"type": "hologram"}])
    assert unknown.value.param == "input[0].type"
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        await ask(client, stream=False, previous_response_id="resp_1")
    wrong = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        await ask(wrong, stream=False)


async def test_a_stream_that_breaks_ends_as_failed(world: Scripted, client: openai.AsyncOpenAI) -> None:
    world.break_off(Say(calls=[("weather", '{"city": "Ulm"}')]), after=4)
    events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert not any(event.type in ("response.completed", "response.output_item.done") for event in events)
    record = await world.record()
    assert record.delivery is Delivery.UPSTREAM_ERROR
    assert record.sampled_ids.tolist() == [10, 11, 12, 13]


async def test_tokens_are_counted_by_the_engine(world: Scripted, client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model="m", input="hi", instructions="Be brief.")
    assert counted.input_tokens == 4
    assert world.engine.counted[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert world.gateway.log.calls() == []


async def test_a_websocket_is_refused_so_that_codex_posts(world: Scripted) -> None:
    headers = {"Authorization": f"Bearer {world.key}", "Upgrade": "websocket", "Connection": "Upgrade"}
    async with world.gateway.http.get(f"{world.url}/v1/responses", headers=headers) as response:
        assert response.status == 426


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", None),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            "required",
        ),
    ],
)
async def test_tool_choice(world: Scripted, client: openai.AsyncOpenAI, choice: Any, sent: Any) -> None:
    world.say(Say("", calls=[("weather", "{}"), ("weather", "{}")]))
    response = await ask(
        client, stream=False, tools=[WEATHER, PATCH], tool_choice=choice, parallel_tool_calls=False
    )
    assert world.sent.get("tool_choice") == sent
    assert len(response.output) == 1
    forced = sent is not None and sent != "none"
    assert (await world.record()).untrainable == ("constrained_sampling" if forced else None)


async def test_images_reach_the_engine(world: Scripted, client: openai.AsyncOpenAI) -> None:
    world.say(Say("A fox."))
    image: Any = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
    text: Any = {"type": "input_text", "text": "What is it?"}
    call: Any = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "a", "output": [image]}
    await ask(client, stream=False, input=[{"role": "user", "content": [image, text]}, call, output])
    seen = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    user, _, result = world.sent["messages"]
    assert user["content"] == [seen, {"type": "text", "text": "What is it?"}]
    assert result["content"] == [seen]
