"""What runs inside vLLM's workers: the weight-transfer backend `file`.

It plugs into vLLM's own update protocol (/start_weight_update, /update_weights,
/finish_weight_update). All work is done in the middle step. vLLM's recipe strips the model of its
weights in the first one, and an update that fails then leaves an engine that dies at the next
token. Invariant: no parameter changes before the files were found to be what the trainer
published, with the names and shapes that this model has.

Importing this module registers the backend; the server's workers import it because of
`--worker-extension-cls polar.engines.vllm_extension.PolarWorkerExtension`.
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
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from polar.engines.process_group import end_with_leader
from polar.engines.weight_files import (
    TRANSFER_BACKEND,
    check_same_layout,
    tensor_shapes,
    verified_weight_files,
)


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
        """The model stays whole until receive_weights has checked everything."""

    def update_weights(self, update_info: Any) -> None:
        """Overridden: the base class synchronises an accelerator, which a CPU server lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Replace all weights.

        Raises ValueError, with the old weights in place, when the files are not those that were
        published or belong to another model.
        """
        files = verified_weight_files(Path(update_info.path), update_info.sha256)
        base = Path(self.model_config.model)
        if base.is_dir():
            check_same_layout(tensor_shapes(base), tensor_shapes(Path(update_info.path)))
        # Layer by layer: kernels repack their weights once all of a layer's tensors are there.
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(_tensors(files))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied_output_layers(self.model)

    def finish_weight_update(self) -> None:
        """vLLM names the new version after this."""

    def shutdown(self) -> None:
        """Nothing is held."""


def _repack_tied_output_layers(model: torch.nn.Module) -> None:
    """An output layer tied to the embedding has no tensor of its own in the files, so vLLM's reload
    passes it by, while its CPU kernel holds a packed copy of the old embedding: pack it again."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, opened.get_tensor(name)


class PolarWorkerExtension:
    """vLLM mixes this into its workers; naming it makes them import this module."""


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 (there is no public test)
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, FileTransferEngine)
end_with_leader()
