"""The prefix tree against plain lists: sets of prefixes, positions, merges, paths."""

from hypothesis import given
from hypothesis import strategies as st

from polar.core.prefix_tree import PrefixTree, TreePaths, as_tokens, common_prefix
from schemas.trees import TokenTree
from tests.property.session_scripts import LAWS

Symbol = tuple[int, str]
"""(token id, digest of the picture behind it, or "")."""

symbols = st.tuples(st.sampled_from([-7, 0, 0, 1, 2]), st.sampled_from(["", "", "", "cat", "dog"]))
sequences = st.lists(st.lists(symbols, max_size=8), max_size=8)


def insert(tree: PrefixTree, sequence: list[Symbol], below=None):
    tokens = as_tokens([token for token, _ in sequence])
    media = [(at, digest) for at, (_, digest) in enumerate(sequence) if digest]
    return tree.insert(tree.keys(tokens, media, has_negative=any(t < 0 for t, _ in sequence)), below)


def read(tree: TokenTree) -> dict[int, list[Symbol]]:
    """Path of each run, by plain concatenation."""
    digests = {each.index: each.digest for each in tree.media}
    starts, tokens = tree.starts.tolist(), tree.tokens.tolist()
    paths: dict[int, list[Symbol]] = {}
    for run, parent in enumerate(tree.parents):
        own = [(tokens[at], digests.get(at, "")) for at in range(starts[run], starts[run + 1])]
        paths[run] = paths.get(parent, []) + own
    return paths


def prefixes(of: list[list[Symbol]]) -> set[tuple[Symbol, ...]]:
    return {tuple(sequence[:size]) for sequence in of for size in range(1, len(sequence) + 1)}


@LAWS
@given(sequences, st.randoms())
def test_the_tree_is_the_set_of_prefixes_in_whatever_order_they_came(given_sequences, random) -> None:
    def exported(order: list[list[Symbol]]) -> TokenTree:
        tree = PrefixTree()
        ends = [insert(tree, sequence) for sequence in order]
        out = tree.export()
        paths = read(out.tree)
        for sequence, end in zip(order, ends, strict=True):
            run, offset = out.locate(end)
            length = out.tree.starts[run + 1] - out.tree.starts[run] if sequence else 0
            assert (paths[run][: len(paths[run]) - length + offset] if sequence else []) == sequence
        return out.tree

    tree = exported(given_sequences)
    assert len(tree.tokens) == len(prefixes(given_sequences))
    assert prefixes(list(read(tree).values())) == prefixes(given_sequences)
    shuffled = [*given_sequences, *given_sequences[:2]]
    random.shuffle(shuffled)
    assert exported(shuffled) == tree


@LAWS
@given(sequences)
def test_runs_are_canonical_siblings_differ_and_no_run_has_one_child(given_sequences) -> None:
    tree = PrefixTree()
    for sequence in given_sequences:
        insert(tree, sequence)
    out = tree.export().tree
    parents, digests = out.parents.tolist(), {each.index: each.digest for each in out.media}
    firsts = [
        (parent, out.tokens[start], digests.get(start, ""))
        for parent, start in zip(parents, out.starts, strict=False)
    ]
    assert len(set(firsts)) == len(firsts)
    below = [
        sorted(first[1:] for first in firsts if first[0] == parent) for parent in range(-1, len(parents))
    ]
    assert [
        [first[1:] for first in firsts if first[0] == parent] for parent in range(-1, len(parents))
    ] == below
    assert all(parents.count(run) != 1 for run in range(len(parents)))


@LAWS
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.lists(symbols, max_size=4)), max_size=12))
def test_inserting_below_an_ancestor_is_inserting_the_whole(steps) -> None:
    deltas, whole = PrefixTree(), PrefixTree()
    ends, paths = [deltas.root], [[]]
    for number, most, new in steps:
        base = number % len(ends)
        kept = min(most, len(paths[base]))
        ends.append(insert(deltas, new, deltas.ancestor(ends[base], kept)))
        paths.append([*paths[base][:kept], *new])
        assert ends[-1].depth == len(paths[-1])
    placed = [insert(whole, path) for path in paths]
    out, other = deltas.export(), whole.export()
    assert out.tree == other.tree
    assert [out.locate(end) for end in ends] == [other.locate(end) for end in placed]


@LAWS
@given(st.lists(sequences, min_size=1, max_size=3))
def test_a_tree_of_trees_is_the_tree_of_all_sequences(members) -> None:
    merged, at_once = PrefixTree(), PrefixTree()
    moved, ends = [], []
    for member in members:
        tree = PrefixTree()
        own = [insert(tree, sequence) for sequence in member]
        out = tree.export()
        there = merged.insert_tree(out.tree)
        moved += [there.locate(*out.locate(end), merged) for end in own]
        ends += [insert(at_once, sequence) for sequence in member]
    out, expected = merged.export(), at_once.export()
    assert out.tree == expected.tree
    assert [out.locate(end) for end in moved] == [expected.locate(end) for end in ends]


@LAWS
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.data())
def test_paths_are_read_as_from_lists(lists: list[list[int]], data: st.DataObject) -> None:
    tree = PrefixTree()
    ends = [tree.insert(as_tokens(each)) for each in lists]
    out = tree.export()
    paths, places = TreePaths(out.tree), [out.locate(end) for end in ends]
    for each, place in zip(lists, places, strict=True):
        assert paths.path(*place).tolist() == each
        size = data.draw(st.integers(0, len(each)))
        assert paths.path(*paths.ancestor(*place, size)).tolist() == each[:size]
        start, stop = data.draw(st.integers(0, 14)), data.draw(st.integers(0, 14))
        assert paths.stretch(place, start, stop).tolist() == each[start:stop]
    for upper, above in zip(lists, places, strict=True):
        for lower, below in zip(lists, places, strict=True):
            assert paths.is_prefix(above, below) == (lower[: len(upper)] == upper)


@LAWS
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_common_prefix_of_long_arrays(left: int, right: int, parts_at: int) -> None:
    a, b = as_tokens(range(left)), as_tokens(range(right)).copy()
    b[parts_at:] += 1
    assert common_prefix(a, b) == min(left, right, parts_at)
