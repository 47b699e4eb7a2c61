"""The page pool: free, held, cached; content found by prefix; the least useful content goes first."""

import pytest

from specdec.scheduler.pages import ROOT, PagePool

TEXT = [1, 2, 3, 4, 5, 6, 7]


def publish(pool: PagePool, pages: list[int], tokens: list[int]) -> int:
    key, size = ROOT, pool.page_size
    for i, page in enumerate(pages):
        key = pool.publish(key, tuple(tokens[i * size : (i + 1) * size]), page)
    return key


@pytest.fixture
def pool() -> PagePool:
    return PagePool(num_pages=5, page_size=2, caching=True)


def test_page_0_is_never_handed_out(pool: PagePool) -> None:
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_available == 0
    pool.check()


def test_released_pages_are_free_again(pool: PagePool) -> None:
    pages = pool.take(3)
    pool.release(pages)
    assert (pool.num_available, pool.num_held) == (4, 0)
    pool.check()


def test_published_content_is_found_while_held_and_after(pool: PagePool) -> None:
    pages = pool.take(3)
    publish(pool, pages, TEXT)
    assert pool.match(TEXT) == pages
    pool.release(pages)
    assert pool.match(TEXT) == pages
    assert pool.num_available == 4, 'cached pages count as available'
    pool.check()


@pytest.mark.parametrize(('length', 'found'), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)])
def test_a_hit_leaves_the_last_token(pool: PagePool, length: int, found: int) -> None:
    pages = pool.take(3)
    publish(pool, pages, TEXT)
    assert pool.match(TEXT[:length]) == pages[:found]


def test_equal_tokens_behind_another_prefix_are_other_content(pool: PagePool) -> None:
    pages = pool.take(2)
    publish(pool, pages, [1, 2, 3, 4])
    assert pool.match([3, 4, 0]) == []
    assert pool.match([9, 9, 3, 4, 0]) == []


def test_two_holders(pool: PagePool) -> None:
    pages = pool.take(2)
    publish(pool, pages, TEXT)
    pool.hold(pages)
    pool.release(pages)
    assert pool.num_held == 2
    pool.release(pages)
    assert pool.num_held == 0
    pool.hold(pool.match(TEXT))
    assert pool.num_held == 2
    pool.check()


def test_a_second_copy_stays_unknown_and_its_followers_join_the_first(pool: PagePool) -> None:
    first, second = pool.take(1), pool.take(2)
    key = publish(pool, first, [1, 2])
    assert publish(pool, second[:1], [1, 2]) == key
    pool.publish(key, (3, 4), second[1])
    assert pool.match([1, 2, 3, 4, 5]) == [first[0], second[1]]
    pool.release(second)
    assert pool.num_available == 2 + 1
    pool.check()


def test_eviction_takes_the_oldest_and_tails_before_prefixes(pool: PagePool) -> None:
    old, new = pool.take(2), pool.take(2)
    publish(pool, old, [1, 2, 3, 4])
    publish(pool, new, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.take(1)
    assert (len(pool.match([1, 2, 3, 4, 0])), len(pool.match([5, 6, 7, 8, 0]))) == (1, 2)
    pool.take(1)
    assert (len(pool.match([1, 2, 3, 4, 0])), len(pool.match([5, 6, 7, 8, 0]))) == (0, 2)
    pool.check()


def test_a_hit_renews_content(pool: PagePool) -> None:
    old, new = pool.take(1), pool.take(1)
    publish(pool, old, [1, 2])
    publish(pool, new, [5, 6])
    pool.release(old)
    pool.release(new)
    hit = pool.match([1, 2, 0])
    pool.hold(hit)
    pool.release(hit)
    pool.take(3)
    assert pool.match([1, 2, 0]) == old
    assert pool.match([5, 6, 0]) == []


def test_forgotten_content_is_not_reached_through_its_followers(pool: PagePool) -> None:
    """A page whose prefix was evicted and written anew under another key must not be joined to it."""
    pages = pool.take(2)
    publish(pool, pages, [1, 2, 3, 4])
    pool.release([pages[0]])  # the prefix is let go first, its follower is still held
    taken = pool.take(3)
    assert pages[0] in taken
    assert pool.match([1, 2, 3, 4, 0]) == []
    pool.publish(ROOT, (1, 2), taken[0])
    assert pool.match([1, 2, 3, 4, 0]) == [taken[0]]
    pool.check()


def test_without_caching_nothing_is_remembered() -> None:
    pool = PagePool(num_pages=5, page_size=2, caching=False)
    pages = pool.take(2)
    publish(pool, pages, TEXT)
    assert pool.match(TEXT) == []
    pool.release(pages)
    assert pool.num_available == 4
    pool.check()


@pytest.mark.parametrize(('tokens', 'pages'), [(0, 0), (1, 1), (2, 1), (3, 2)])
def test_pages_for(pool: PagePool, tokens: int, pages: int) -> None:
    assert pool.pages_for(tokens) == pages
