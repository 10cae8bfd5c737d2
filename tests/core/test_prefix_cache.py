"""Which snapshots a prefix cache keeps, and who may use them."""

from __future__ import annotations

import weakref
from mmap import mmap

import numpy as np

from pyh2o.core.prefix_cache import PrefixCache, Snapshot

KIB = 2**10


class Owner:
    pass


def snapshot(tokens: list[int], *, kib: int = 256, owner: Owner | None = None) -> Snapshot:
    ids = np.array(tokens, dtype=np.intc)
    of = None if owner is None else weakref.ref(owner)
    return Snapshot(ids, ids, mmap(-1, kib * KIB), 0, of)


def test_only_the_owner_finds_its_snapshots() -> None:
    cache, owner = PrefixCache(1), Owner()
    cache.put(snapshot([1, 2], owner=owner))
    cache.put(snapshot([1]))
    assert [len(each.prompt) for each in cache.prefixes([1, 2, 3], owner)] == [2]
    assert [len(each.prompt) for each in cache.prefixes([1, 2, 3])] == [1]
    assert cache.prefixes([1, 2, 3], Owner()) == []
    assert cache.most_common(np.array([1, 2, 3], dtype=np.intc)) == 1


def test_snapshots_of_an_owner_that_is_gone_are_found_by_nobody() -> None:
    cache, owner = PrefixCache(1), Owner()
    cache.put(snapshot([1, 2], owner=owner))
    del owner
    assert cache.prefixes([1, 2, 3]) == []
    assert cache.counts.texts == 0


def test_clear_deletes_those_of_one_owner() -> None:
    cache, owner, other = PrefixCache(1), Owner(), Owner()
    for each in (owner, other, None):
        cache.put(snapshot([1], owner=each))
    cache.clear(owner)
    assert [len(cache.prefixes([1], each)) for each in (owner, other, None)] == [0, 1, 1]


def test_snapshots_of_a_changed_text_are_evicted_first() -> None:
    cache, owner = PrefixCache(1), Owner()
    for tokens in ([1], [1, 2], [1, 2, 3, 4, 5]):
        cache.put(snapshot(tokens, kib=300, owner=owner))
    cache.put(snapshot([1, 2, 6], kib=300, owner=owner))
    found = cache.prefixes([1, 2, 6], owner)
    assert [each.prompt.tolist() for each in found] == [[1, 2, 6], [1, 2], [1]]
    assert (cache.counts.texts, cache.counts.dropped) == (3, 1)


def test_a_prompt_replaces_its_prefixes_but_not_those_of_owners() -> None:
    cache, owner = PrefixCache(1), Owner()
    for tokens in ([1], [1, 2]):
        cache.put(snapshot(tokens))
        cache.put(snapshot(tokens, owner=owner))
    assert len(cache.prefixes([1, 2])) == 1
    assert len(cache.prefixes([1, 2], owner)) == 2
