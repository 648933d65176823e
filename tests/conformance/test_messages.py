"""Anthropic's SDK, strict, against Messages: whole and streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pydantic
import pytest

from schemas.calls import Delivery
from tests.conformance.scripted import Say, Scripted

WEATHER: Any = {
    "name": "weather", "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
async def client(world: Scripted) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=world.url, api_key=world.key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def ask(client: anthropic.AsyncAnthropic, *, stream: bool, **fields: Any) -> anthropic.types.Message:
    """The final message, whichever way."""
    hello = [{"role": "user", "content": "hi"}]
    request: Any = {"model": "claude-x", "max_tokens": 50, "messages": hello} | fields
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


@both
async def test_text(world: Scripted, client: anthropic.AsyncAnthropic, *, stream: bool) -> None:
    world.say(Say("Grüße, 🦊!"))
    billing = "x-anthropic-billing-header: cc_version=9; cc_is_subagent=true"
    system: Any = [
        {"type": "text", "text": billing},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    message = await ask(client, stream=stream, system=system, stop_sequences=["END"], extra_body={"top_k": 4})
    assert [block.text for block in message.content if block.type == "text"] == ["Grüße, 🦊!"]
    assert (message.stop_reason, message.model) == ("end_turn", "claude-x")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 1, 0)
    assert usage.output_tokens == (5 if stream else 1)
    assert world.sent["messages"] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "hi"},
    ]
    assert (world.sent["max_tokens"], world.sent["stop"]) == (50, ["END"])
    record = await world.record()
    assert (record.dialect, record.untrainable, record.kind) == ("messages", None, "subagent")
    assert record.native_ids["x-anthropic-billing-header"] == "cc_version=9; cc_is_subagent=true"
    assert record.sampling_asked["top_k"] == 4


@both
async def test_parallel_tools_and_their_results(
    world: Scripted, client: anthropic.AsyncAnthropic, *, stream: bool
) -> None:
    world.say(Say("Two.", "Think.", [("weather", '{"city":  "Ulm"}'), ("weather", "")]))
    first = await ask(client, stream=stream, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    thinking, text, one, two = first.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert thinking.type == "thinking"
    assert thinking.thinking == "Think."
    assert (one.type, two.type) == ("tool_use", "tool_use")
    assert one.type == two.type == "tool_use"
    assert (one.id, one.name, one.input, two.input) == ("call-0", "weather", {"city": "Ulm"}, {})

    results = [
        {"type": "text", "text": "Here you are."},
        {"type": "tool_result", "tool_use_id": "call-0", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "call-1", "content": "no", "is_error": True,
         "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    world.say(Say("Rain."))
    history = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "text", "text": "Mind the time."}]},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    second = await ask(client, stream=stream, messages=history, tools=[WEATHER])
    assert second.stop_reason == "end_turn"
    assert world.sent["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Mind the time."},
        {
            "role": "assistant", "content": "Two.", "reasoning": "Think.",
            "tool_calls": [
                {"id": "call-0", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}},
                {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call-0", "content": "rain"},
        {"role": "tool", "tool_call_id": "call-1", "content": "no"},
        {"role": "user", "content": "Here you are."},
    ]  # fmt: skip


@both
async def test_thinking_that_is_not_shown_comes_back(
    world: Scripted, client: anthropic.AsyncAnthropic, *, stream: bool
) -> None:
    world.say(Say("Hello.", "Hidden."))
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    first = await ask(client, stream=stream, thinking=thinking, output_config={"effort": "high"})
    assert world.sent["reasoning_effort"] == "high"
    block = first.content[0]
    assert block.type == "thinking"
    assert block.thinking == ""
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [b.model_dump() for b in first.content]},
        {"role": "user", "content": "more"},
    ]
    await ask(client, stream=stream, messages=history, thinking={"type": "disabled"})
    assert world.sent["messages"][1] == {"role": "assistant", "content": "Hello.", "reasoning": "Hidden."}
    assert world.sent["reasoning_effort"] == "none"


@both
async def test_arguments_that_are_no_json(
    world: Scripted, client: anthropic.AsyncAnthropic, *, stream: bool
) -> None:
    world.say(Say(calls=[("weather", "{'city': 'Ulm'}")]))
    first = await ask(client, stream=stream, tools=[WEATHER])
    call = first.content[0]
    assert call.type == "tool_use"
    assert call.input == {"__unparsedToolInput": {"raw": "{'city': 'Ulm'}", "len": 15}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "bad"}]},
    ]
    await ask(client, stream=stream, messages=history, tools=[WEATHER])
    arguments = world.sent["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == "{'city': 'Ulm'}"


async def test_eager_tools_get_their_input_as_it_comes(
    world: Scripted, client: anthropic.AsyncAnthropic
) -> None:
    world.say(Say(calls=[("weather", '{"city": "Ulm"}')]))

    async def parts(tool: dict[str, Any]) -> list[str]:
        request: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with client.messages.stream(**request, tools=[tool]) as events:
            return [event.partial_json async for event in events if event.type == "input_json"]

    assert await parts(WEATHER) == ['{"city": "Ulm"}']
    assert await parts(WEATHER | {"eager_input_streaming": True}) == ['{"cit', 'y": "', 'Ulm"}']


async def test_deferred_tools_are_offered_once_they_are_found(
    world: Scripted, client: anthropic.AsyncAnthropic
) -> None:
    world.say(Say("ok"))
    search = WEATHER | {"name": "search"}
    tools = [search, WEATHER | {"defer_loading": True}, {"type": "web_search_20250305", "name": "web_search"}]
    await ask(client, stream=False, tools=tools)
    assert [tool["function"]["name"] for tool in world.sent["tools"]] == ["search"]
    assert (await world.record()).notes == (
        "tools[2]: the tool web_search_20250305 is not offered to the model",
    )
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    history: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": found}]},
    ]
    await ask(client, stream=False, messages=history, tools=tools)
    assert [tool["function"]["name"] for tool in world.sent["tools"]] == ["search", "weather"]


@both
async def test_structured_output(world: Scripted, client: anthropic.AsyncAnthropic, *, stream: bool) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    world.say(Say('{"name": "Ulm", "people": 128000}'))
    hello: Any = [{"role": "user", "content": "hi"}]
    if stream:
        async with client.messages.stream(
            model="m", max_tokens=50, messages=hello, output_format=City
        ) as events:
            parsed = (await events.get_final_message()).parsed_output
    else:
        answer = await client.messages.parse(model="m", max_tokens=50, messages=hello, output_format=City)
        parsed = answer.parsed_output
    assert parsed == City(name="Ulm", people=128000)
    assert "people" in json.dumps(world.sent["response_format"]["json_schema"]["schema"])
    assert (await world.record()).untrainable == "constrained_sampling"


@both
@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (Say("half", finish="length"), ("max_tokens", None)),
        (Say("to the", finish="stop", stop_reason="END"), ("stop_sequence", "END")),
        (Say("gone", finish="abort"), ("max_tokens", None)),
    ],
    ids=["limit", "stop-string", "abort"],
)
async def test_reasons_to_stop(
    world: Scripted,
    client: anthropic.AsyncAnthropic,
    say: Say,
    expected: tuple[str, str | None],
    *,
    stream: bool,
) -> None:
    world.say(say)
    message = await ask(client, stream=stream)
    assert (message.stop_reason, message.stop_sequence) == expected


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
        ({"type": "none"}, "none"),
        ({"type": "auto", "disable_parallel_tool_use": True}, None),
    ],
)
async def test_tool_choice(world: Scripted, client: anthropic.AsyncAnthropic, choice: Any, sent: Any) -> None:
    world.say(Say("", calls=[("weather", "{}"), ("weather", "{}")]))
    message = await ask(client, stream=True, tools=[WEATHER], tool_choice=choice)
    assert world.sent.get("tool_choice") == sent
    assert len(message.content) == (1 if "disable_parallel_tool_use" in choice else 2)


async def test_errors(world: Scripted, client: anthropic.AsyncAnthropic) -> None:
    world.refuse(400, "This model maximum context length is 4096 tokens, your prompt has 5000")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5000 tokens > 4096 maximum"):
        await ask(client, stream=False)
    world.refuse(429, "busy")
    with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as limited:
        await ask(client, stream=False)
    assert limited.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type 'hologram'"):
        await ask(client, stream=False, messages=[{"role": "user", "content": [{"type": "hologram"}]}])
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        await ask(client.with_options(api_key="sk-wrong"), stream=False)


async def test_a_stream_that_breaks_ends_in_an_error_event(
    world: Scripted, client: anthropic.AsyncAnthropic
) -> None:
    world.break_off(Say(calls=[("weather", '{"city": "Ulm"}')]), after=4)
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        await ask(client, stream=True)
    assert (await world.record()).delivery is Delivery.UPSTREAM_ERROR


async def test_images_reach_the_engine(world: Scripted, client: anthropic.AsyncAnthropic) -> None:
    world.say(Say("A fox."))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    content = [image, {"type": "text", "text": "What is it?"}]
    await ask(client, stream=False, messages=[{"role": "user", "content": content}])
    assert world.sent["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "What is it?"},
    ]


async def test_models_and_counts(world: Scripted, client: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("any-name")).id == "any-name"
    hello: Any = [{"role": "user", "content": "hi"}]
    counted = await client.messages.count_tokens(
        model="m", messages=hello, system="Be brief.", tools=[WEATHER]
    )
    assert counted.input_tokens == 4
    assert world.engine.counted[-1]["tools"][0]["function"]["name"] == "weather"
