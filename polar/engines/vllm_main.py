"""vLLM's API server, started with polar's few arrangements: the server process's entry point.

    python -m polar.engines.vllm_main ARGUMENTS OF vllm serve

Run by polar.engines.vllm_server in a process group of its own.
"""

import os
from typing import Any

from polar.engines.process_group import announce_leader


def main() -> None:
    """Serve until SIGTERM."""
    announce_leader()
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _fork_the_engine_core(current_platform)
    serve()


def _fork_the_engine_core(platform: Any) -> None:
    """Start the engine core by fork, as vLLM does on GPUs, not by spawn.

    A spawned one imports everything again: 15 s on two cores. vLLM's CPU platform wants spawn for
    the thread binding of workers, which polar does not use (see launch_environment).
    """
    choose = platform.check_and_update_config

    def choose_fork(vllm_config: Any) -> None:
        choose(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = staticmethod(choose_fork)


if __name__ == "__main__":
    main()
