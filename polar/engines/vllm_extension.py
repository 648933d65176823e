"""What runs inside vLLM's workers: the weight-transfer backend `file`.

It plugs into vLLM's own update protocol (/start_weight_update, /update_weights,
/finish_weight_update). Invariant: no parameter changes before the digest of the files was
compared with the one that the trainer published. Importing this module registers the backend;
the server imports it by `--worker-extension-cls polar.engines.vllm_extension.PolarWorkerExtension`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from polar.engines.process_group import end_with_leader
from polar.engines.weight_files import TRANSFER_BACKEND, verified_weight_files


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed upon first."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights lie and what they must be."""

    path: str
    """Folder with *.safetensors under Hugging Face names."""
    sha256: str
    """PolicyPublished.weights_sha256."""


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):  # type: ignore[misc]
    """Loads safetensors files from a folder that the worker can read."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Begin a reload layer by layer: kernels repack their weights once a layer is whole."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: Any) -> None:
        """Overridden: the base class synchronises an accelerator, which a CPU server lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load all tensors. Raises ValueError, with the old weights in place, on another digest."""
        files = verified_weight_files(Path(update_info.path), update_info.sha256)
        self.model.load_weights(_tensors(files))

    def finish_weight_update(self) -> None:
        """End the layer-wise reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, opened.get_tensor(name)


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 (the factory has no test for it)
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, FileTransferEngine)


class PolarWorkerExtension:
    """vLLM mixes this into its workers; naming it makes them import this module."""


end_with_leader()
