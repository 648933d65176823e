"""`polar trajectories` on an archive: the tree, the causes, and what is not there."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from polar.archive.folder import MANIFEST, ArchiveManifest
from polar.archive.segments import write_segment
from polar.cli.exits import Exit
from polar.cli.main import main
from polar.cli.trajectory_tree import print_tree
from polar.core.stage import Partition
from polar.core.stitching import stitch
from polar.kafka.records import RawRecord
from schemas.base import Event, encode
from schemas.topics import CALLS, TRAJECTORIES, TopicSpec
from schemas.trajectories import Trajectory
from tests.unit.core.call_records import SessionRecords


def session(member: int) -> SessionRecords:
    """Two calls; the second one's prompt has other ids for the first answer."""
    records = SessionRecords(f"shop-1/{member}/0/1")
    history = [{"role": "user", "content": f"price of {'a very long word ' * 9}"}]
    mark = {"native_ids": {"harness": "pi"}, "model_asked": "policy"}
    records.call(
        [1, 2], [3, 4], messages=history, answer={"role": "assistant", "content": "GET carrot"}, **mark
    )
    records.call(
        [1, 2, 34, 5],
        [6],
        base=1,
        messages=[
            *history,
            {"role": "assistant", "content": "GET carrot"},
            {"role": "tool", "content": "21"},
        ],
        answer={"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}, "odd"]},
        **mark,
    )
    return records


def old_tree(records: SessionRecords) -> Trajectory:
    """A trajectory as another version of the stitcher may have made it."""
    made = stitch(records.opened, records.records, records.sealed())
    return made.model_copy(update={"reason": "made by an older stitcher"})


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    sessions = [session(0), session(1)]
    made: list[tuple[TopicSpec, list[Event]]] = [
        (CALLS, [event for each in sessions for event in (each.opened, *each.records, each.sealed())]),
        (TRAJECTORIES, [repeated for each in sessions for repeated in [old_tree(each)] * 2]),
    ]
    segments = []
    for topic, events in made:
        partition = Partition(topic.suffix, 0)
        raws = [
            RawRecord(partition, offset, topic.key_of(event).encode(), encode(event))
            for offset, event in enumerate(events)
        ]
        segments.append(write_segment(folder, partition, raws))
    manifest = ArchiveManifest("p", 1, 1, tuple(segments))
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return folder


def polar(archive: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["trajectories", *arguments, "--from", str(archive)])
    return int(ended.value.code or 0)


def test_a_tree_shows_branches_tokens_causes_and_texts(archive: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert polar(archive, "show", "shop-1/0/0/1") == Exit.OK
    shown = capsys.readouterr().out
    assert "2 calls, 3 branches, 7 tokens (9 one call at a time, 1.3 ×): 4 context, 3 agent" in shown
    assert "leaves #1 at token 2, in message 1: retokenized (equal messages, other ids)" in shown
    assert "→: GET carrot" in shown
    assert "→: look(…) ?(…)" in shown
    assert "causes: retokenized 1" in shown
    assert "…" in next(line for line in shown.splitlines() if "user:" in line)


def test_a_deep_tree_keeps_its_lines_whole(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    records = SessionRecords()
    for depth in range(1, 41):
        records.call([*range(depth), 1000 + depth], [7])
    print_tree(stitch(records.opened, records.records, records.sealed()), 0)
    lines = capsys.readouterr().out.splitlines()
    assert sum("#" in line and line.endswith("+ 1 tokens") for line in lines) == 40


def test_texts_can_be_left_out(archive: Path, capsys) -> None:
    assert polar(archive, "show", "shop-1/0/0/1", "--text", "0") == Exit.OK
    assert "GET carrot" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wanted", "sessions"),
    [
        ("trajectory:shop-1/1/0/1", ["shop-1/1/0/1"]),
        ("shop-1/1/0/1", ["shop-1/1/0/1"]),
        ("shop-1", ["shop-1/0/0/1", "shop-1/1/0/1"]),
    ],
)
def test_json_of_a_trajectory_a_session_or_a_group(
    archive: Path, wanted: str, sessions: list[str], capsys
) -> None:
    assert polar(archive, "show", wanted, "--json") == Exit.OK
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)["trajectories"]
    assert [each["session_id"] for each in value] == sessions
    assert value[0]["tokens_by_kind"] == {"context": 4, "agent": 3}
    assert value[0]["causes"] == {"retokenized": 1}
    assert [call["answer"] for call in value[0]["calls"]] == ["GET carrot", ""]
    assert value[0]["calls"][1]["splits"][0]["index"] == 2


def test_trees_can_be_made_anew_from_the_calls(archive: Path, capsys) -> None:
    for options, reason in (([], "made by an older stitcher"), (["--restitch"], "")):
        assert polar(archive, "show", "shop-1/0/0/1", "--json", *options) == Exit.OK
        (shown,) = json.loads(capsys.readouterr().out)["trajectories"]
        assert shown["reason"] == reason
        assert shown["causes"] == {"retokenized": 1}
    assert polar(archive, "causes", "--json", "--restitch") == Exit.OK
    assert json.loads(capsys.readouterr().out)["causes"][0]["causes"] == {"retokenized": 2}


def test_a_tokenizer_shows_both_sides_of_a_split(archive: Path, tmp_path: Path, capsys) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"<{number}>": number for number in range(40)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    made.save(str(tmp_path / "tokenizer.json"))
    options = ("show", "shop-1/0/0/1", "--tokenizer", str(tmp_path))
    assert polar(archive, *options) == Exit.OK
    shown = capsys.readouterr().out
    assert "was: <3> <4>" in shown
    assert "now: <34> <5>" in shown
    assert polar(archive, "show", "shop-1", "--tokenizer", str(tmp_path / "none")) == Exit.MISSING
    assert "tokenizer.json is missing" in capsys.readouterr().err


def test_an_id_that_is_not_there_is_3_and_says_what_is(archive: Path, capsys) -> None:
    assert polar(archive, "show", "shop-2") == Exit.MISSING
    assert "'shop-2': 2 are there, such as shop-1/0/0/1" in capsys.readouterr().err


def test_causes_by_harness_and_model(archive: Path, capsys) -> None:
    assert polar(archive, "causes", "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out) == {
        "causes": [
            {
                "harness": "pi", "model": "policy", "calls": 4, "usable": 4, "extending": 2,
                "causes": {"retokenized": 2},
            }
        ]
    }  # fmt: skip
    assert polar(archive, "causes") == Exit.OK
    assert "retokenized" in capsys.readouterr().out


def test_a_folder_that_is_no_archive_and_two_sources_are_wrong_usage(tmp_path: Path, capsys) -> None:
    assert polar(tmp_path, "causes") == Exit.USAGE
    assert polar(tmp_path, "causes", "--prefix", "other") == Exit.USAGE
    assert "not both" in capsys.readouterr().err
