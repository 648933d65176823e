"""The Megatron-Core GRPO trainer: batches in, policies out.

`grpo_loss` is a pure tensor function, `rows` the only conversion from wire values to tensors,
`backend` the only module that drives Megatron, `loop` the only one that talks to the log.
"""

import os

# Read by torch at its first allocation. Each operation of a step allocates tens of megabytes
# anew; with 4 KiB pages the page faults cost more than the arithmetic (measured: elementwise
# operations 4 times, matrix products twice as slow).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
