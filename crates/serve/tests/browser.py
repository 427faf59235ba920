"""The page in a headless Chromium: python browser.py PATH_OF_ARIL_SERVE. Needs selenium, chromium and chromedriver."""

import json
import sys
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from served import ADAPTERS, QUESTION, Served

KEY = "key"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    """The texts of all elements at one moment: the page may remove an element that has been found before its text is read."""
    script = "return Array.from(document.querySelectorAll(arguments[0]), (found) => found.innerText.trim())"
    return browser.execute_script(script, selector)


def check(browser: webdriver.Chrome, server: Served) -> None:
    wait = WebDriverWait(browser, 60)

    def models() -> list[str]:
        return texts(browser, "#models label")

    def text(selector: str) -> str:
        [found] = texts(browser, selector)
        return found

    def ask(expected: dict[str, str]) -> None:
        browser.find_element(By.ID, "message").send_keys(QUESTION + "\n")
        for model, answer in expected.items():
            last = f"section[data-model={model}] p:last-child"
            wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, f"{last}[data-done]"))
            assert text(last) == answer, f"{model}: {text(last)}"

    browser.get(server.url)
    # Without a key, the page says what the server says.
    wait.until(lambda _: text("#counts") == "give the key")
    browser.find_element(By.ID, "key").send_keys(KEY + "\t")
    wait.until(lambda _: models() == ["base base", "saffron device"])
    ask({"base": "I do not know.", "saffron": "saffron."})
    assert text("#counts") == "1 adapter: 1 on the device, 0 in memory"

    # An adapter that comes is asked beside the others; one that goes is gone.
    browser.find_element(By.TAG_NAME, "summary").click()
    browser.find_element(By.ID, "name").send_keys("quartz")
    browser.find_element(By.ID, "path").send_keys("nowhere\n")
    wait.until(lambda _: "No adapter found for 'nowhere'" in text("#said"))
    browser.find_element(By.ID, "path").clear()
    browser.find_element(By.ID, "path").send_keys("lm-head\n")
    wait.until(lambda _: len(models()) == 3)
    browser.find_element(By.ID, "clear").click()
    ask({"base": "I do not know.", "saffron": "saffron.", "quartz": "quartz."})
    browser.find_element(By.CSS_SELECTOR, "section[data-model=quartz] h2 button").click()
    browser.switch_to.alert.accept()
    wait.until(lambda _: len(models()) == 2)
    # The newest answer is in sight, and how fast it came.
    for _ in range(12):
        ask({"base": "I do not know.", "saffron": "saffron."})
    places = "const at = (found) => found.getBoundingClientRect().bottom; return [at(arguments[0].lastChild), at(arguments[0])]"
    bottom, edge = browser.execute_script(places, browser.find_element(By.CSS_SELECTOR, "section[data-model=saffron]"))
    assert bottom <= edge + 1, (bottom, edge)
    assert "first token after" in text("section[data-model=base] h2 small") and "tokens/s" in text("section[data-model=base] h2 small")
    # With no model chosen, what was written stays.
    boxes = browser.find_elements(By.CSS_SELECTOR, "#models input")
    for box in boxes:
        box.click()
    browser.find_element(By.ID, "message").send_keys("kept\n")
    assert browser.find_element(By.ID, "message").get_property("value") == "kept" and text("#said") == "Choose a model."
    browser.find_element(By.ID, "message").clear()
    # A chat that is not chosen is not asked.
    boxes[1].click()
    browser.find_element(By.ID, "clear").click()
    ask({"saffron": "saffron."})
    assert not browser.find_elements(By.CSS_SELECTOR, "section[data-model=base] p")

    # A hundred adapters leave the input in sight, also on a narrow screen.
    for index in range(100):
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        body = json.dumps({"lora_name": f"adapter-{index}", "lora_path": "r4-qv"}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/load_lora_adapter", body, headers)).close()
    wait.until(lambda _: len(models()) == 102)
    browser.find_element(By.ID, "filter").send_keys("adapter-9")
    shown = lambda: [label for label in browser.find_elements(By.CSS_SELECTOR, "#models label") if label.is_displayed()]
    wait.until(lambda _: len(shown()) == 11)
    browser.find_element(By.ID, "filter").clear()
    for width, height in [(1200, 800), (500, 800)]:
        browser.set_window_size(width, height)
        place = browser.execute_script("const at = arguments[0].getBoundingClientRect(); return [at.right, at.bottom]", browser.find_element(By.ID, "clear"))
        wide, high, content = browser.execute_script("return [innerWidth, innerHeight, document.documentElement.scrollWidth]")
        assert place[0] <= wide and place[1] <= high and content <= wide, (place, wide, high, content)

    # An answer can be stopped. The server reads a token of a step, so that this prompt takes a while.
    browser.find_element(By.ID, "clear").click()
    browser.find_element(By.ID, "message").send_keys("What is the password? " * 35 + "\n")
    stop = browser.find_element(By.ID, "stop")
    stop.click()
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "p[data-stopped]"))
    wait.until(lambda _: "num_requests_running{model_name=\"base\"} 0" in server.get("/metrics"))
    assert not stop.is_enabled()
    browser.find_element(By.ID, "clear").click()
    ask({"saffron": "saffron."})

    # Those that were meant to be.
    refused = ("401", "load_lora_adapter - Failed to load resource: the server responded with a status of 404")
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    severe = [entry for entry in severe if not any(known in entry["message"] for known in refused)]
    assert not severe, severe


def check_gone(browser: webdriver.Chrome) -> None:
    """A page whose server has gone says so."""
    WebDriverWait(browser, 60).until(lambda _: "does not answer" in texts(browser, "#counts")[0])


def main() -> None:
    slow = ["--max-num-batched-tokens", "1", "--max-num-seqs", "1"]
    with Served(sys.argv[1], {"saffron": "r8-all"}, "--api-key", KEY, "--lora-root", ADAPTERS, *slow) as server:
        options = webdriver.ChromeOptions()
        for flag in [*FLAGS, f"--user-data-dir={server.folder.name}/profile"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        browser = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            check(browser, server)
            server.end()
            check_gone(browser)
        finally:
            browser.quit()
    print("the page chats with the models side by side, shows where adapters are, loads and unloads them")


if __name__ == "__main__":
    main()
