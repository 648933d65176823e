"""The report's table of batches: what prefix sharing saved, what was sampled, why histories broke."""

import html
from collections.abc import Mapping, Sequence

from schemas.batches import BatchManifest

_COLUMNS = {
    "unique_over_naive": "unique / naive tokens",
    "computed_over_unique": "computed / unique",
    "row_fill": "row fill",
    "faithful_share": "faithful share",
}


def batches_table(manifests: Sequence[BatchManifest]) -> str:
    """A row a batch. Figures that a manifest does not hold are left empty."""
    heads = ("batch", "trained tokens", *_COLUMNS.values(), "sampled tokens by kind", "calls by cause")
    rows = [f"<tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>"]
    for manifest in manifests:
        metrics = manifest.metrics
        numbers = [str(manifest.number), str(manifest.trained_tokens)]
        numbers += [_number(metrics.get(name)) for name in _COLUMNS]
        cells = [f'<td class="number">{number}</td>' for number in numbers]
        cells.append(f"<td>{_parts(metrics.get('sampled_share_by_kind'), '.0%')}</td>")
        cells.append(f"<td>{_parts(metrics.get('calls_by_cause'), '.0f')}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else ""


def _parts(value: object, form: str) -> str:
    """`agent 97%, compaction 3%`; a dash for an empty mapping."""
    if not isinstance(value, Mapping):
        return ""
    return html.escape(", ".join(f"{name} {number:{form}}" for name, number in value.items())) or "–"
