"""The server's chat page in a headless browser: a chat, its stream, an image, a key, and what the server refuses."""

import pytest

import zoo
from tests.zoo.browser import COMMAND, Browser
from tests.zoo.test_serve import CHAT, MESSAGES, NEW, ROOM, Running, greedy


pytestmark = [pytest.mark.thorough, pytest.mark.skipif(COMMAND is None, reason="no Chromium in the PATH")]
SEND = '$("form").requestSubmit()'
IMAGE = """new Promise(done => {
    const canvas = document.createElement("canvas");
    canvas.toBlob(blob => done(add([new File([blob], "a.png", {type: "image/png"})])));
})"""


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


def test_chat(tmp_path, model):
    tokenizer = zoo.tokenizer("tiny")
    with Running(model, tokenizer, max_tokens=ROOM) as running, Browser(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{running.port}/")
        browser.wait('document.querySelectorAll("#model option").length')
        assert browser.run('$("model").value') == "tiny" and browser.run('$("lock").hidden')

        asked = MESSAGES[0]["content"]
        browser.run(f'$("temperature").value = 0; $("tokens").value = {NEW}; $("text").value = "{asked}"; {SEND}')
        browser.wait("running === null && messages.length == 2")
        ids = tokenizer.encode(tokenizer.render(MESSAGES, add_generation_prompt=True), special=False)
        want = [*MESSAGES, {"role": "assistant", "content": greedy(model, tokenizer, ids)}]
        assert browser.run("messages") == want
        assert browser.run('document.querySelector("article.assistant div").textContent') == want[1]["content"]

        browser.run(IMAGE)
        browser.wait("images.length == 1")
        browser.run(f'$("text").value = "What is it?"; {SEND}')
        browser.wait('running === null && document.querySelector("article.error")')
        assert "this server takes no images" in browser.run('document.querySelector("article.error").textContent')
        assert browser.run("messages") == want  # as before

        browser.run(f'$("tokens").value = ""; $("text").value = "On."; {SEND}; $("stop").click()')
        browser.wait('running === null && $("stop").hidden')
        browser.run('$("clear").click()')
        assert browser.run('messages.length + document.querySelectorAll("article").length') == 0


def test_key(tmp_path, model):
    """The page asks for the key of a server that has one, and keeps it."""
    with (
        Running(model, zoo.tokenizer("tiny"), max_tokens=ROOM, api_key="sesame") as running,
        Browser(tmp_path) as browser,
    ):
        browser.open(f"http://127.0.0.1:{running.port}/")
        browser.wait('!$("lock").hidden')
        browser.run('$("key").value = "sesame"; $("key").dispatchEvent(new Event("change"))')
        browser.wait('$("lock").hidden && document.querySelectorAll("#model option").length')


def test_image(untyped, load_vision, vision_folders, tmp_path):
    """An image goes to a model that takes it, and its reply comes as to any client."""
    model, tokenizer = load_vision("gemma3-pattern"), zoo.tokenizer(vision_folders["gemma3-pattern"])
    with Running(model, tokenizer) as running, Browser(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{running.port}/")
        browser.wait('document.querySelectorAll("#model option").length')
        browser.run(IMAGE)
        browser.wait("images.length == 1")
        browser.run(f'$("temperature").value = 0; $("tokens").value = 4; $("text").value = "what is it"; {SEND}')
        browser.wait("running === null && messages.length == 2")
        asked, reply = browser.run("messages")
        assert [part["type"] for part in asked["content"]] == ["image_url", "text"]
        answer = running.ask(CHAT, messages=[asked], max_tokens=4, temperature=0)
        assert reply["content"] == answer["choices"][0]["message"]["content"] != ""
