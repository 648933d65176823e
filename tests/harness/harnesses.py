"""The seven harnesses: how each is started, which tools it gives its model, what it does with bad turns."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.script import ToolCall, Turn, tool_call


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a harness."""

    url: str
    """Base URL without /v1; holds the session's key where the harness binds by prefix."""
    key: str
    """API key; a dummy where the URL holds the session's."""
    task: str
    home: Path
    folder: Path
    """The working copy; the harness's tools write here."""
    context_tokens: int = 131072
    """Window that the harness is told of."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What a single test wants otherwise; see the harness's own function."""


Prepared = tuple[list[str], dict[str, str]]
"""(arguments, environment)."""


@dataclass(frozen=True, slots=True)
class Harness:
    """See the module."""

    name: str
    dialect: str
    """As records call it."""
    has_key_in_url: bool
    """The session is bound by URL prefix, not by API key."""
    shell: Callable[[str], ToolCall]
    write: Callable[[Path, str], ToolCall]
    """Absolute path and text of a file."""
    prepare: Callable[[Launch], Prepared]
    ends_by: ToolCall | None = None
    """The tool call that ends a run; else an answer without any does."""
    streams: bool = True
    lingers: bool = False
    """It was seen to say its last word and to stay."""
    drops_bad_turns: bool = False
    """A turn whose tool call is no JSON is taken out of the history, and asked for anew."""

    def last_turn(self, text: str = "All files are there.") -> Turn:
        """The turn after which the run ends."""
        return Turn(text, (self.ends_by,) if self.ends_by else ())


def _codex(launch: Launch) -> Prepared:
    """Options: `config`, further lines at the top of config.toml."""
    home = launch.home / ".codex"
    home.mkdir(parents=True)
    home.joinpath("config.toml").write_text(
        f"""model = "policy"
model_provider = "gateway"
check_for_update_on_startup = false
{launch.options.get("config", "")}
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = "{launch.url}/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
"""
    )
    arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", launch.task]
    return arguments, {"CODEX_HOME": str(home), "GATEWAY_KEY": launch.key}


def _claude(launch: Launch) -> Prepared:
    return ["-p", launch.task, "--dangerously-skip-permissions"], {
        "ANTHROPIC_BASE_URL": launch.url,
        "ANTHROPIC_API_KEY": launch.key,
        "ANTHROPIC_MODEL": "policy",
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(launch.context_tokens),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }


def _qwen(launch: Launch) -> Prepared:
    settings = launch.home / ".qwen"
    settings.mkdir()
    settings.joinpath("settings.json").write_text(json.dumps({"privacy": {"usageStatisticsEnabled": False}}))
    return ["-p", launch.task, "--yolo", "--auth-type", "openai"], {
        "OPENAI_API_KEY": launch.key,
        "OPENAI_BASE_URL": f"{launch.url}/v1",
        "OPENAI_MODEL": "policy",
        "QWEN_TELEMETRY_ENABLED": "false",
    }


def _pi(launch: Launch) -> Prepared:
    home = launch.home / ".pi" / "agent"
    home.mkdir(parents=True)
    model = {
        "id": "policy",
        "name": "policy",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": launch.context_tokens,
        "maxTokens": 4096,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{launch.url}/v1",
        "api": "openai-completions",
        "apiKey": launch.key,
        "models": [model],
    }
    home.joinpath("models.json").write_text(json.dumps({"providers": {"gateway": provider}}))
    environment = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_CODING_AGENT_DIR": str(home)}
    return ["-p", "--provider", "gateway", "--model", "policy", launch.task], environment


def _gemini(launch: Launch) -> Prepared:
    settings = launch.home / ".gemini"
    settings.mkdir()
    settings.joinpath("settings.json").write_text(
        json.dumps(
            {
                "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
                "privacy": {"usageStatisticsEnabled": False},
                "security": {"auth": {"selectedType": "gemini-api-key"}},
            }
        )
    )
    return ["-p", launch.task, "--yolo"], {
        "GEMINI_API_KEY": launch.key,
        "GOOGLE_GEMINI_BASE_URL": launch.url,
        "GEMINI_MODEL": "gemini-2.5-pro",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_SANDBOX": "false",
        "GEMINI_TELEMETRY_ENABLED": "false",
    }


def _opencode(launch: Launch) -> Prepared:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "gateway",
        "options": {"baseURL": f"{launch.url}/v1", "apiKey": launch.key},
        "models": {"policy": {"name": "policy", "limit": {"context": launch.context_tokens, "output": 4096}}},
    }
    config = launch.home / "opencode.json"
    config.write_text(
        json.dumps(
            {
                "autoupdate": False,
                "share": "disabled",
                "model": "gateway/policy",
                "permission": {"*": "allow"},
                "provider": {"gateway": provider},
            }
        )
    )
    return ["run", launch.task], {
        "OPENCODE_CONFIG": str(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }


def _mini(launch: Launch) -> Prepared:
    arguments = ["-y", "--exit-immediately", "-l", "0", "-m", "openai/policy", "-t", launch.task]
    return [*arguments, "-o", str(launch.home / "trajectory.json")], {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(launch.home / "mini"),
        "OPENAI_API_KEY": launch.key,
        "OPENAI_API_BASE": f"{launch.url}/v1",
        "OPENAI_BASE_URL": f"{launch.url}/v1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _written_by_shell(tool: str, argument: str) -> Callable[[Path, str], ToolCall]:
    return lambda path, text: tool_call(tool, **{argument: f"printf %s '{text}' > {path}"})


HARNESSES: dict[str, Harness] = {
    harness.name: harness
    for harness in (
        Harness(
            "codex", "responses", has_key_in_url=False, prepare=_codex,
            shell=lambda command: tool_call("exec_command", cmd=command),
            write=_written_by_shell("exec_command", "cmd"),
        ),
        Harness(
            "claude", "messages", has_key_in_url=False, prepare=_claude,
            shell=lambda command: tool_call("Bash", command=command),
            write=lambda path, text: tool_call("Write", file_path=str(path), content=text),
        ),
        Harness(
            "qwen", "chat", has_key_in_url=False, prepare=_qwen, drops_bad_turns=True, lingers=True,
            shell=lambda command: tool_call("run_shell_command", command=command),
            write=lambda path, text: tool_call("write_file", file_path=str(path), content=text),
        ),
        Harness(
            "pi", "chat", has_key_in_url=True, prepare=_pi,
            shell=lambda command: tool_call("bash", command=command),
            write=lambda path, text: tool_call("write", path=str(path), content=text),
        ),
        Harness(
            "gemini", "google", has_key_in_url=False, prepare=_gemini,
            shell=lambda command: tool_call("run_shell_command", command=command),
            write=lambda path, text: tool_call("write_file", file_path=str(path), content=text),
        ),
        Harness(
            "opencode", "chat", has_key_in_url=True, prepare=_opencode,
            shell=lambda command: tool_call("bash", command=command),
            write=lambda path, text: tool_call("write", filePath=str(path), content=text),
        ),
        Harness(
            "mini", "chat", has_key_in_url=False, prepare=_mini, streams=False, drops_bad_turns=True,
            shell=lambda command: tool_call("bash", command=command),
            write=_written_by_shell("bash", "command"),
            ends_by=tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    )
}  # fmt: skip
