"""OpenAI's SDK, strict, against Chat Completions: whole and streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest

from schemas.calls import Delivery
from tests.conformance.scripted import Say, Scripted

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HELLO: Any = [{"role": "user", "content": "hi"}]
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
async def client(world: Scripted) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{world.url}/v1", api_key=world.key, max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, *, stream: bool, **fields: Any) -> Any:
    """The final completion, whichever way."""
    request = {"model": "gpt-x", "messages": HELLO} | fields
    if not stream:
        return await client.chat.completions.create(**request)
    async with client.chat.completions.stream(**request) as events:
        return await events.get_final_completion()


@both
async def test_text_and_usage(world: Scripted, client: openai.AsyncOpenAI, *, stream: bool) -> None:
    world.say(Say("Grüße, 🦊!", "Think."))
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    completion = await ask(client, stream=stream, **fields)
    assert completion.choices[0].message.content == "Grüße, 🦊!"
    assert completion.choices[0].message.reasoning == "Think."
    assert (completion.choices[0].finish_reason, completion.model) == ("stop", "gpt-x")
    assert completion.usage.prompt_tokens_details.cached_tokens == 1
    assert (await world.record()).answer["content"] == "Grüße, 🦊!"


@both
async def test_parallel_tools_and_their_results(
    world: Scripted, client: openai.AsyncOpenAI, *, stream: bool
) -> None:
    world.say(Say("Two.", "", [("weather", '{"city": "Ulm"}'), ("weather", "no JSON")]))
    first = await ask(client, stream=stream, tools=[WEATHER])
    message = first.choices[0].message
    assert [(call.id, call.function.arguments) for call in message.tool_calls] == [
        ("call-0", '{"city": "Ulm"}'),
        ("call-1", "no JSON"),
    ]
    assert first.choices[0].finish_reason == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": "call-0", "content": [{"type": "text", "text": "rain"}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "bad"},
    ]
    await ask(client, stream=stream, messages=[*HELLO, message.model_dump(), *results], tools=[WEATHER])
    _, turn, one, _ = world.sent["messages"]
    assert {name for name, value in turn.items() if value} == {"role", "content", "tool_calls"}
    assert turn["tool_calls"][1]["function"]["arguments"] == "no JSON"
    assert one["content"] == "rain"


@both
async def test_structured_output(world: Scripted, client: openai.AsyncOpenAI, *, stream: bool) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    world.say(Say('{"name": "Ulm", "people": 128000}'))
    if stream:
        completion = await ask(client, stream=True, response_format=City)
    else:
        completion = await client.chat.completions.parse(model="m", messages=HELLO, response_format=City)
    assert completion.choices[0].message.parsed == City(name="Ulm", people=128000)
    assert "people" in json.dumps(world.sent["response_format"])
    assert (await world.record()).untrainable == "constrained_sampling"


@both
async def test_several_choices(world: Scripted, client: openai.AsyncOpenAI, *, stream: bool) -> None:
    world.say(Say("one"), Say("two"))
    completion = await ask(client, stream=stream, n=2)
    assert {choice.index: choice.message.content for choice in completion.choices} == {0: "one", 1: "two"}
    assert len(world.gateway.log.calls()) == 2


async def test_errors(world: Scripted, client: openai.AsyncOpenAI) -> None:
    world.refuse(400, "This model maximum context length is 4096 tokens, your prompt has 5000")
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
        await ask(client, stream=False)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="must be text or a list of parts") as broken:
        await ask(client, stream=True, messages=[{"role": "user", "content": 5}])
    assert broken.value.param == "messages[0].content"
    with pytest.raises(openai.AuthenticationError):
        await ask(client.with_options(api_key="sk-wrong"), stream=False)
    with pytest.raises(openai.NotFoundError, match="serves"):
        await client.completions.create(model="m", prompt="hi")


async def test_a_stream_that_breaks_ends_in_an_error(world: Scripted, client: openai.AsyncOpenAI) -> None:
    world.break_off(Say("half an answer"), after=4)
    with pytest.raises(openai.APIError, match="broke off"):
        await ask(client, stream=True)
    assert (await world.record()).delivery is Delivery.UPSTREAM_ERROR
