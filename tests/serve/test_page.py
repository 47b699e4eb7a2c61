"""The chat page in a headless Chromium: at a desk and on a phone, with the keyboard alone."""

import shutil
from collections.abc import Iterator

import pytest

from tests.helpers.servers import ServerProcess

webdriver = pytest.importorskip('selenium.webdriver')

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

DRIVER = shutil.which('chromedriver')
SECONDS = 90
PROMPT = 'class Stack:'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None, reason='needs the packages chromium and chromium-driver'),
]


@pytest.fixture(scope='module')
def server() -> Iterator[ServerProcess]:
    with ServerProcess.demo() as server:
        yield server


@pytest.fixture(params=[(1280, 800), (390, 844)], ids=['desk', 'phone'])
def browser(request: pytest.FixtureRequest) -> Iterator['webdriver.Chrome']:
    width, height = request.param
    options = webdriver.ChromeOptions()
    for argument in ('--headless=new', '--no-sandbox', '--disable-dev-shm-usage', f'--window-size={width},{height}'):
        options.add_argument(argument)
    if width < 500:
        metrics = {'width': width, 'height': height, 'pixelRatio': 2.0, 'touch': True}
        options.add_experimental_option('mobileEmulation', {'deviceMetrics': metrics})
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    messages = driver.get_log('browser')
    driver.quit()
    assert not [message for message in messages if message['level'] == 'SEVERE'], messages


def text_of(browser: 'webdriver.Chrome', identity: str) -> str:
    return browser.find_element(By.ID, identity).text


def wait(browser: 'webdriver.Chrome', condition: str) -> None:
    """Until a JavaScript expression holds."""
    WebDriverWait(browser, SECONDS).until(lambda driver: driver.execute_script(f'return {condition}'))


def open_page(browser: 'webdriver.Chrome', server: ServerProcess) -> None:
    browser.get(server.url)
    wait(browser, 'state.model !== null')


def test_an_answer_marks_what_was_drafted(browser, server):
    open_page(browser, server)
    assert '7 drafted tokens' in text_of(browser, 'model')
    field = browser.switch_to.active_element
    assert field.get_attribute('id') == 'prompt', 'the field has the focus'
    field.send_keys(PROMPT + Keys.SHIFT + Keys.ENTER + Keys.NULL + '    def push(self):' + Keys.ENTER)
    wait(browser, "document.querySelectorAll('.mark.drafted').length > 1")  # the legend's, and a live one
    wait(browser, 'state.controller === null')
    marks = browser.execute_script(
        "return [...document.querySelectorAll('.assistant .mark')].map((m) => [m.className, m.textContent])"
    )
    assert {kind for kind, _ in marks} == {'mark drafted', 'mark own'}
    history = browser.execute_script('return state.history')
    assert [turn['role'] for turn in history] == ['user', 'assistant']
    assert history[0]['content'] == f'{PROMPT}\n    def push(self):'
    assert ''.join(text for _, text in marks) == history[1]['content']
    steps = browser.execute_script('return state.steps')
    assert 1 + sum(step['gained'] for step in steps) == 256
    assert max(step['gained'] for step in steps) > 1
    assert float(text_of(browser, 'mean')) == pytest.approx(255 / len(steps), abs=0.01)
    assert float(text_of(browser, 'speed')) > 0
    assert f'{len(steps)} steps' in text_of(browser, 'plot-text')
    painted = browser.execute_script(
        "const c = document.getElementById('plot');"
        "return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert painted > 2
    overflow = 'document.documentElement.scrollWidth - document.documentElement.clientWidth'
    assert browser.execute_script(f'return {overflow}') == 0, 'nothing sticks out sideways'


def test_settings_that_cannot_be_sent_are_shown(browser, server):
    open_page(browser, server)
    assert not browser.find_element(By.ID, 'settings').get_attribute('open')
    overflow = browser.execute_script(
        "const m = document.getElementById('model'); return m.scrollWidth - m.clientWidth"
    )
    assert overflow == 0, 'the model is named in full'
    browser.execute_script("document.getElementById('temperature').value = 9")
    browser.switch_to.active_element.send_keys(PROMPT)
    browser.find_element(By.ID, 'send').click()
    assert text_of(browser, 'problem').startswith('Temperature: ')
    field = browser.switch_to.active_element
    assert field.get_attribute('id') == 'temperature'
    assert field.is_displayed()
    field.clear()
    field.send_keys('0')
    longest = browser.find_element(By.ID, 'max-tokens')
    longest.clear()
    longest.send_keys('e' + Keys.ENTER)
    assert text_of(browser, 'problem').startswith('Longest answer: ')
    longest.clear()
    longest.send_keys('20' + Keys.ENTER)
    wait(browser, 'state.history.length === 2')
    assert text_of(browser, 'problem') == ''


def test_comparison_with_the_keyboard_alone(browser, server):
    open_page(browser, server)
    field = browser.switch_to.active_element
    field.send_keys('def read_lines(path):' + Keys.TAB + Keys.TAB)
    button = browser.switch_to.active_element
    assert button.get_attribute('id') == 'compare'
    button.send_keys(Keys.ENTER)
    wait(browser, "document.getElementById('verdict').textContent !== ''")
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#comparison tbody tr')]"
        '.map((r) => [...r.cells].map((c) => c.textContent))'
    )
    (plain, plain_tokens, plain_steps, _), (fast, fast_tokens, fast_steps, _) = rows
    assert (plain, fast, plain_tokens) == ('plain', 'speculative', fast_tokens)
    assert int(plain_steps) == int(plain_tokens) - 1 > int(fast_steps)
    assert text_of(browser, 'verdict').endswith('same text')


def test_escape_stops_and_the_server_forgets(browser, server):
    open_page(browser, server)
    browser.execute_script("document.getElementById('max-tokens').value = 900")
    browser.switch_to.active_element.send_keys(PROMPT + Keys.ENTER)
    wait(browser, 'state.steps.length > 0')
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(browser, 'state.controller === null')
    assert browser.find_element(By.CSS_SELECTOR, '[role=alert]').text == 'stopped'
    server.wait_until_idle()
    browser.find_element(By.ID, 'clear').click()
    assert browser.find_element(By.ID, 'conversation').text == ''


def test_every_control_has_a_name_and_the_interface_is_described(browser, server):
    open_page(browser, server)
    nameless = browser.execute_script(
        "return [...document.querySelectorAll('button, input, textarea, select')]"
        '.filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel)).map((e) => e.id)'
    )
    assert nameless == []
    browser.get(f'{server.url}/docs')
    wait(browser, "document.querySelectorAll('details').length > 5")
    assert 'POST /v1/chat/completions' in browser.find_element(By.TAG_NAME, 'main').text
