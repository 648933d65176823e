"""Environment variables by which agent programs find their gateway, whichever API they speak."""

from collections.abc import Mapping

UNSET = (
    "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
    "ANTHROPIC_AUTH_TOKEN",
    "GOOGLE_API_KEY",
    "GOOGLE_GENAI_USE_VERTEXAI",
)
"""Variables of a person's own account, which would go before a session's key or beside it."""


def gateway_environment(url: str, key: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Base URLs and keys for OpenAI's, Anthropic's and Google's clients.

    `url`: the gateway's, without path. `inherited`: what the program gets besides; its list of
    hosts without a proxy is kept and extended.
    """
    base = url.rstrip("/")
    no_proxy = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    hosts = ",".join(filter(None, (no_proxy, "127.0.0.1", "localhost")))
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": key,
        "POLAR_BASE_URL_PREFIXED": f"{base}/s/{key}/v1",
        "NO_PROXY": hosts,
        "no_proxy": hosts,
    }
