"""Every way that leads to a Redis carries a whole life of jobs, client and worker alike."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as aio
from redis.exceptions import NoPermissionError

from tokenfleet.producer import (
    AsyncClient,
    BrokerUnavailable,
    BrokerUnsupported,
    Client,
    InvalidJob,
)
from tokenfleet.producer.address import parse_address
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.rights import producer_rules
from tokenfleet.worker.commands.doctor import GOOD, WARN, Doctor
from tokenfleet.worker.rights import worker_rules


async def whole_life(site, until, answer) -> None:
    """Submit, stream, cancel, hand over, and leave nothing behind."""
    first = site.worker(max_num_seqs=4, grace_s=0)
    endless = await site.submit("endless ", 5000)
    jobs = [await site.submit(f"job {i} ", 40 + i, n=1 + i % 2) for i in range(12)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _offset(endless))
    await endless.cancel()
    await until(lambda: _state(endless, "cancelled"))
    site.worker(max_num_seqs=4)
    assert await first.drain() == 0
    for number, events in enumerate(await following):
        text = "".join(e.text for e in events if e.choice == 0)
        assert text == answer(f"job {number} ", 40 + number)
    await until(lambda: _is(site.pending(), 0))


async def test_tls_with_a_client_certificate(tls_server, certificates, site_at, until, answer):
    options = f"ssl_ca_certs={certificates.ca}&ssl_certfile={certificates.cert}"
    url = f"rediss://127.0.0.1:{tls_server.ports['--tls-port']}/0?{options}&ssl_keyfile={certificates.key}"
    await whole_life(site_at(url), until, answer)


async def test_a_certificate_that_nobody_vouches_for_is_told_at_once(tls_server, certificates):
    options = f"ssl_certfile={certificates.cert}&ssl_keyfile={certificates.key}"
    url = f"rediss://127.0.0.1:{tls_server.ports['--tls-port']}/0?{options}"
    client = AsyncClient(url, connect_timeout_s=3600.0)  # not waited for: the test would never end
    with pytest.raises(BrokerUnsupported, match=r"not trusted.*ssl_ca_certs"):
        await client.connect()
    await client.aclose()


async def test_a_server_that_asks_for_a_certificate_is_not_served_without(tls_server, certificates):
    url = f"rediss://127.0.0.1:{tls_server.ports['--tls-port']}/0?ssl_ca_certs={certificates.ca}"
    client = AsyncClient(url, connect_timeout_s=0.3)
    with pytest.raises(BrokerUnavailable):
        await client.connect()
    await client.aclose()


async def test_a_unix_socket(tmp_path, site_at, until, answer):
    socket = tmp_path / "redis.sock"
    with EmbeddedServer(options=["--unixsocket", str(socket)]):
        await whole_life(site_at(f"unix://{socket}?db=3"), until, answer)


async def test_the_master_that_sentinels_name(redis_binary, sentinels, site_at, until, answer):
    with EmbeddedServer(binary=redis_binary) as server:
        url = await sentinels(server)
        await whole_life(site_at(f"{url}/2"), until, answer)


async def test_sentinels_that_are_not_there_are_told_with_their_names():
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:9/main"
    client = AsyncClient(url, connect_timeout_s=0.2)
    with pytest.raises(BrokerUnavailable, match=r"127.0.0.1:1,127.0.0.1:9/main was not reached"):
        await client.connect()
    await client.aclose()


async def test_a_cluster_through_any_of_its_nodes(cluster_masters, site_at, until, answer):
    node = cluster_masters[1]
    site = site_at(f"redis://127.0.0.1:{node.port}?cluster=true")
    await whole_life(site, until, answer)
    assert site.client.link.connection.partitions == 16
    findings = {f.check: f for f in await Doctor(site.connection).examine()}
    assert "cluster ok, 3 masters; no replica of" in findings["copies"].found
    assert {f.level for f in findings.values()} == {GOOD, WARN}


async def test_users_with_exactly_the_rights_of_their_role(any_server, site_at, until, answer):
    """And with no more: another namespace, the server's settings and its data are out of reach."""
    namespace = "acl"
    admin = aio.Redis.from_url(any_server.url)
    users = {"producer": producer_rules(namespace), "worker": worker_rules(namespace)}
    for name, rights in users.items():
        await admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rights)
    await admin.execute_command("ACL", "LOG", "RESET")
    urls = {name: any_server.url.replace("//", f"//{name}:pw@") for name in users}
    site = site_at(
        urls["producer"],
        worker_url=urls["worker"],
        our_url=any_server.url,
        namespace=namespace,
    )
    await whole_life(site, until, answer)
    denied = {line["object"] for line in await admin.acl_log()}
    assert denied <= {"config|get", "client|setinfo"}  # asked for, and done without
    async with aio.Redis.from_url(urls["worker"]) as worker:
        for forbidden in (["CONFIG", "SET", "save", ""], ["FLUSHALL"], ["GET", "{other:0}:x"]):
            with pytest.raises(NoPermissionError):
                await worker.execute_command(*forbidden)
    await admin.aclose()


async def test_a_missing_right_is_told_with_the_way_out(any_server, site_at):
    rights = [rule for rule in producer_rules("acl2") if rule != "+xadd"]
    async with aio.Redis.from_url(any_server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">pw", *rights)
    site = site_at(any_server.url.replace("//", "//few:pw@"), namespace="acl2")
    with pytest.raises(BrokerUnsupported, match="tokenfleet acl"):
        await site.submit("x", 1)


async def deaf(server, role: str, rights: list[str]) -> str:
    """The URL of a user who may reach no channel, as a new user of Redis 7 where nobody says so."""
    rights = [rule for rule in rights if not rule.startswith("&")]
    async with aio.Redis.from_url(server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", role, "reset", "on", ">pw", *rights)
    return server.url.replace("//", f"//{role}:pw@")


async def test_a_missing_right_to_listen_is_told_at_once_with_the_way_out(any_server, site_at):
    url = await deaf(any_server, "deaf", producer_rules("acl3"))
    job = await site_at(url, namespace="acl3").submit("x", 1)
    with pytest.raises(BrokerUnsupported, match="tokenfleet acl"):
        await anext(job.stream())
    with pytest.raises(BrokerUnsupported, match="tokenfleet acl"):
        await job.result()


async def test_whom_nobody_can_hear_writes_all_the_same(any_server, site_at, answer):
    """Events are in the log and ends are ends: nothing is half written."""
    worker_url = await deaf(any_server, "mute", worker_rules("acl4"))
    site = site_at(any_server.url, worker_url=worker_url, namespace="acl4")
    waiting = await site.submit("waits ", 5)
    mute = site_at(await deaf(any_server, "mute-client", producer_rules("acl4")), namespace="acl4")
    assert await mute.client.job(waiting.id).cancel() == "cancelled"
    assert [event.final for event in [event async for event in waiting.stream()]] == [True]
    site.worker()
    events = await site.follow(await site.submit("job ", 40))
    assert "".join(event.text for event in events) == answer("job ", 40)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://localhost:6379", "must begin with redis://, rediss://"),
        ("localhost:6379", "must begin with"),
        ("", "must begin with"),
        ("redis://localhost:port/0", "a port from 1 to 65535"),
        ("redis://localhost:70000/0", "a port from 1 to 65535"),
        ("redis://localhost/zero", "a number for db"),
        ("redis://localhost/0?protocol=4", "a protocol from 2 to 3"),
        ("redis://localhost/0?max_connections=0", "a max_connections from 1 to 65535"),
        ("redis://localhost/0?client_name=two%20words", "a client_name without spaces"),
        ("redis://a:1,b:2/0", "name one host"),
        ("redis://localhost/0?sl_ca_certs=x", "did you mean ssl_ca_certs"),
        ("redis://localhost/0?ssl_cert_reqs=none", "must begin with rediss"),
        ("rediss://localhost/0?ssl_ca_certs=/no/such/file", "a file for ssl_ca_certs"),
        ("rediss://localhost/0?ssl_check_hostname=perhaps", "true or false for ssl_check_hostname"),
        ("rediss://localhost/0?ssl_cert_reqs=maybe", "required, optional or none"),
        ("unix://", "name the socket"),
        ("redis+sentinel://a:1,b:2", "name the service"),
        ("redis+cluster://a:1/3", "leave out the database"),
        ("redis://[::1:6379/0", "in brackets"),
        ("redis://user:a/b@host/0", "%2F"),
        ("redis://user:a?b@host/0", "%3F"),
        ("redis://user:a#b@host/0", "%23"),
    ],
)
def test_a_wrong_url_is_refused_at_construction_with_the_way_out(url: str, words: str) -> None:
    for kind in (AsyncClient, Client):
        with pytest.raises(InvalidJob, match="redis_url") as refused:
            kind(url)
        assert words in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host:1/0",
        "redis://user:hunter2@host:1/0?nonsense=1",
        "redis://host/zero?password=hunter2",
        "redis+sentinel://host?sentinel_password=hunter2",
        *(f"redis://user:hunter2{sign}x@host:1/0" for sign in "/?#"),
        *(f"redis://user:x{sign}hunter2@host:1/0" for sign in "/?#"),
        *(f"redis://user:1{sign}hunter2@host:1/0" for sign in "/?#"),
        *(f"http://user:hunter2{sign}x@host:1/0" for sign in "/?#"),
        "redis://user:hunter2@[::1:1/0",
    ],
)
def test_a_refused_url_shows_no_password(url: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_address(url)
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in repr(refused.value)


def test_what_a_url_says_is_all_there() -> None:
    address = parse_address(
        "rediss+sentinel://u:p%40ss@a:1,[::1]:2/main/4?sentinel_password=s&ssl_cert_reqs=none"
    )
    assert (address.kind, address.tls, address.service) == ("sentinel", True, "main")
    assert address.hosts == (("a", 1), ("::1", 2))
    assert address.options == {
        "username": "u", "password": "p@ss", "db": 4, "ssl_cert_reqs": "none",
    }  # fmt: skip
    assert address.sentinel_options == {"password": "s", "ssl_cert_reqs": "none"}
    assert "p@ss" not in repr(address)
    assert parse_address(" redis://a:1/2\n") == parse_address("redis://a:1/2")
    cluster = parse_address("redis+cluster://a,b:7001")
    assert cluster.hosts == (("a", 6379), ("b", 7001))


async def _is(found, expected) -> bool:
    return await found == expected


async def _offset(job) -> bool:
    return (await job.status()).offset > 0


async def _state(job, state: str) -> bool:
    return (await job.status()).state == state
