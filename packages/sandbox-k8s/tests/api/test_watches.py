"""Watches: order, ends, expiry, selectors. Runs on the fake and on a real cluster."""

from typing import Any

import pytest

pytestmark = pytest.mark.anyio
MERGE = "application/merge-patch+json"


async def relabel(wire: Any, name: str, value: str) -> Any:
    body = {"metadata": {"labels": {"app": value}}}
    return (await wire("PATCH", f"pods/{name}", body, media_type=MERGE)).body


async def version(wire: Any) -> str:
    return (await wire("GET", "pods?limit=1")).body["metadata"]["resourceVersion"]


async def test_a_watch_goes_on_from_a_version_and_misses_nothing(wire: Any) -> None:
    begin = await version(wire)
    await wire.create("a1", labels={"app": "x"})
    await relabel(wire, "a1", "y")
    await wire("DELETE", "pods/a1")
    seen = []
    async with wire.watching(resourceVersion=begin, fieldSelector="metadata.name=a1") as following:
        while not seen or seen[-1]["type"] != "DELETED":
            seen.append(await following())
    kinds = [one["type"] for one in seen]
    assert kinds[0] == "ADDED"
    assert set(kinds[1:-1]) == {"MODIFIED"}
    versions = [int(one["object"]["metadata"]["resourceVersion"]) for one in seen]
    assert versions == sorted(set(versions))
    assert seen[0]["object"]["kind"] == "Pod"
    assert "deletionTimestamp" in seen[-1]["object"]["metadata"]


async def test_without_a_version_everything_is_added_first(wire: Any) -> None:
    await wire.create("a1")
    await wire.create("a2")
    for query in ({}, {"resourceVersion": "0"}):
        async with wire.watching(**query) as following:
            first = [await following() for _ in range(2)]
        assert {(one["type"], one["object"]["metadata"]["name"]) for one in first} == {
            ("ADDED", "a1"),
            ("ADDED", "a2"),
        }


async def test_a_pod_that_leaves_the_selector_is_deleted_with_its_old_labels(wire: Any) -> None:
    await wire.create("a1", labels={"app": "x"})
    begin = await version(wire)
    async with wire.watching(resourceVersion=begin, labelSelector="app=x") as following:
        left = await relabel(wire, "a1", "elsewhere")
        back = await relabel(wire, "a1", "x")
        seen = [await following()]
        while seen[-1]["type"] == "MODIFIED":
            seen = [await following()]
        seen.append(await following())
    assert [one["type"] for one in seen] == ["DELETED", "ADDED"]
    gone = seen[0]["object"]["metadata"]
    assert (gone["labels"], gone["resourceVersion"]) == ({"app": "x"}, left["metadata"]["resourceVersion"])
    assert "deletionTimestamp" not in gone
    assert seen[1]["object"]["metadata"]["resourceVersion"] == back["metadata"]["resourceVersion"]


async def test_a_version_that_is_forgotten_ends_with_an_error_event(wire: Any) -> None:
    await wire.create("a1")
    async with wire.watching(resourceVersion="1") as following:
        event = await following()
        if event["type"] == "ADDED":
            pytest.skip("this API server has forgotten nothing since the cluster was made")
        assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
            "ERROR",
            410,
            "Expired",
        )
        assert event["object"]["message"].startswith("too old resource version: 1 (")
        assert await following() is None


async def test_a_watch_ends_in_time_with_bookmarks_before_it(wire: Any) -> None:
    begin = await version(wire)
    async with wire.watching(resourceVersion=begin, timeoutSeconds="1") as following:
        assert await following() is None
    query = {"resourceVersion": begin, "timeoutSeconds": "3", "allowWatchBookmarks": "true"}
    async with wire.watching(**query) as following:
        await wire.create("a1")
        while (event := await following())["type"] != "BOOKMARK":
            assert event["object"]["metadata"]["name"] == "a1"
        assert event["object"]["kind"] == "Pod"
        assert int(event["object"]["metadata"]["resourceVersion"]) > int(begin)


@pytest.mark.parametrize("access", ["fake"], indirect=True)
async def test_a_watch_without_changes_of_its_kind_gets_no_bookmark_either(wire: Any) -> None:
    """Seen on a real cluster too, but there the pods of other tests may change meanwhile."""
    query = {"resourceVersion": await version(wire), "timeoutSeconds": "3", "allowWatchBookmarks": "true"}
    async with wire.watching(**query) as following:
        await wire("POST", "configmaps", {"metadata": {"name": "another-kind"}})
        assert await following() is None


async def test_initial_events_end_with_a_bookmark(wire: Any) -> None:
    await wire.create("a1")
    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    async with wire.watching(**query) as following:
        assert (await following())["type"] == "ADDED"
        event = await following()
        while event["type"] == "MODIFIED":
            event = await following()
    assert event["type"] == "BOOKMARK"
    assert event["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
