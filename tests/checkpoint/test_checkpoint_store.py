"""What callers rely on from a store, for a local folder, a real S3 server and Azurite."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import begin_write
from conftest import StoreAddress
from makara.checkpoint import Conflict, InvalidKey, NotFound, Store, check_writable


def test_an_object_comes_back_as_it_was_put_and_can_be_replaced(store: Store) -> None:
    store.put("job/a", b"one")
    store.put("job/a", b"second")
    assert store.get("job/a") == b"second"
    assert store.size("job/a") == 6
    assert store.get_range("job/a", 1, 3) == b"eco"
    assert store.get_range("job/a", 4, 100) == b"nd"
    assert store.exists("job/a")


def test_a_prefix_is_the_whole_text_after_the_bucket(store_address: StoreAddress) -> None:
    local = store_address.uri.startswith("file:")  # percent-decoded, unlike the others
    names = ("", "/a", "/a#b", "/a?b=c", "/a b", "/a%25" if local else "/a%20b", "/a;b", "/ü")
    stores = [replace(store_address, uri=f"{store_address.uri}{name}").open() for name in names]
    for name, store in zip(names, stores, strict=True):
        store.put("object", name.encode())
    assert [store.get("object").decode() for store in stores] == list(names)


def test_an_object_larger_than_one_upload_request_comes_back_whole(store: Store, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(11 << 20)
    (tmp_path / "file").write_bytes(data)
    store.put("big", data)
    store.put_file("job/from-file", tmp_path / "file")
    assert store.get("big") == data
    assert store.get("job/from-file") == data


def test_a_large_file_is_sent_in_bounded_memory(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(96 << 20)
    store.put("job/warm-up", b"x")
    tracemalloc.start()
    try:
        store.put_file("job/large", path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.size("job/large") == 96 << 20
    assert peak_bytes < 48 << 20


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.size("empty") == 0


def test_an_object_that_is_not_there_is_not_found(store: Store) -> None:
    store.put("job/a", b"")
    for missing in ("job/b", "job", "other/x"):
        assert not store.exists(missing)
        assert store.read_tagged(missing) is None
        for read in (store.get, store.size, lambda key: store.get_range(key, 0, 1)):
            with pytest.raises(NotFound, match=missing):
                read(missing)


def test_listing_is_by_key_prefix_in_key_order(store: Store) -> None:
    for key in ("job/b/2", "job/b/1", "job/a", "job/bb/1", "joke/a"):
        store.put(key, key.encode())
    assert list(store.list("job/b")) == [("job/b/1", 7), ("job/b/2", 7), ("job/bb/1", 8)]
    assert [key for key, _ in store.list("jo")] == ["job/a", "job/b/1", "job/b/2", "job/bb/1", "joke/a"]
    assert list(store.list("nothing/")) == []


def test_deleting_twice_is_no_error(store: Store) -> None:
    store.put("job/a", b"x")
    store.delete("job/a")
    store.delete("job/a")
    assert not store.exists("job/a")


def test_deleting_many_leaves_their_neighbours(store: Store) -> None:
    for key in ("job/1/a", "job/1/b/c", "job/10/a"):
        store.put(key, b"x")
    for _ in range(2):
        store.delete_many(["job/1/a", "job/1/b/c"])
    assert [key for key, _ in store.list("")] == ["job/10/a"]


def test_a_listing_tells_when_each_object_was_written(store: Store) -> None:
    before = time.time()
    store.put("job/a", b"x")
    (found,) = store.list_objects("job/")
    assert (found.key, found.size_bytes) == ("job/a", 1)
    assert abs(found.written_at - before) < 60


def test_a_write_that_has_not_ended_is_found_and_can_be_ended(store_address: StoreAddress) -> None:
    store = store_address.open()
    store.put("job/a", b"x")
    key = begin_write(store_address, "job/sections/1-g1/0.0.safetensors")
    (found,) = store.unfinished("job/")
    assert found.key == key
    assert abs(found.began_at - time.time()) < 60
    assert list(store.unfinished("jo/")) == []
    for _ in range(2):
        store.abort(found)
    assert list(store.unfinished("job/")) == []
    assert [key for key, _ in store.list("")] == ["job/a"]


def test_a_swap_succeeds_only_against_the_object_that_was_read(store: Store) -> None:
    first = store.swap("head", b"1", None)
    with pytest.raises(Conflict):
        store.swap("head", b"x", None)
    second = store.swap("head", b"2", first)
    with pytest.raises(Conflict):
        store.swap("head", b"x", first)
    assert store.read_tagged("head") == (b"2", second)
    store.delete("head")
    with pytest.raises(Conflict):
        store.swap("head", b"x", second)


def test_no_swap_is_lost_when_several_writers_race(store_address: StoreAddress) -> None:
    num_writers, num_swaps = 3, 10
    store_address.open().swap("counter", b"0", None)
    failures: list[BaseException] = []

    def count_up() -> None:
        store = store_address.open()
        won = 0
        while won < num_swaps:
            tagged = store.read_tagged("counter")
            assert tagged is not None
            try:
                store.swap("counter", str(int(tagged[0]) + 1).encode(), tagged[1])
            except Conflict:
                continue
            won += 1

    def guarded() -> None:
        try:
            count_up()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store_address.open().get("counter") == str(num_writers * num_swaps).encode()


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/x", "a//b", "a/", "", ".", "a/.hidden", "a\\b", "a\0b", "a b", "a\n"]
)
def test_a_key_cannot_leave_the_root(store: Store, tmp_path: Path, key: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    for use in (
        store.get,
        store.size,
        store.exists,
        store.delete,
        store.read_tagged,
        lambda k: store.put(k, b"x"),
        lambda k: store.swap(k, b"x", None),
        lambda k: store.put_file(k, Path(__file__)),
        lambda k: store.get_range(k, 0, 1),
        lambda k: store.delete_many([k]),
    ):
        with pytest.raises(InvalidKey):
            use(key)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_writable_store_passes_the_check_and_keeps_nothing_of_it(store_address: StoreAddress) -> None:
    check_writable(store_address.uri, endpoint=store_address.endpoint, region=store_address.region)
    assert list(store_address.open().list("")) == []


def test_the_package_imports_neither_torch_nor_a_cloud_client() -> None:
    script = (
        "import sys, pkgutil, importlib, makara.checkpoint as package\n"
        "heavy = {'torch', 'boto3', 'minio', 'azure', 'requests'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    if module.name != 'tensors':\n"
        "        importlib.import_module(f'makara.checkpoint.{module.name}')\n"
        "assert 'torch' not in sys.modules\n"
        "import makara.checkpoint.tensors\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
