"""The report's table of batches."""

from polar.demo.batches_table import batches_table
from tests.unit.demo.recorded_run import manifest


def test_a_row_a_batch_with_what_its_manifest_says() -> None:
    told = manifest(3).model_copy(
        update={
            "metrics": {
                "unique_over_naive": 0.25, "row_fill": 0.9911, "calls": 4.0,
                "sampled_share_by_kind": {"agent": 0.75, "compaction": 0.25},
                "calls_by_cause": {"thinking_stripped": 2.0},
            }
        }
    )  # fmt: skip
    table = batches_table([manifest(2), told])
    silent, row = table.split("<tr>")[2:]
    assert silent.count("<td") == row.count("<td") == 8
    assert silent.count('"number"></td>') == 4
    for cell in ("0.250", "0.991", "agent 75%, compaction 25%", "thinking_stripped 2"):
        assert f">{cell}</td>" in row


def test_no_cause_is_a_dash() -> None:
    told = manifest().model_copy(update={"metrics": {"calls_by_cause": {}}})
    assert "<td>–</td>" in batches_table([told])
