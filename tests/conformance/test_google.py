"""Google's SDK against generateContent: whole and streamed."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pydantic
import pytest
from google import genai
from google.genai import errors, types

from schemas.calls import Delivery
from tests.conformance.scripted import Say, Scripted

WEATHER = types.FunctionDeclaration(
    name="weather",
    description="d",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"city": types.Schema(type=types.Type.STRING, nullable=True)},
    ),
)
TOOLS = [types.Tool(function_declarations=[WEATHER])]
NO_LOOP = types.AutomaticFunctionCallingConfig(disable=True)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def client_of(world: Scripted, **options: Any) -> genai.Client:
    http = types.HttpOptions(base_url=world.url, **options)
    return genai.Client(api_key=world.key, http_options=http)


@pytest.fixture
async def client(world: Scripted) -> AsyncIterator[genai.Client]:
    client = client_of(world)
    yield client
    await client.aio.aclose()
    client.close()


class Answer:
    """What a client put together, streamed or not."""

    def __init__(self, responses: list[types.GenerateContentResponse]) -> None:
        self.responses = responses
        self.parts = [
            part
            for response in responses
            for candidate in response.candidates or ()
            if candidate.index in (0, None) and candidate.content
            for part in candidate.content.parts or ()
        ]
        self.text = "".join(part.text or "" for part in self.parts if not part.thought)
        self.thoughts = "".join(part.text or "" for part in self.parts if part.thought)
        self.calls = [part.function_call for part in self.parts if part.function_call]
        self.last = responses[-1]

    @property
    def finish(self) -> Any:
        assert self.last.candidates
        return self.last.candidates[0].finish_reason


async def ask(client: genai.Client, *, stream: bool, contents: Any = "hi", **config: Any) -> Answer:
    options = types.GenerateContentConfig(automatic_function_calling=NO_LOOP, **config)
    if not stream:
        return Answer(
            [await client.aio.models.generate_content(model="gemini-x", contents=contents, config=options)]
        )
    events = await client.aio.models.generate_content_stream(
        model="gemini-x", contents=contents, config=options
    )
    return Answer([event async for event in events])


@both
@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_text(world: Scripted, version: str, *, stream: bool) -> None:
    client = client_of(world, api_version=version)
    world.say(Say("Grüße, 🦊!", "Think."))
    thinking = types.ThinkingConfig(include_thoughts=True, thinking_budget=8192)
    answer = await ask(
        client, stream=stream, system_instruction="Be brief.", max_output_tokens=50, top_k=4,
        stop_sequences=["END"], thinking_config=thinking,
    )  # fmt: skip
    assert (answer.text, answer.thoughts, answer.finish) == ("Grüße, 🦊!", "Think.", "STOP")
    usage = answer.last.usage_metadata
    assert usage
    assert (usage.prompt_token_count, usage.cached_content_token_count) == (4, 1)
    assert answer.last.model_version == "gemini-x"
    assert world.sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert (world.sent["max_tokens"], world.sent["stop"]) == (50, ["END"])
    assert "reasoning_effort" not in world.sent
    record = await world.record()
    assert (record.dialect, record.stream, record.untrainable) == ("google", stream, None)
    assert record.sampling_asked["top_k"] == 4
    hidden = await ask(client, stream=stream, thinking_config=types.ThinkingConfig(thinking_budget=0))
    assert world.sent["reasoning_effort"] == "none"
    assert (hidden.text, hidden.thoughts) == ("Grüße, 🦊!", "")
    await client.aio.aclose()
    client.close()


@both
async def test_parallel_tools_and_their_results(
    world: Scripted, client: genai.Client, *, stream: bool
) -> None:
    world.say(Say("Two.", "Think.", [("weather", '{"city":  "Ulm"}'), ("weather", "")]))
    first = await ask(client, stream=stream, tools=TOOLS)
    assert first.text.strip() == "Two."
    assert [(call.id, call.name, call.args) for call in first.calls] == [
        ("call-0", "weather", {"city": "Ulm"}),
        ("call-1", "weather", {}),
    ]
    function = world.sent["tools"][0]["function"]
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"]["city"] == {"type": ["string", "null"]}

    # As an SDK's chat keeps a stream: a content a chunk; and as harnesses do, without ids.
    history: list[Any] = [types.Content(role="user", parts=[types.Part(text="hi")])]
    for part in first.parts:
        if part.function_call:
            part.function_call.id = None
        history.append(types.Content(role="model", parts=[part]))
    results = [
        types.Part.from_function_response(name="weather", response={"output": "rain"}),
        types.Part.from_function_response(name="weather", response={"error": "no such city"}),
        types.Part(text="Here you are."),
    ]
    history.append(types.Content(role="user", parts=results))
    world.say(Say("Rain."))
    second = await ask(client, stream=stream, contents=history, tools=TOOLS)
    assert second.text == "Rain."
    _, turn, one, two, more = world.sent["messages"]
    assert (turn["content"].strip(), turn["reasoning"]) == ("Two.", "Think.")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == ['{"city":"Ulm"}', "{}"]
    assert [one["tool_call_id"], two["tool_call_id"]] == [call["id"] for call in turn["tool_calls"]]
    assert (one["content"], json.loads(two["content"])) == ("rain", {"error": "no such city"})
    assert more == {"role": "user", "content": "Here you are."}


@both
async def test_arguments_that_are_no_json(world: Scripted, client: genai.Client, *, stream: bool) -> None:
    world.say(Say(calls=[("weather", "{'city'")]))
    first = await ask(client, stream=stream, tools=TOOLS)
    assert first.calls[0].args == {"__unparsedToolInput": {"raw": "{'city'", "len": 7}}
    history = [types.Content(role="user", parts=[types.Part(text="hi")])]
    history.append(types.Content(role="model", parts=[first.parts[0]]))
    history.append(
        types.Content(
            role="user",
            parts=[types.Part.from_function_response(name="weather", response={"output": "bad"})],
        )
    )
    await ask(client, stream=stream, contents=history, tools=TOOLS)
    assert world.sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{'city'"


@both
async def test_structured_output(world: Scripted, client: genai.Client, *, stream: bool) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    world.say(Say('{"name": "Ulm", "people": 128000}'))
    answer = await ask(client, stream=stream, response_mime_type="application/json", response_schema=City)
    assert City.model_validate_json(answer.text) == City(name="Ulm", people=128000)
    if not stream:
        assert answer.last.parsed == City(name="Ulm", people=128000)
    schema = world.sent["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["people"]["type"] == "integer"
    assert (await world.record()).untrainable == "constrained_sampling"


@both
@pytest.mark.parametrize(
    ("finish", "expected"), [("length", "MAX_TOKENS"), ("abort", "OTHER"), ("stop", "STOP")]
)
async def test_reasons_to_finish(
    world: Scripted, client: genai.Client, finish: str, expected: str, *, stream: bool
) -> None:
    world.say(Say("half", finish=finish))
    assert (await ask(client, stream=stream)).finish == expected


@both
async def test_several_candidates(world: Scripted, client: genai.Client, *, stream: bool) -> None:
    world.say(Say("one"), Say("two", calls=[("weather", "{}")]))
    answer = await ask(client, stream=stream, candidate_count=2)
    assert world.sent["n"] == 2
    seen: dict[int, str] = {}
    for response in answer.responses:
        for candidate in response.candidates or ():
            assert candidate.content
            text = "".join(part.text or "" for part in candidate.content.parts or ())
            index = candidate.index or 0
            seen[index] = seen.get(index, "") + text
    assert seen == {0: "one", 1: "two"}
    assert len(world.gateway.log.calls()) == 2


@pytest.mark.parametrize(
    ("mode", "allowed", "sent"),
    [
        ("ANY", None, "required"),
        ("ANY", ["weather"], {"type": "function", "function": {"name": "weather"}}),
        ("NONE", None, "none"),
        ("AUTO", None, None),
    ],
)
async def test_tool_choice(world: Scripted, client: genai.Client, mode: str, allowed: Any, sent: Any) -> None:
    world.say(Say(calls=[("weather", "{}")]))
    calling = types.FunctionCallingConfig(mode=mode, allowed_function_names=allowed)
    await ask(
        client, stream=True, tools=[*TOOLS, types.Tool(google_search=types.GoogleSearch())],
        tool_config=types.ToolConfig(function_calling_config=calling),
    )  # fmt: skip
    assert world.sent.get("tool_choice") == sent
    (note,) = (await world.record()).notes
    assert note.endswith("the tool googleSearch is not offered to the model")


async def test_errors(world: Scripted, client: genai.Client) -> None:
    world.refuse(400, "This model maximum context length is 4096 tokens, your prompt has 5000")
    with pytest.raises(errors.ClientError, match=r"token count \(5000\) exceeds") as caught:
        await ask(client, stream=False)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    world.refuse(429, "busy", Retry_After="7")
    with pytest.raises(errors.ClientError, match=r"retryDelay.*7s") as limited:
        await ask(client, stream=True)
    assert (limited.value.code, limited.value.status) == (429, "RESOURCE_EXHAUSTED")
    world.refuse(500, "boom")
    with pytest.raises(errors.ServerError, match="boom"):
        await ask(client, stream=False)
    wrong = genai.Client(api_key="sk-wrong", http_options=types.HttpOptions(base_url=world.url))
    with pytest.raises(errors.ClientError) as refused:
        await ask(wrong, stream=False)
    assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
    await wrong.aio.aclose()
    wrong.close()


@pytest.mark.parametrize("after", [1, 4], ids=["before-a-word", "in-the-text"])
async def test_a_stream_that_breaks_ends_in_an_error(
    world: Scripted, client: genai.Client, after: int
) -> None:
    world.break_off(Say("half an answer"), after=after)
    with pytest.raises(errors.ServerError, match="broke off"):
        await ask(client, stream=True)
    assert (await world.record()).delivery is Delivery.UPSTREAM_ERROR


async def test_images_reach_the_engine(world: Scripted, client: genai.Client) -> None:
    world.say(Say("A fox."))
    parts = [types.Part.from_bytes(data=b"\0\0\0", mime_type="image/png"), types.Part(text="What is it?")]
    await ask(client, stream=False, contents=[types.Content(role="user", parts=parts)])
    assert world.sent["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "What is it?"},
    ]


async def test_models_and_counts(world: Scripted, client: genai.Client) -> None:
    assert [model.name async for model in await client.aio.models.list()] == ["models/policy"]
    assert (await client.aio.models.get(model="any-name")).name == "models/any-name"
    assert (await client.aio.models.count_tokens(model="m", contents="hi")).total_tokens == 3
    assert world.engine.counted[-1]["messages"] == [{"role": "user", "content": "hi"}]


async def test_the_key_may_stand_in_the_query_and_nothing_but_data_is_streamed(world: Scripted) -> None:
    world.say(Say("ok"))
    url = f"{world.url}/v1beta/models/m:streamGenerateContent?alt=sse&key={world.key}"
    async with world.gateway.http.post(url, json={"contents": [{"parts": [{"text": "hi"}]}]}) as response:
        data = await response.read()
    assert response.status == 200
    assert all(line.startswith(b"data: {") for line in data.split(b"\n\n")[:-1])
    async with world.gateway.http.post(f"{world.url}/v1beta/models/m:predict", json={}) as response:
        assert response.status == 405
        assert (await response.json())["error"]["code"] == 405
