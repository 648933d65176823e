"""Staleness over lineages that fork and are given up."""

from polar.core.staleness import PolicyLineages
from schemas.policies import PolicyPublished, PolicyVersion


def version(text: str) -> PolicyVersion:
    return PolicyVersion.parse(text)


def lineages(*edges: str) -> PolicyLineages:
    """Edges `child<parent` in order of the log."""
    return PolicyLineages(
        PolicyPublished(
            policy="p",
            version=version(edge.partition("<")[0]),
            parent=version(edge.partition("<")[2]) if "<" in edge else None,
            weights_path="w",
            weights_sha256="0",
        )
        for edge in edges
    )


def test_steps_count_within_a_lineage() -> None:
    known = lineages("a:0", "a:1<a:0", "a:2<a:1")
    assert [known.staleness(version(f"a:{step}")) for step in (0, 1, 2)] == [2, 1, 0]
    assert known.newest == version("a:2")


def test_a_new_lineage_starts_with_the_weights_of_its_checkpoint() -> None:
    known = lineages("a:0", "a:1<a:0", "b:1<a:1", "b:2<b:1")
    assert known.staleness(version("a:1")) == known.staleness(version("b:1")) == 1


def test_a_lineage_that_was_given_up_counts_from_the_common_ancestor() -> None:
    known = lineages("a:0", "a:1<a:0", "a:2<a:1", "a:3<a:2", "b:1<a:1", "b:2<b:1", "b:3<b:2")
    assert known.staleness(version("a:3")) == 2, "equal step, other weights: as old as a:1"


def test_unknown_and_newer_versions() -> None:
    assert lineages().staleness(version("a:3")) == 0
    known = lineages("a:0", "a:1<a:0")
    assert known.staleness(version("a:2")) == 0
    assert known.staleness(version("x:0")) == 1


def test_repeats_and_circles_on_the_log_do_no_harm() -> None:
    known = lineages("a:0<a:1", "a:1<a:0", "a:0")
    assert known.newest == version("a:1")
    assert known.staleness(version("a:0")) == 1
