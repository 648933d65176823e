"""The demo's one-page report: self-contained HTML, no scripts, nothing loaded from elsewhere."""

import html
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polar.demo.batches_table import batches_table
from polar.demo.figures import Series, TreeRun, bar_plot, line_plot, tree_figure
from polar.demo.ledger import depths_while_running, tokens_by_kind
from polar.demo.recorded import Recorded
from schemas.batches import BatchManifest
from schemas.groups import ScoredGroup
from schemas.trajectories import Trajectory

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2em auto;padding:0 1em;color:#1e293b}
h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1em}
figure{margin:0;border:1px solid #e2e8f0;border-radius:8px;padding:.6em}
figcaption{font-weight:600;margin-bottom:.3em}svg{width:100%;height:auto}svg text{font-size:11px;fill:#64748b}
.grid{stroke:#e2e8f0}table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left}
td.number{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b91c1c;font-weight:600}
.tree,.tree ul{list-style:none;padding-left:1.4em;border-left:2px solid #cbd5e1}.tree{border:0;padding:0}
.run{white-space:pre-wrap;font:12px/1.45 ui-monospace,monospace;background:#f8fafc;border:1px solid #e2e8f0;
border-radius:6px;padding:.4em .6em;margin:.3em 0}.count{float:right;color:#94a3b8}mark{background:#fde68a}
"""
_MUST_BE_ZERO = (
    "calls_lost",
    "calls_double",
    "unfaithful_tokens",
    "engine_requests_unexplained",
    "trained_twice",
)


def write_report(path: Path, run: Recorded, summary: Mapping[str, object], *, model: Path | None) -> None:
    """Write the page. `model`: folder with the tokenizer that turns ids into text; none: ids are shown."""
    kinds = tokens_by_kind(run)
    plots = [
        line_plot(
            "Mean reward of each batch, before its training step",
            [Series("reward", [batch.mean_reward or 0.0 for batch in run.manifests])],
            top=1.0,
        ),
        line_plot(
            "Staleness of each batch: policy steps since its oldest sampled token",
            [Series("staleness", [float(_staleness(batch, run.groups)) for batch in run.manifests])],
        ),
        line_plot(
            "READY depth: warm runtimes waiting, at each heartbeat while sessions ran",
            [Series("ready", [float(depth) for depth in depths_while_running(run)])],
            markers=False,
        ),
        bar_plot(
            "Tokens of each batch by kind",
            [
                Series("trained", [kind["trained"] for kind in kinds]),
                Series("context", [kind["context"] for kind in kinds]),
                Series("saved by prefix sharing", [kind["shared"] for kind in kinds]),
            ],
        ),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>polar demo</title>'
        f"<style>{_STYLE}</style></head><body><h1>polar demo: where every token went</h1>"
        f'{_summary_table(summary)}<h2>The run</h2><div class="plots">{"".join(plots)}</div>'
        f"<h2>Batches: sharing, kinds and causes</h2>{batches_table(run.manifests)}"
        f"<h2>One trajectory as its token tree</h2>{_tree(run, model)}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _summary_table(summary: Mapping[str, object]) -> str:
    rows = []
    for name, value in summary.items():
        style = "number bad" if name in _MUST_BE_ZERO and value else "number"
        rows.append(
            f'<tr><td>{html.escape(name)}</td><td class="{style}">{html.escape(str(value))}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _staleness(batch: BatchManifest, groups: Sequence[ScoredGroup]) -> int:
    if batch.policy_version is None:
        return 0
    chosen = set(batch.groups)
    oldest = [
        group.oldest_version.step for group in groups if group.group_id in chosen and group.oldest_version
    ]
    return max(0, batch.policy_version.step - min(oldest)) if oldest else 0


def _tree(run: Recorded, model: Path | None) -> str:
    if not run.trajectories:
        return "<p>No trajectory was recorded.</p>"
    # The one with most runs shows most; the last of them, since the model has learnt by then.
    chosen = max(reversed(run.trajectories), key=lambda item: len(item.tree.parents))
    runs = _runs(chosen, _decoder(model))
    calls = len(chosen.calls)
    title = f"{chosen.session_id}: {calls} calls, sampled tokens marked"
    return tree_figure(title, runs)


def _runs(trajectory: Trajectory, decode: Callable[[list[int]], str]) -> list[TreeRun]:
    tree = trajectory.tree
    parents, starts = tree.parents.tolist(), tree.starts.tolist()
    depth_of = [0] * len(parents)
    for run, parent in enumerate(parents):
        if parent >= 0:
            depth_of[run] = depth_of[parent] + starts[parent + 1] - starts[parent]
    sampled: set[int] = set()
    for call in trajectory.calls:
        run = call.end_run
        while run >= 0:
            for offset in range(starts[run], starts[run + 1]):
                depth = depth_of[run] + offset - starts[run]
                if call.prompt_tokens <= depth < call.prompt_tokens + call.sampled_tokens:
                    sampled.add(offset)
            run = parents[run]
    tokens = tree.tokens.tolist()
    runs = []
    for run, parent in enumerate(parents):
        offsets = range(starts[run], starts[run + 1])
        # Neighbours are decoded together: a character may be made of several tokens.
        parts = [
            (decode([tokens[offset] for offset in group]), is_sampled)
            for is_sampled, group in itertools.groupby(offsets, key=sampled.__contains__)
        ]
        runs.append(TreeRun(parent, len(offsets), parts))
    return runs


def _decoder(model: Path | None) -> Callable[[list[int]], str]:
    """From ids to text."""
    if model is None:
        return lambda ids: "".join(f"{token} " for token in ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
