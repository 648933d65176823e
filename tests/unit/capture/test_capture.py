"""`polar capture`: an agent command behind a throw-away session, its calls as an archive."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from polar.archive.folder import open_archive, read_events
from polar.core.harness_environment import UNSET, gateway_environment
from schemas.calls import CallRecord, SessionOpened, SessionSealed
from schemas.sessions import Outcome
from schemas.topics import CALLS
from tests.unit.gateway.fake_engine import FakeEngine, running_engine

AGENT = """
import json, os, sys, urllib.request
def ask(url, body, **headers):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
key = os.environ["OPENAI_API_KEY"]
assert key == os.environ["ANTHROPIC_API_KEY"] == os.environ["GEMINI_API_KEY"]
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
chat = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    {"model": "gpt", "temperature": 0.3, "messages": [{"role": "user", "content": "hi"}]},
    authorization="Bearer " + key)
print(chat["choices"][0]["message"]["content"])
messages = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
    {"model": "claude", "max_tokens": 32000, "messages": [{"role": "user", "content": "hi"}]},
    **{"x-api-key": key})
print(messages["content"][0]["text"])
google = ask(os.environ["GOOGLE_GEMINI_BASE_URL"] + "/v1beta/models/gemini:generateContent",
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, **{"x-goog-api-key": key})
print(google["candidates"][0]["content"]["parts"][0]["text"])
sys.exit(int(sys.argv[1]))
"""


async def polar(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polar.cli.main", *arguments, env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def events_of(folder: Path) -> tuple[SessionOpened, list[CallRecord], SessionSealed]:
    opened, *calls, sealed = [record.event for record in read_events(folder, CALLS)]
    assert isinstance(opened, SessionOpened)
    assert isinstance(sealed, SessionSealed)
    assert sealed.calls == len(calls)
    return opened, [call for call in calls if isinstance(call, CallRecord)], sealed


async def test_every_dialects_calls_are_kept_with_ids(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    status, out, err = await polar(
        "capture", "--upstream", f"{engine.url}/v1", "--to", str(folder), "--json", "--temperature", "0.7",
        "--", sys.executable, "-c", AGENT, "0", ANTHROPIC_AUTH_TOKEN="mine",
    )  # fmt: skip
    assert status == 0, err
    *said, line = out.splitlines()
    assert said == ["ok"] * 3
    opened, calls, sealed = events_of(folder)
    assert opened.trainable
    assert sealed.outcome is Outcome.COMPLETED
    assert [call.dialect for call in calls] == ["chat", "messages", "google"]
    assert all(call.untrainable is None and len(call.sampled_ids) == 3 for call in calls)
    assert {call.sampling_used["temperature"] for call in calls} == {0.7}
    assert {body["model"] for body in engine.requests} == {"policy"}
    value = json.loads(line)
    assert (value["records"], len(value["calls"]), value["exit_status"]) == (5, 3, 0)
    assert value["calls"][0]["answer"] == "ok"
    assert "sk-polar" not in out + err
    # It is an archive as any other, and its trees can be looked at.
    assert open_archive(folder).counts()["calls.v1"] == 5
    status, out, err = await polar(
        "trajectories", "show", opened.session_id, "--from", str(folder), "--restitch", "--json"
    )
    assert status == 0, err
    assert len(json.loads(out)["trajectories"]) == 1


async def test_an_upstream_without_ids_serves_and_nothing_of_it_is_trained(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.complete_ids = False
    folder = tmp_path / "kept"
    status, out, err = await polar(
        "capture", "--upstream", engine.url, "--to", str(folder), "--key-env", "UPSTREAM_KEY",
        "--", sys.executable, "-c", AGENT, "3", UPSTREAM_KEY="secret-of-upstream",
    )  # fmt: skip
    assert status == 3  # the command's own
    assert out.splitlines() == ["ok"] * 3
    assert "cannot be trained" in err
    opened, calls, sealed = events_of(folder)
    assert not opened.trainable
    assert sealed.outcome is Outcome.AGENT_ERROR
    assert {call.untrainable for call in calls} == {"session_not_trainable"}
    assert calls[0].sampling_used["temperature"] == 0.3
    assert {header["authorization"] for header in engine.headers} == {"Bearer secret-of-upstream"}
    # Fields that hosted services refuse are not sent to it.
    assert all({"return_token_ids", "top_k", "logprobs"}.isdisjoint(body) for body in engine.requests)
    assert "secret-of-upstream" not in err


async def test_the_agents_own_sampling_on_wish(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    status, _, err = await polar(
        "capture", "--upstream", engine.url, "--to", str(folder), "--as-asked",
        "--", sys.executable, "-c", AGENT, "0",
    )  # fmt: skip
    assert status == 0, err
    _, calls, _ = events_of(folder)
    assert calls[0].sampling_used["temperature"] == 0.3
    assert {call.untrainable for call in calls} == {"session_not_trainable"}
    assert len(calls[0].sampled_ids) == 3


async def test_what_is_wrong_is_said(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_engine() as gone:
        url = gone.url
    status, _, err = await polar("capture", "--upstream", url, "--to", str(tmp_path / "a"), "--", "true")
    assert (status, "--upstream" in err) == (3, True)
    engine.models = ["a", "b"]
    arguments = ("capture", "--upstream", engine.url, "--to")
    status, _, err = await polar(*arguments, str(tmp_path / "b"), "--", "true")
    assert (status, "--model" in err) == (3, True)
    engine.models = ["policy"]
    status, _, err = await polar(*arguments, str(tmp_path / "c"), "--", "no-such-program-here")
    assert (status, "no such program" in err) == (3, True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    status, _, err = await polar(*arguments, str(tmp_path / "full"), "--", "true")
    assert (status, "not empty" in err) == (2, True)


async def test_a_capture_that_is_ended_is_an_archive_all_the_same(engine: FakeEngine, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "polar.cli.main", "capture", "--upstream", engine.url, "--to", str(folder),
        "--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    _, calls, sealed = events_of(folder)
    assert calls == []
    assert sealed.outcome is Outcome.AGENT_ERROR


def test_the_environment_keeps_what_a_person_set_about_proxies() -> None:
    set_by = gateway_environment("http://127.0.0.1:1/", "sk-polar-x", {"NO_PROXY": "corp.example"})
    assert set_by["NO_PROXY"] == set_by["no_proxy"] == "corp.example,127.0.0.1,localhost"
    assert set_by["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert set_by["ANTHROPIC_BASE_URL"] == set_by["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1"
    assert set_by.keys().isdisjoint(UNSET)
