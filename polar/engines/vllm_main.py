"""vLLM's API server, started with polar's few arrangements: the server process's entry point.

    python -m polar.engines.vllm_main ARGUMENTS OF vllm serve

Run by polar.engines.vllm_server in a process group of its own.
"""

import os

from polar.engines.process_group import announce_leader


def main() -> None:
    """Serve until SIGTERM."""
    announce_leader()
    # Before anything imports transformers: it reads this once.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    if os.environ.get("POLAR_TRY_FORK"):
        from vllm.platforms.cpu import CpuPlatform

        original = CpuPlatform.check_and_update_config.__func__

        def patched(cls, config):
            original(cls, config)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

        CpuPlatform.check_and_update_config = classmethod(patched)
    serve()


if __name__ == "__main__":
    main()
