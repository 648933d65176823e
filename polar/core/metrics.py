"""What cores and shells say of themselves: plain numbers, read when somebody asks.

A name is lower case with its unit at the end (`lag_records`, `spool_bytes`). `…_total` only grows
while the process lives; everything else is a gauge. A value that is a mapping has one label with
few values: the name's last word after `_by_` (`splits_by_cause`, `refusals_by_status_total`).
"""

from collections.abc import Mapping

Metrics = Mapping[str, float | Mapping[str, float]]
