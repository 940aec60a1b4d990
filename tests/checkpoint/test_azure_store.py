"""What Azure Blob Storage does in its own way: who signs for it, blocks and pages."""

from __future__ import annotations

import os
import threading
import time
import uuid

import pytest
from azure.storage.blob import BlobClient
from azurite_server import AzuriteServer
from conftest import StoreAddress
from makara.checkpoint import (
    Conflict,
    NoCredentials,
    StoreRefused,
    StoreUnavailable,
    check_writable,
    credentials_in,
    open_store,
)
from makara.checkpoint.stores import azure

ACCOUNT = "https://a01.blob.core.windows.net"
SIGNATURE = "sv=2021-12-02&sig=c2lnbmF0dXJl%3D&sp=rw"
NAMES = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials of Azure in this process."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def place(azurite: AzuriteServer) -> StoreAddress:
    return StoreAddress(azurite.uri(uuid.uuid4().hex), azurite.endpoint)


# ---- who signs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("given", [True, False], ids=["a job's", "of the environment"])
def test_a_key_a_signature_or_a_connection_string_opens_the_account(
    azurite: AzuriteServer, place: StoreAddress, monkeypatch: pytest.MonkeyPatch, kind: str, given: bool
) -> None:
    values = {NAMES[0]: azurite.key, NAMES[1]: f"?{azurite.sas()}", NAMES[2]: azurite.connection_string}
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    own = {kind: values[kind]}
    if not given:
        monkeypatch.setenv(kind, values[kind])
    found = credentials_in(place.uri, own) if given else None
    check_writable(place.uri, endpoint=place.endpoint, credentials=found)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AZURE_STORAGE_KEY", "not base64", "AZURE_STORAGE_KEY is no key"),
        ("AZURE_STORAGE_SAS_TOKEN", "sv=1", "AZURE_STORAGE_SAS_TOKEN is no shared access signature"),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountKey=eA==",
            "AZURE_STORAGE_CONNECTION_STRING is incomplete",
        ),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "AccountName=a02;AccountKey=eA==",
            "is of https://a02.blob.core.windows.net, and checkpoint.endpoint is https://a01",
        ),
    ],
)
@pytest.mark.usefixtures("bare")
def test_credentials_that_cannot_be_right_are_refused_by_name(variable: str, value: str, words: str) -> None:
    with pytest.raises(StoreRefused, match=words) as refused:
        open_store(
            "az://container/p", endpoint=ACCOUNT, credentials=credentials_in("az://", {variable: value})
        )
    assert value not in str(refused.value)


@pytest.mark.usefixtures("bare")
def test_no_identity_is_asked_for_where_the_account_is_not_azures_own() -> None:
    with pytest.raises(NoCredentials, match="is not Azure's own, and none of AZURE_STORAGE_KEY"):
        open_store("az://container/p", endpoint="https://store.example/account")


@pytest.mark.parametrize(
    ("uri", "endpoint", "field"),
    [
        ("az://", ACCOUNT, r"checkpoint\.uri"),
        ("az://container", None, r"checkpoint\.endpoint"),
        ("az://container", "a01.blob.core.windows.net", r"checkpoint\.endpoint"),
        ("az://container", "http://127.0.0.1:10000", r"checkpoint\.endpoint"),
        ("az://container", f"{ACCOUNT}/container", r"checkpoint\.endpoint"),
        ("az://container", f"{ACCOUNT}?{SIGNATURE}", r"checkpoint\.endpoint"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused_and_its_field_named(
    uri: str, endpoint: str | None, field: str
) -> None:
    with pytest.raises(StoreRefused, match=field) as refused:
        open_store(uri, endpoint=endpoint, credentials=credentials_in(uri, {"AZURE_STORAGE_KEY": "eA=="}))
    assert "sig" not in str(refused.value)


# ---- blocks and pages --------------------------------------------------------------------------------------


def test_a_listing_goes_on_over_pages(place: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    keys = [f"job/{number}" for number in range(7)]
    for key in keys:
        store.put(key, b"x")
    monkeypatch.setattr(azure, "_PAGE", 3)
    assert [key for key, _ in store.list("job/")] == keys
    store.delete_many(keys[:6])
    assert [key for key, _ in store.list("")] == keys[6:]


def test_of_two_writers_of_one_object_either_writes_it_whole(
    place: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(azure, "_UPLOADS", 1)
    both_have_sent = threading.Barrier(2)
    commit = BlobClient.commit_block_list

    def commit_together(self: BlobClient, *arguments: object, **named: object) -> object:
        both_have_sent.wait()
        return commit(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(BlobClient, "commit_block_list", commit_together)
    outcomes: list[Exception | None] = []

    def write(letter: bytes) -> None:
        try:
            place.open().put("job/a", letter * 5000)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None in outcomes
    assert all(error is None or isinstance(error, StoreUnavailable) for error in outcomes), outcomes
    assert place.open().get("job/a") in (b"a" * 5000, b"b" * 5000)


def test_a_write_whose_blocks_were_aborted_may_begin_again(
    place: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "_BLOCK_BYTES", 1 << 10)
    store, other = place.open(), place.open()
    commit = BlobClient.commit_block_list

    def abort_first(self: BlobClient, *arguments: object, **named: object) -> object:
        monkeypatch.setattr(BlobClient, "commit_block_list", commit)
        (found,) = other.unfinished("job/")
        assert abs(found.began_at - time.time()) < 60
        other.abort(found)
        return commit(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(BlobClient, "commit_block_list", abort_first)
    with pytest.raises(StoreUnavailable, match="InvalidBlockList"):
        store.put("job/a", b"x" * 5000)
    assert list(store.list("")) == []
    store.put("job/a", b"x" * 5000)
    assert store.get("job/a") == b"x" * 5000


def test_an_abort_leaves_an_object_that_was_finished_meanwhile(place: StoreAddress) -> None:
    store = place.open()
    blob = store._blob("job/a")  # type: ignore[attr-defined]
    blob.stage_block(f"{azure._upload_id(time.time())}-000000", b"x")
    (found,) = store.unfinished("job/")
    store.put("job/a", b"whole")
    store.abort(found)
    assert store.get("job/a") == b"whole"


def test_a_lost_swap_tells_both_tags_apart(place: StoreAddress) -> None:
    store = place.open()
    tag = store.swap("head", b"1", None)
    with pytest.raises(Conflict, match="BlobAlreadyExists"):
        store.swap("head", b"2", None)
    store.put("head", b"2")
    with pytest.raises(Conflict, match="ConditionNotMet"):
        store.swap("head", b"3", tag)
