"""The API as OpenAI's own client sees it, equality with `tad.generate`, and the events of a stream."""

from __future__ import annotations

import json
import math
import socket
import threading
from typing import Any

import pytest
from live_server import Live, live, wait_until

import tad
from tad.models import LM
from tad.serving import Settings
from tad.serving.card import model_card
from tad.serving.validation import RequestValidator

openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

QUESTION = "What is six times seven?"
SAMPLED = {"seed": 7, "temperature": 0.8, "top_p": 0.95}


def client_of(server: Live) -> Any:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=server.client()
    )


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And you?"},
]
PARTS = [{"type": "text", "text": "And "}, {"type": "text", "text": "you?"}]
SAME_TURNS = [
    {**TURNS[0], "role": "developer"},
    {**TURNS[1], "name": "me"},
    {**TURNS[2], "refusal": None, "tool_calls": None},  # an answer as OpenAI's client gives it, sent back
    {"role": "user", "content": PARTS},
]
# What a request says besides the question, and what `tad.generate` is given for it.
CALLS: dict[str, tuple[dict, dict]] = {
    "greedy": ({}, {}),
    "sampled, cached": ({"decoder": "tad-cached", **SAMPLED}, {"decoder": "tad-cached", **SAMPLED}),
    "threshold": ({"threshold": 2.0}, {"threshold": 2.0}),
    "prefix": ({"prefix": "The answer is"}, {"prefix": "The answer is"}),
    "several turns": ({"messages": SAME_TURNS}, {"prompts": TURNS}),
    "one by one": ({"decoder": "one-by-one"}, {"decoder": "one-by-one"}),
    "d2f, sampled": ({"decoder": "d2f", **SAMPLED}, {"decoder": "d2f", **SAMPLED}),
}
LONG = ("one by one", "d2f, sampled")


@pytest.mark.parametrize(
    "call", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CALLS]
)
@pytest.mark.parametrize("family", ["plain", "dream"])
def test_chat_equals_generate_streamed_or_not(
    call: str, family: str, server: Live, dream_server: Live, request: pytest.FixtureRequest
) -> None:
    lm, server = request.getfixturevalue(family), server if family == "plain" else dream_server
    fields, settings = CALLS[call]
    wanted = tad.generate(lm, **{"prompts": QUESTION, "gen_length": 64, **settings})
    if call != "greedy":
        assert wanted.decoded.steps != tad.generate(lm, QUESTION, gen_length=64).decoded.steps
    asked = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    ours = {name: fields[name] for name in ("decoder", "threshold", "prefix") if name in fields}
    asked |= {name: value for name, value in fields.items() if name not in ours} | {"extra_body": ours}
    client = client_of(server)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.completion_tokens == len(wanted.decoded.content)
    assert whole.usage.forwards == wanted.forwards
    assert whole.usage.tpf == pytest.approx(wanted.tpf)
    assert whole.tad["threshold"] == settings.get("threshold", whole.tad["threshold"])
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "token ids"])
def test_completions_equal_raw_generate(plain: LM, server: Live, as_ids: bool) -> None:
    prompts = ["Once upon a time", "The end", "x"]
    ids = [plain.encode_text(prompt) for prompt in prompts]
    wanted = [tad.generate(plain, prompt, gen_length=32, raw=True).text for prompt in prompts]
    call = {"model": server.model, "max_tokens": 32}
    client = client_of(server)
    answer = client.completions.create(prompt=ids if as_ids else prompts, **call)
    assert [choice.text for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    one = ids[0] if as_ids else prompts[0]
    assert client.completions.create(prompt=one, **call).choices[0].text == wanted[0]
    chunks = list(client.completions.create(prompt=one, stream=True, **call))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted[0]


def test_control_tokens_in_a_prompt_are_text_unless_asked_for(plain: LM, server: Live) -> None:
    client = client_of(server)
    call = {"model": server.model, "prompt": plain.family.end_of_turn_text, "max_tokens": 32}
    counts = [
        client.completions.create(**call, extra_body={"allow_special": allow}).usage.prompt_tokens
        for allow in (True, False)
    ]
    assert counts[0] == 1
    assert counts[1] == len(plain.encode_text(call["prompt"])) > 1


def test_max_tokens_is_rounded_up_to_a_block_and_the_answer_cut(plain: LM, server: Live) -> None:
    wanted = tad.generate(plain, QUESTION, gen_length=64)
    cut = plain.decode(wanted.decoded.answer[:40])
    for field in ("max_tokens", "max_completion_tokens"):
        answer = server.chat(QUESTION, **{field: 40}).json()
        assert answer["choices"][0]["message"]["content"] == cut
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 40
        assert answer["tad"]["gen_length"] == 64


def test_stop_ends_the_answer_before_it(plain: LM, server: Live) -> None:
    text = tad.generate(plain, QUESTION, gen_length=64).text
    whole = server.chat(QUESTION, max_tokens=64).json()
    stop = next(
        text[i : i + 2]
        for i in range(8, len(text))
        if text.index(text[i : i + 2]) == i and "\ufffd" not in text[i : i + 2]
    )
    for asked in (stop, [stop, "never there"]):
        answer = server.chat(QUESTION, max_tokens=64, stop=asked).json()
        assert answer["choices"][0]["message"]["content"] == text[: text.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    events = server.events(QUESTION, max_tokens=64, stop=stop)
    assert stream_text(events) == text[: text.index(stop)]


def test_without_a_seed_one_is_drawn_and_told(server: Live) -> None:
    first, second = (server.chat(temperature=1.0, max_tokens=32).json() for _ in range(2))
    assert first["tad"]["seed"] != second["tad"]["seed"]
    again = server.chat(temperature=1.0, max_tokens=32, seed=first["tad"]["seed"]).json()
    assert again["choices"] == first["choices"]


def test_the_adapter_is_a_choice_of_each_request_and_on_by_default(student: LM) -> None:
    on = tad.generate(student, QUESTION, gen_length=32)
    with student.base():
        off = tad.generate(student, QUESTION, gen_length=32)
    assert on.text != off.text
    with live(student) as server:
        said = {
            choice: server.chat(QUESTION, max_tokens=32, **choice_fields).json()
            for choice, choice_fields in (
                ("default", {}),
                ("on", {"adapter": True}),
                ("off", {"adapter": False}),
            )
        }
        card = server.client().get("/v1/models").json()["data"][0]
    texts = {choice: answer["choices"][0]["message"]["content"] for choice, answer in said.items()}
    assert texts == {"default": on.text, "on": on.text, "off": off.text}
    assert [answer["tad"]["adapter"] for answer in said.values()] == [True, True, False]
    assert card["tad"]["adapter"] == student.adapter


def stream_text(events: list[tuple[str | None, Any]]) -> str:
    chunks = [data for name, data in events if name is None and data != "[DONE]"]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"])


def test_reveals_tell_everything_a_canvas_needs(plain: LM, server: Live) -> None:
    events = server.events(QUESTION, max_tokens=60, reveals=True, decoder="tad", threshold=3.0, seed=5)
    names = [name for name, _ in events]
    begin, reveals = events[0][1], [data for name, data in events if name == "reveal"]
    end = dict(event for event in events if event[0])["end"]
    assert names[0] == "begin"
    assert events[-1] == (None, "[DONE]")
    assert names.index("end") > max(i for i, name in enumerate(names) if name == "reveal")
    assert begin["gen_length"] == 64
    assert begin["max_tokens"] == 60
    assert begin["block"] == 32
    assert begin["mask"] == plain.family.mask_text
    assert begin["prompt_tokens"] == len(plain.encode(QUESTION))
    assert (begin["decoder"], begin["threshold"], begin["adapter"], begin["seed"]) == ("tad", 3.0, False, 5)
    mask = plain.tokens.mask
    canvas = [mask] * 64
    for number, reveal in enumerate(reveals, start=1):
        assert reveal["forward"] == number
        assert {position // 32 for position in reveal["positions"]} <= set(reveal["blocks"])
        for position, token, text in zip(reveal["positions"], reveal["tokens"], reveal["texts"], strict=True):
            assert canvas[position] == mask
            assert text == plain.decode([token], skip_special=False)
            assert end["steps"][position] == number
            canvas[position] = token
        assert reveal["masks"] == canvas.count(mask)
    ended = end["finish_reason"] == "stop"
    fill = plain.tokens.eos if ended else mask
    assert end["tokens"] == [fill if token == mask else token for token in canvas]
    assert end["forwards"] == end["usage"]["forwards"] == len(reveals)
    assert end["text"] == stream_text(events)


def test_text_of_a_stream_comes_before_its_end(plain: LM, server: Live) -> None:
    """The first text chunk comes when later positions are still masks."""
    events = server.events(QUESTION, max_tokens=96, reveals=True, decoder="one-by-one")
    first = next(
        i
        for i, (name, data) in enumerate(events)
        if name is None and data["choices"][0]["delta"].get("content")
    )
    assert any(name == "reveal" for name, _ in events[first:])


def test_usage_of_a_stream_comes_when_asked_for(server: Live) -> None:
    call = {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}
    client = client_of(server)
    *_, last = client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.model_dump() == client.chat.completions.create(**call).usage.model_dump()
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**call, stream=True))


def test_models_tell_what_a_client_needs(plain: LM, server: Live) -> None:
    client = client_of(server)
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id == "tiny-llada"
    facts = card.tad
    assert facts["context"] == plain.context
    assert facts["decoder"] == "tad"
    assert facts["mask"] == {"id": plain.tokens.mask, "text": plain.family.mask_text}
    by_name = {one["name"]: one for one in facts["decoders"]}
    assert by_name["tad"]["threshold"]["default"] == 0.5
    assert by_name["tad"]["block"] == 32
    assert by_name["llada"]["threshold"] is None
    assert by_name["dream"]["block"] is None
    assert facts["limits"]["max_tokens"] == plain.context // 2
    for name, one in by_name.items():
        if one["threshold"] is not None:
            answer = server.chat(max_tokens=32, decoder=name, threshold=one["threshold"]["max"])
            assert answer.status_code == 200, answer.text


def test_a_block_diffusion_model_answers_with_its_own_decoders() -> None:
    lm = tad.load("nano-fast-dllm-v2", device="cpu")
    with live(lm, Settings()) as server:
        (card,) = server.client().get("/v1/models").json()["data"]
        assert {one["block"] for one in card["tad"]["decoders"]} == {32}
        for one in card["tad"]["decoders"]:
            wanted = tad.generate(lm, QUESTION, decoder=one["name"], gen_length=64)
            answer = server.chat(QUESTION, max_tokens=64, decoder=one["name"]).json()
            assert answer["choices"][0]["message"]["content"] == wanted.text
        refused = server.chat(QUESTION, decoder="tad")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "decoder")


def test_the_servers_own_decoder_and_threshold_are_the_default(plain: LM) -> None:
    with live(plain, Settings(decoder="fast-dllm", threshold=0.3, name="mine")) as server:
        answer = server.chat(QUESTION, max_tokens=32).json()
        card = server.client().get("/v1/models/mine").json()
    wanted = tad.generate(plain, QUESTION, decoder="fast-dllm", gen_length=32, threshold=0.3)
    assert answer["choices"][0]["message"]["content"] == wanted.text
    assert (answer["model"], answer["tad"]["decoder"], answer["tad"]["threshold"]) == (
        "mine",
        "fast-dllm",
        0.3,
    )
    ours = next(one for one in card["tad"]["decoders"] if one["name"] == "fast-dllm")
    assert ours["threshold"]["default"] == 0.3


def test_examples_come_with_nano_models_only(
    plain: LM, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_card(RequestValidator(plain, Settings()))["tad"]["examples"] == []
    monkeypatch.setattr(plain, "source", "nano-llada")
    examples = model_card(RequestValidator(plain, Settings()))["tad"]["examples"]
    assert {example["title"].split()[0] for example in examples} == {"nano-word", "nano-math", "nano-code"}
    assert all(example["prompt"] for example in examples)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"toolz": []}, "toolz"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "12"}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": 8, "max_completion_tokens": 8}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"decoder": "magic"}, "decoder"),
        ({"threshold": -1}, "threshold"),
        ({"decoder": "llada", "threshold": 0.5}, "threshold"),
        ({"adapter": True}, "adapter"),
        ({"reveals": True}, "reveals"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "cache": True}]}, "messages.0.cache"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"stop": ["\ud800"]}, "stop.0"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_refused_by_name(server: Live, fields: dict, param: str) -> None:
    content = json.dumps({**server.body(), **fields})  # escapes what UTF-8 cannot carry
    response = server.client().post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


def test_values_that_change_nothing_and_nulls_are_accepted(server: Live) -> None:
    neutral = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "stop": None,
        "seed": None,
        "stream": None,
    }
    plain = server.chat(max_tokens=32)
    answer = server.chat(max_tokens=32, **neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]
    completion = {
        "model": server.model,
        "prompt": "x",
        "max_tokens": 32,
        "echo": False,
        "best_of": 1,
        "suffix": None,
    }
    assert server.client().post("/v1/completions", json=completion).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_n_answers_have_seeds_that_follow_each_other(plain: LM, server: Live, stream: bool) -> None:
    wanted = [
        tad.generate(plain, QUESTION, gen_length=32, seed=7 + number, temperature=0.8).text
        for number in range(3)
    ]
    assert len(set(wanted)) == 3
    call = {
        "model": server.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "seed": 7,
        "temperature": 0.8,
        "n": 3,
    }
    client = client_of(server)
    if not stream:
        answer = client.chat.completions.create(**call)
        assert [choice.message.content for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.prompt_tokens == len(plain.encode(QUESTION))
        return
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**call, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == wanted


def test_logprobs_are_the_confidences_of_the_revealed_tokens(plain: LM, server: Live) -> None:
    row = tad.generate(plain, QUESTION, gen_length=32).decoded
    wanted = [math.log(sure) for sure in row.confidence[: len(row.answer)]]
    call = {"model": server.model, "max_tokens": 32, "messages": [{"role": "user", "content": QUESTION}]}
    client = client_of(server)
    found = client.chat.completions.create(**call, logprobs=True).choices[0].logprobs.content
    assert [one.logprob for one in found] == pytest.approx(wanted, abs=1e-4)
    assert [one.token for one in found] == [plain.decode([token], skip_special=False) for token in row.answer]
    chunks = list(client.chat.completions.create(**call, logprobs=True, stream=True))
    streamed = [
        one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content
    ]
    assert streamed == found
    completion = client.completions.create(model=server.model, prompt="Once", max_tokens=32, logprobs=1)
    parts = completion.choices[0].logprobs
    assert len(parts.tokens) == len(parts.token_logprobs) == len(parts.top_logprobs) == len(parts.text_offset)


def test_refused_requests_do_not_fill_the_request_log(plain: LM, capfd: pytest.CaptureFixture[str]) -> None:
    with live(plain, Settings(request_log=True)) as server:
        client = server.client()
        for _ in range(30):
            client.get("/nowhere")
        for _ in range(12):
            client.get("/health")
    lines = capfd.readouterr().err.splitlines()
    assert 10 <= sum("other 404" in line for line in lines) <= 20  # a minute may end meanwhile
    assert sum("/health 200" in line for line in lines) >= 12


def test_an_answer_to_a_connection_that_broke_the_protocol_is_not_logged(
    plain: LM, capfd: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with live(plain, Settings()) as server:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as link:
                link.sendall(head + b"0x5\r\nabcde\r\n0\r\n\r\n")
                assert b" 400 " in link.recv(1000)
    assert "Traceback" not in capfd.readouterr().err


def test_the_request_log_has_a_line_per_request_and_no_text(
    plain: LM, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(plain, Settings(request_log=True)) as server:
        answer = server.chat("my secret", max_tokens=32).json()
        server.events("my secret", max_tokens=32)
        server.client().get("/nowhere/secret?key=secret")
        server.chat(max_tokens=0)
    lines = [line.split() for line in capfd.readouterr().err.splitlines() if "127.0.0.1" in line]
    usage = answer["usage"]
    facts = f"completion_tokens={usage['completion_tokens']}", f"forwards={usage['forwards']}"
    assert [line[2:5] for line in lines] == [
        ["POST", "/v1/chat/completions", "200"],
        ["POST", "/v1/chat/completions", "200"],
        ["GET", "other", "404"],
        ["POST", "/v1/chat/completions", "400"],
    ]
    for line in lines[:2]:
        assert set(facts) <= set(line)
    assert not any("secret" in word for line in lines for word in line)


USER = {"role": "user", "content": "hi"}
# LangChain's were recorded; Open WebUI's is written after its documented fields.
BODIES = {
    "langchain chat": {"stream": False, "messages": [{"content": "hi", "name": "me", "role": "user"},
        {"content": "Hello.", "role": "assistant"}, {"content": [{"type": "text", "text": "again"}], "role": "user"}],
        "max_completion_tokens": 32, "stop": ["\n"], "temperature": 0.7},
    "langchain stream": {"stream": True, "messages": [USER], "logprobs": True, "seed": 3,
        "stream_options": {"include_usage": True}},
    "langchain completion": {"prompt": ["Once"], "frequency_penalty": 0, "logprobs": None, "max_tokens": 32, "n": 1,
        "presence_penalty": 0, "seed": None, "temperature": 0.7, "top_p": 1},
    "open webui": {"stream": True, "messages": [TURNS[0], USER], "stream_options": {"include_usage": True}},
}  # fmt: skip


@pytest.mark.parametrize("client", BODIES)
def test_requests_of_other_clients_are_answered(server: Live, client: str) -> None:
    body = {"model": server.model, **BODIES[client]}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.client().post(path, json=body)
    assert response.status_code == 200, response.text


def test_every_refusal_is_json_that_names_what_is_wrong(server: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny-llada"):
        client_of(server).chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    with server.client() as client:
        for method, path, body, status, part in (
            ("GET", "/v1/models/other/thing", None, 404, "message"),
            ("GET", "/v1/engines", None, 404, "message"),
            ("GET", "/v1/chat/completions", None, 405, "message"),
            ("POST", "/v1/chat/completions", {"model": server.model}, 400, "messages"),
            ("POST", "/v1/chat/completions", server.body("word " * 200), 400, "context_length_exceeded"),
        ):
            response = client.request(method, path, json=body)
            assert response.status_code == status, (method, path)
            error = response.json()["error"]
            assert error["message"]
            assert part in (*error, error["param"], error["code"])


def test_without_max_tokens_the_answer_takes_what_room_there_is(plain: LM, server: Live) -> None:
    text = "w" * 150
    room = plain.context - len(plain.encode(text))
    answer = server.chat(text)
    assert answer.json()["tad"]["gen_length"] == room // 32 * 32


def test_an_overfull_queue_is_a_429(plain: LM) -> None:
    with live(plain, Settings(batch=1, queue=1)) as server:
        gate = threading.Event()
        forward = plain.model.forward

        def held(*args: Any, **rest: Any) -> Any:
            gate.wait(30)
            return forward(*args, **rest)

        plain.model.forward = held
        try:
            threads = [threading.Thread(target=server.chat, kwargs={"max_tokens": 32}) for _ in range(2)]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.engine.running + server.engine.waiting == 2)
            refused = server.chat(max_tokens=32)
        finally:
            gate.set()
            plain.model.forward = forward
        for thread in threads:
            thread.join()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_metrics_count_what_happened(server: Live) -> None:
    def read() -> dict[str, float]:
        lines = server.client().get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    before = read()
    answer = server.chat(max_tokens=32).json()
    server.chat(max_tokens=0)
    list(server.events(max_tokens=32))
    after = read()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grew("tad_finished_total") == 2
    assert grew("tad_tokens_total") == 2 * answer["usage"]["completion_tokens"]
    assert grew("tad_forwards_total") == 2 * answer["usage"]["forwards"]
    assert grew('tad_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert grew('tad_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert grew("tad_first_text_seconds_count") <= 1


COMMON = {"tools": [{"type": "function"}], "top_k": 20, "frequency_penalty": 0.5, "reasoning_effort": None}


@pytest.mark.parametrize("stream", [False, True])
def test_fields_of_other_servers_are_ignored_and_named_in_a_header(server: Live, stream: bool) -> None:
    client = server.client()
    plain = client.post("/v1/chat/completions", json={**server.body(), "seed": 1})
    assert "x-tad-ignored" not in plain.headers
    answer = client.post(
        "/v1/chat/completions", json={**server.body(), **COMMON, "seed": 1, "stream": stream}
    )
    assert answer.status_code == 200
    assert set(answer.headers["x-tad-ignored"].split(", ")) == {"tools", "top_k", "frequency_penalty"}
    if not stream:
        assert answer.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("field", ["tools", "top_k", "frequency_penalty"])
def test_a_strict_server_refuses_them_by_name(plain: LM, field: str) -> None:
    with live(plain, Settings(strict=True)) as running:
        answer = running.client().post("/v1/chat/completions", json={**running.body(), field: COMMON[field]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_route_that_is_not_there_names_those_that_are(server: Live) -> None:
    answer = server.client().post("/v1/responses", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]
