"""Weights that go straight from one process to others: buckets, the choice of a transport, sabotage on the way."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from k3rl.actors import ClusterConfig
from k3rl.actors.weight_sync import (
    BucketDamaged,
    BytesBucket,
    Location,
    Receiver,
    Sender,
    TransferBroken,
    checksum,
    choose_transport,
    content_of,
    tensor_buckets,
    tensors_in,
)
from k3rl.config import ConfigError

CPU = torch.device("cpu")
DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


def written(bucket) -> torch.Tensor:
    buffer = torch.full((bucket.size,), 255, dtype=torch.uint8)
    bucket.write(buffer)
    return buffer


def some_tensors(sizes, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{i}": torch.randint(0, 200, (size, 3), generator=generator).to(DTYPES[i % 3]) for i, size in enumerate(sizes)
    }


# ---- buckets


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 200))
def test_messages_are_safetensors_files_and_hold_every_tensor_once(sizes, limit):
    tensors = some_tensors(sizes)
    found: dict[str, torch.Tensor] = {}
    for bucket in tensor_buckets(tensors.items(), limit):
        buffer = written(bucket)
        read = safetensors.torch.load(content_of(buffer))
        views = dict(tensors_in(buffer))
        assert read.keys() == views.keys()
        assert not read.keys() & found.keys()
        assert len(read) == 1 or sum(t.numel() * t.element_size() for t in read.values()) <= limit
        assert all(torch.equal(views[name], tensor) for name, tensor in read.items())
        found |= read
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=70), st.data())
def test_a_checksum_is_the_weighted_sum_of_words_and_sees_every_single_change(content, data):
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content) // 8 * 8, 8)]
    tail = int.from_bytes(content[len(words) * 8 :], "little")
    expected = sum(word * (2 * i + 1) for i, word in enumerate([*words, tail])) + len(content)
    assert checksum(buffer) == expected % 2**64
    place, flip = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    changed = buffer.clone()
    changed[place] ^= flip
    assert checksum(changed) != checksum(buffer)


def test_a_message_without_a_header_is_refused():
    for content in (b"", b"12345", (500).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"):
        with pytest.raises(BucketDamaged):
            tensors_in(torch.frombuffer(bytearray(content + b" "), dtype=torch.uint8))


# ---- the choice


def gpu(name: str, *visible: str, host: str = "a", direct: bool = True) -> Location:
    return Location(host, name, visible or (name,), direct)


@pytest.mark.parametrize(
    ("learner", "engines", "expected"),
    [
        (Location("a"), [Location("a"), Location("b")], "object_store"),
        (gpu("0"), [gpu("0"), gpu("0")], "ipc"),
        (gpu("0"), [gpu("1", "0", "1")], "ipc"),
        (gpu("0"), [gpu("1"), gpu("2")], "broadcast"),
        (gpu("0"), [gpu("1"), gpu("2", host="b")], "broadcast"),
        (gpu("0"), [gpu("1"), gpu("1")], "object_store"),
        (gpu("0"), [gpu("0", host="b")], "object_store"),
        (gpu("0"), [Location("a")], "object_store"),
        (Location("a"), [gpu("0")], "object_store"),
        (gpu("0"), [Location("a", direct=False)], "object_store"),
    ],
)
def test_auto_takes_shared_memory_on_one_gpu_and_a_broadcast_between_gpus(learner, engines, expected):
    assert choose_transport("auto", learner, engines) == expected
    assert choose_transport("object_store", learner, engines) == "object_store"


@pytest.mark.parametrize(
    ("setting", "learner", "engines", "reason"),
    [
        ("ipc", Location("a"), [Location("a")], "first rank is on no GPU"),
        ("ipc", gpu("0"), [gpu("0"), Location("a")], "rollout actor 1 keeps no weights on a GPU"),
        ("ipc", gpu("0"), [gpu("1")], "does not see the learner's GPU"),
        ("broadcast", gpu("0"), [gpu("0")], "no two processes on one GPU"),
        ("broadcast", Location("a"), [Location("a", direct=False)], "stands before a server"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(setting, learner, engines, reason):
    with pytest.raises(ConfigError, match=reason):
        choose_transport(setting, learner, engines)


def test_between_cpus_a_broadcast_may_be_asked_for():
    assert choose_transport("broadcast", Location("a"), [Location("a"), gpu("0")]) == "broadcast"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weight_transfer": "ipc"}, "set learner_device and rollout_device to cuda"),
        ({"weight_transfer": "ipc", "learner_device": "cuda"}, "rollout_device to cuda"),
        (
            {
                "weight_transfer": "broadcast",
                "rollout_actors": 1,
                "rollout": {"backend": "vllm", "url": ("http://a:1",)},
            },
            "vLLM servers are given weights by their actors",
        ),
        ({"learner_gpus": 0.5, "learner_device": "cuda"}, "no two ranks on one GPU"),
    ],
)
def test_a_configuration_in_which_it_cannot_work_is_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        ClusterConfig(**settings)


# ---- transfers


class OwnMemory:
    """Stands for GPU memory that processes share: threads of this process open a buffer by a number."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def share(self, buffer: torch.Tensor) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def open(self, number: int) -> torch.Tensor:
        return self.buffers[number]


class Flipping(Receiver):
    """A receiver one of whose buckets changes on the way."""

    def fetch(self, note, opened):
        bucket = super().fetch(note, opened)
        bucket[-1] ^= 1
        return bucket


class Peers:
    """A sender and receivers, each in a thread of its own as in processes, over real stores and groups."""

    def __init__(self, transport: str, kinds: list[type[Receiver]], timeout_s: float = 20.0) -> None:
        memory = OwnMemory()
        self.memory = memory
        self.sender = Sender(transport, len(kinds), CPU, timeout_s, share=memory.share)
        self.receivers = [kind(self.sender.link, i, CPU, open_shared=memory.open) for i, kind in enumerate(kinds)]
        self.pool = ThreadPoolExecutor(len(kinds) + 1)
        joins = [self.pool.submit(peer.join) for peer in (self.sender, *self.receivers)]
        for join in joins:
            join.result(40)

    def send(self, key: str, buckets, takes=None):
        """(what the sender returned or raised, the same of each receiver, what each took)"""
        taken: list[list[torch.Tensor]] = [[] for _ in self.receivers]
        takes = takes or [own.append for own in taken]
        calls = [self.pool.submit(self.sender.send, key, buckets)]
        for receiver, take in zip(self.receivers, takes, strict=True):
            calls.append(self.pool.submit(lambda r=receiver, t=take: asyncio.run(r.receive(key, t))))
        sent, *received = [call.exception(40) or call.result() for call in calls]
        return sent, received, taken

    def close(self) -> None:
        for peer in (self.sender, *self.receivers):
            peer.close()
        self.pool.shutdown()


@pytest.fixture(params=["broadcast", "ipc"])
def peers(request):
    made = []

    def make(*kinds: type[Receiver], timeout_s: float = 20.0) -> Peers:
        made.append(Peers(request.param, list(kinds), timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_every_receiver_gets_every_message_in_order_with_two_in_memory(peers):
    both = peers(Receiver, Receiver)
    contents = [bytes([i]) * (40 - i) for i in range(7)]
    for key in ("1", "2"):
        sent, received, taken = both.send(key, map(BytesBucket, contents))
        assert sent == sum(map(len, contents))
        assert received == [None, None]
        assert [[content_of(m) for m in own] for own in taken] == [contents, contents]
    addresses = {buffer.data_ptr() for buffer in both.memory.buffers}
    assert len(addresses) <= 4, "two buffers for each version"


def test_a_byte_that_flips_is_refused_by_its_receiver_and_holds_up_nobody(peers):
    both = peers(Flipping, Receiver)
    sent, (one, two), taken = both.send("1", [BytesBucket(b"abcdefgh"), BytesBucket(b"xyz")])
    assert isinstance(one, BucketDamaged)
    assert "bucket 0 of version 1 arrived altered" in str(one)
    assert (sent, two) == (11, None)
    assert (taken[0], len(taken[1])) == ([], 2)
    assert both.send("2", [BytesBucket(b"again")])[1][1] is None, "the transport itself is whole"


def test_a_receiver_that_refuses_a_version_lets_the_others_have_it(peers):
    both = peers(Receiver, Receiver)

    def refuse(bucket):
        raise ConfigError("another base")

    taken: list[bytes] = []
    sent, (one, two), _ = both.send(
        "1", [BytesBucket(b"ab")] * 3, [refuse, lambda bucket: taken.append(content_of(bucket))]
    )
    assert isinstance(one, ConfigError)
    assert (sent, two, taken) == (6, None, [b"ab"] * 3)


def test_messages_that_cannot_be_packed_are_not_waited_for(peers):
    def failing():
        yield BytesBucket(b"ab")
        raise OSError("disk full")

    both = peers(Receiver, Receiver)
    sent, received, _ = both.send("1", failing())
    assert isinstance(sent, OSError)
    assert ["disk full" in str(error) for error in received] == [True, True]


class Gone(Receiver):
    """A receiver that ends in the middle of a version, as one that is killed does: it closes its connections."""

    def fetch(self, note, opened):
        if getattr(self, "moved", 0) == 2:
            self.close()
            raise SystemExit
        self.moved = getattr(self, "moved", 0) + 1
        return super().fetch(note, opened)


def test_a_receiver_that_is_gone_breaks_the_transport_within_the_timeout(peers):
    both = peers(Receiver, Gone, timeout_s=10.0)  # a busy machine meets in seconds
    sent, (one, two), _ = both.send("1", [BytesBucket(bytes(20_000))] * 6)
    assert isinstance(sent, TransferBroken)
    assert isinstance(one, TransferBroken)
    assert isinstance(two, SystemExit)
    with pytest.raises(TransferBroken, match="closed"):
        both.sender.send("2", [])


def test_a_receiver_that_never_joins_is_named_within_the_timeout():
    sender = Sender("broadcast", 1, CPU, 20.0)
    sender.link = dataclasses.replace(sender.link, timeout_s=0.5)
    with pytest.raises(TransferBroken, match="did not join"):
        sender.join()
