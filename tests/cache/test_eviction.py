"""Keeping ``max_size`` while a build writes."""

from __future__ import annotations

from ninferbuild.cache import Cache


def test_a_block_that_goes_with_another_action_while_room_is_made_is_stored_again(tmp_path, actions):
    """The block of an old action is written again, for a new one, in the batch that evicts the old one."""
    shared, fresh = actions.blocks(1, [9000, 9000])
    with Cache.open(tmp_path, max_size=12_000) as cache, cache.lease("t"), cache.writer() as writer:
        actions.put(writer, "old", [shared])
    with Cache.open(tmp_path, max_size=12_000) as cache:
        with cache.lease("t"), cache.writer() as writer:
            record = actions.put(writer, "new", [fresh, shared])
        assert cache.find(actions.record("old", [shared]).key, "old") is None
        assert cache.find(record.key, "new") == record
        assert actions.payload(cache, record) == fresh + shared
        assert cache.stats().live_bytes == len(fresh + shared)
        assert cache.verify().problems == ()
