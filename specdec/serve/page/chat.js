// The chat page: streams answers, marks which tokens a draft had proposed, plots what each step gained, and compares
// plain with speculative decoding. No library, no build step; the server's own interface is all it uses.
'use strict';

const $ = (id) => document.getElementById(id);
const state = { model: null, drafts: 0, history: [], controller: null, steps: [] };

// ------------------------------------------------------------------------------------------------------ requests
function headers() {
  const key = $('key').value.trim();
  return { 'Content-Type': 'application/json', ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function findModel() {
  try {
    const response = await fetch('v1/models', { headers: headers() });
    if (!response.ok) throw new Error(response.status === 401 ? 'enter an API key in the settings' : await failure(response));
    const card = (await response.json()).data[0];
    state.model = card.id;
    state.drafts = card.num_draft_tokens;
    const draft = state.drafts ? `up to ${state.drafts} drafted tokens per step` : 'no draft: decoding is plain';
    $('model').textContent = `${card.id}, ${draft}`;
    $('speculative').disabled = $('compare').disabled = !state.drafts;
    requestPlot();
  } catch (error) {
    state.model = null;
    $('model').textContent = error.message;
  }
}

// Yields the JSON values of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split('\n\n');
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, '');
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

function wishes(messages, speculative) {
  const seed = $('seed').value;
  return {
    model: state.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    return_speculation: true,
    temperature: Number($('temperature').value),
    max_completion_tokens: Number($('max-tokens').value),
    speculative,
    ...(seed === '' ? {} : { seed: Number(seed) }),
  };
}

// Streams one answer into `view`; resolves to its figures. Time counts from the first token on.
async function ask(messages, speculative, view) {
  const result = { text: '', tokens: 0, steps: 0, drafted: 0, accepted: 0, seconds: 0, finish: null };
  const response = await fetch('v1/chat/completions', {
    method: 'POST',
    headers: headers(),
    body: JSON.stringify(wishes(messages, speculative)),
    signal: state.controller.signal,
  });
  if (!response.ok) throw new Error(await failure(response));
  state.steps = [];
  let begin = null;
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const now = performance.now();
    begin ??= now;
    result.seconds = (now - begin) / 1000;
    result.text += choice.delta.content ?? '';
    result.finish = choice.finish_reason ?? result.finish;
    const news = chunk.speculation;
    result.drafted += news.drafted;
    result.accepted += news.accepted;
    result.steps += news.steps.length;
    for (const [drafted, accepted] of news.steps) state.steps.push({ drafted, gained: accepted + 1 });
    view.add(choice.delta, news.tokens);
    showFigures(result);
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------- views
function addTurn(role, title, text = '') {
  const turn = document.createElement('article');
  turn.className = `turn ${role}`;
  const heading = document.createElement('h2');
  heading.textContent = title;
  const body = document.createElement('div');
  body.textContent = text;
  turn.append(heading, body);
  $('conversation').append(turn);
  turn.scrollIntoView({ block: 'end' });
  return body;
}

// Shows tokens as they come, each with its mark; neighbours of one kind share an element.
function tokenView(body) {
  const atEnd = () => {
    const box = $('conversation');
    return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  };
  return {
    add(delta, tokens) {
      const follow = atEnd();
      for (const [text, drafted] of tokens) {
        const kind = drafted ? 'mark drafted' : 'mark own';
        const last = body.lastElementChild;
        if (last && last.className === kind) {
          last.textContent += text;
        } else {
          const piece = document.createElement('span');
          piece.className = kind;
          piece.title = drafted ? 'drafted and accepted' : "the model's own token";
          piece.textContent = text;
          body.append(piece);
        }
      }
      if (follow) $('conversation').scrollTop = $('conversation').scrollHeight;
    },
    fail(message) {
      const line = document.createElement('p');
      line.className = 'problem';
      line.setAttribute('role', 'alert');
      line.textContent = message;
      body.append(line);
    },
  };
}

const speedOf = (result) => (result.seconds > 0 ? result.steps && (result.steps + result.accepted) / result.seconds : 0);

function showFigures(result) {
  const speed = speedOf(result);
  $('speed').textContent = speed ? speed.toFixed(1) : '–';
  $('mean').textContent = result.steps ? (1 + result.accepted / result.steps).toFixed(2) : '–';
  $('rate').textContent = result.drafted ? `${Math.round((100 * result.accepted) / result.drafted)} %` : '–';
  requestPlot();
}

let plotDue = false;
function requestPlot() {
  if (plotDue) return;
  plotDue = true;
  requestAnimationFrame(() => {
    plotDue = false;
    plot();
  });
}

// One bar a step: solid what it gained, outlined what it drafted.
function plot() {
  const canvas = $('plot');
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.body);
  const accent = getComputedStyle(document.querySelector('a')).color;
  const rows = Math.max(2, state.drafts + 1);
  const [left, bottom, top] = [18, height - 6, 8];
  const y = (value) => bottom - ((bottom - top) * value) / rows;
  pen.font = '10px system-ui';
  pen.fillStyle = pen.strokeStyle = style.color;
  for (let value = 0; value <= rows; value += rows > 8 ? 4 : 2) {
    pen.globalAlpha = 0.25;
    pen.fillRect(left, y(value), width - left, 0.5);
    pen.globalAlpha = 0.8;
    pen.fillText(String(value), 2, y(value) + 3);
  }
  pen.globalAlpha = 1;
  const bar = Math.max(3, Math.min(10, (width - left) / Math.max(1, state.steps.length)));
  const shown = state.steps.slice(-Math.floor((width - left) / bar));
  shown.forEach((step, index) => {
    const x = left + index * bar;
    pen.globalAlpha = 0.35;
    pen.strokeRect(x + 0.5, y(step.drafted + 1), bar - 1.5, bottom - y(step.drafted + 1));
    pen.globalAlpha = 1;
    pen.fillStyle = accent;
    pen.fillRect(x + 0.5, y(step.gained), bar - 1.5, bottom - y(step.gained));
  });
  if (shown.length) {
    const mean = state.steps.reduce((sum, step) => sum + step.gained, 0) / state.steps.length;
    $('plot-text').textContent =
      `Tokens gained in each of ${state.steps.length} steps (outline: drafted); ${mean.toFixed(2)} on average, 1 without a draft.`;
  }
}

// -------------------------------------------------------------------------------------------------------- actions
async function busy(action) {
  if (state.controller) return;
  state.controller = new AbortController();
  $('send').disabled = $('compare').disabled = $('clear').disabled = true;
  $('stop').disabled = false;
  try {
    if (!state.model) await findModel();
    await action();
  } finally {
    state.controller = null;
    $('send').disabled = $('clear').disabled = false;
    $('compare').disabled = !state.drafts;
    $('stop').disabled = true;
    $('prompt').focus();
  }
}

function takePrompt() {
  const text = $('prompt').value;
  if (!text.trim()) return null;
  $('prompt').value = '';
  addTurn('user', 'You', text);
  return text;
}

async function streamed(messages, speculative, title) {
  const view = tokenView(addTurn('assistant', title));
  try {
    return await ask(messages, speculative, view);
  } catch (error) {
    view.fail(error.name === 'AbortError' ? 'stopped' : error.message);
    return null;
  }
}

// Whether the form can be sent; what is wrong with it is shown, settings that were folded away included.
function isValid() {
  const wrong = [...$('form').elements].find((field) => field.willValidate && !field.validity.valid);
  $('problem').hidden = !wrong || wrong === $('prompt');
  if (!wrong) return true;
  $('settings').open ||= $('settings').contains(wrong);
  const name = wrong.labels[0]?.firstChild.textContent.trim() ?? wrong.id;
  $('problem').textContent = `${name}: ${wrong.validationMessage}`;
  wrong.focus();
  return false;
}

function send() {
  if (!isValid()) return undefined;
  return busy(async () => {
    const text = takePrompt();
    if (text === null) return;
    const messages = [...state.history, { role: 'user', content: text }];
    const result = await streamed(messages, $('speculative').checked, state.model ?? 'Answer');
    if (result) state.history = [...messages, { role: 'assistant', content: result.text }];
  });
}

function compare() {
  if (!isValid()) return undefined;
  return busy(async () => {
    const text = takePrompt();
    if (text === null) return;
    const messages = [...state.history, { role: 'user', content: text }];
    $('comparison').hidden = false;
    $('comparison').tBodies[0].replaceChildren();
    $('verdict').textContent = '';
    const results = [];
    for (const [name, speculative] of [['plain', false], ['speculative', true]]) {
      const result = await streamed(messages, speculative, `${state.model}, ${name}`);
      if (!result) return;
      results.push(result);
      const row = $('comparison').tBodies[0].insertRow();
      for (const value of [name, result.tokens, result.steps, speedOf(result).toFixed(1)]) row.insertCell().textContent = value;
    }
    const [plain, fast] = results;
    const same = plain.text === fast.text ? 'same text' : 'other text (a random seed?)';
    $('verdict').textContent = `${(speedOf(fast) / speedOf(plain)).toFixed(2)} times as fast, ${same}`;
    $('verdict').scrollIntoView({ block: 'nearest' });
    state.history = [...messages, { role: 'assistant', content: fast.text }];
  });
}

$('form').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') state.controller?.abort();
});
$('stop').addEventListener('click', () => state.controller?.abort());
$('compare').addEventListener('click', compare);
$('clear').addEventListener('click', () => {
  state.history = [];
  state.steps = [];
  $('conversation').replaceChildren();
  $('comparison').hidden = true;
  $('verdict').textContent = '';
  plot();
  $('prompt').focus();
});
$('key').addEventListener('change', findModel);
window.addEventListener('resize', requestPlot);
plot();
findModel();
$('prompt').focus();
