"""What tokens read as on their own: asked for once, all of one answer together, of the tokenizer that knows them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from helpers.fake_control import FakeControl
from helpers.fake_replica import FakeReplica
from helpers.fronts import ask, open_fronts
from helpers.polling import poll
from helpers.router_harness import BOS, ByteTokenizer, router_config, running_router, text_request
from weft.v1 import control_pb2
from weft.v1 import inference_pb2 as pb

from router import token_names
from router.call import TokenName
from router.token_names import TokenNames
from router.tokenizer import ModelTokenizer
from router.tokenizer_pool import TokenizerPool
from workers.tokenizer import load_token_table


class NamedTokenizer(ByteTokenizer):
    """Writes its name before each token."""

    def __init__(self, name: str) -> None:
        self.name = name

    def decode(self, ids: tuple[int, ...], skip_special_tokens: bool = True) -> str:  # type: ignore[override]
        return "".join(f"{self.name}{token_id}" for token_id in ids)


class CountingPool(TokenizerPool):
    """Counts the calls into its threads."""

    num_runs = 0

    async def run(self, function: Callable[..., object], *args: object, **kwargs: object) -> object:  # type: ignore[override]
        self.num_runs += 1
        return await super().run(function, *args, **kwargs)


@pytest.fixture
def pool() -> Iterator[CountingPool]:
    pool = CountingPool(lambda path: ByteTokenizer(), num_threads=1)
    yield pool
    pool.close()


@pytest.mark.parametrize("path", ["models/stories3M", "tokenizers/llama2-32k", "tokenizers/gpt2", "tokenizers/qwen"])
async def test_names_of_tokens_joined_are_the_text(pool: CountingPool, shared: Path, path: str) -> None:
    tokenizer = ModelTokenizer.from_folder(shared / path)
    text = "Once upon a time, there was  a dog.\nIt said: hello! 😀 𓀀"
    token_ids = tokenizer.encode(text)

    names = await TokenNames(pool).of(tokenizer, token_ids)

    joined = b"".join(names[token_id].data for token_id in token_ids if not names[token_id].is_special)
    assert joined.decode().removeprefix(" ") == text
    assert any("�" in tokenizer.decode((token_id,)) for token_id in token_ids), "parts of characters are among them"


@pytest.mark.parametrize("path", ["models/stories3M", "tokenizers/llama2-32k", "tokenizers/gpt2"])
def test_name_where_a_text_begins_is_what_the_replica_makes_of_the_token(shared: Path, path: str) -> None:
    tokenizer, table = ModelTokenizer.from_folder(shared / path), load_token_table(shared / path)

    for token_id in {*range(300), *tokenizer.encode("Once upon  a time: 😀 𓀀")}:
        name = tokenizer.token_name(token_id)
        read = name.data if name.first_data is None else name.first_data
        assert (name.data, read) == (table.piece(token_id), table.first_piece(token_id))


async def test_all_that_are_missing_are_asked_for_in_one_call_and_once(pool: CountingPool) -> None:
    names, tokenizer = TokenNames(pool), ByteTokenizer()
    assert await names.of(tokenizer, b"hello") == {ord(letter): TokenName(letter.encode()) for letter in "hello"}
    assert pool.num_runs == 1
    assert await names.of(tokenizer, b"hole") == {ord(letter): TokenName(letter.encode()) for letter in "hole"}
    assert pool.num_runs == 1


async def test_full_table_takes_no_name_from_a_request(pool: CountingPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_names, "_MAX_TOKEN_NAMES", 3)
    names, tokenizer = TokenNames(pool), ByteTokenizer()
    await names.of(tokenizer, b"abc")
    both = await asyncio.gather(names.of(tokenizer, b"ade"), names.of(tokenizer, b"bfghi"))
    assert both == [{ord(letter): TokenName(letter.encode()) for letter in letters} for letters in ("ade", "bfghi")]
    assert len(names._kept[tokenizer]) <= 3


async def test_another_tokenizer_has_other_names(pool: CountingPool) -> None:
    names = TokenNames(pool)
    for tokenizer in (NamedTokenizer("old"), NamedTokenizer("new")):
        assert await names.of(tokenizer, (1,)) == {1: TokenName(f"{tokenizer.name}1".encode())}


async def test_model_from_another_folder_has_the_names_of_that_folder() -> None:
    request = text_request("x", max_tokens=2)
    request.sampling.logprobs = 0
    async with (
        FakeControl() as control,
        FakeReplica("a") as a,
        running_router(
            router_config(control=control.address, http_port=0),
            load_tokenizer=lambda text: NamedTokenizer(text.path),
        ) as router,
        open_fronts(router) as fronts,
    ):

        async def text_of_1() -> str:
            return (await router.stub.Detokenize(pb.DetokenizeRequest(model="tiny", token_ids=[1]))).text

        for path in ("/old", "/new"):
            control.set_membership(
                control_pb2.WatchReplicasResponse(
                    models=[control_pb2.ServedModel(name="tiny", path=path, max_context=512)],
                    replicas=[control_pb2.ReplicaEndpoint(replica_id="a", model="tiny", address=a.address)],
                )
            )
            await router.wait_ready(1)
            await poll(text_of_1, f"{path}1")
            answer = await ask(fronts["http"], request)
            assert [each.token[:4] for each in answer.logprobs] == [path] * 2


class MarkingTokenizer(ByteTokenizer):
    """Writes special tokens out where they are not skipped."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join(chr(token_id) if token_id < 256 else special for token_id in ids)


async def test_echo_of_token_ids_writes_special_tokens_out() -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0), load_tokenizer=lambda _: MarkingTokenizer()) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}") as http,
    ):
        await router.wait_ready(1)
        body = {"prompt": [BOS, *b"hi"], "echo": True, "max_tokens": 1}
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"].startswith("<s>hi")
