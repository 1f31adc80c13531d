// The page: shows the server's status as it changes, and asks questions with reuse and without. All text goes through textContent.

const RETRY_MS = 1000;
const BUCKETS = [  // parts of a bar: class, name, and what it says in the legend
  ["memory", "from memory", "Cached, in memory"],
  ["disk", "from disk", "Cached, read from disk"],
  ["segment", "from another position", "Cached, from another position"],
  ["computed", "computed", "Computed"],
  ["tail", "computed in the tail", "Computed: the tail, which is the last message"],
];
const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";
let status = null;
let asking = null;  // the AbortController of the question that runs

// -- elements ---------------------------------------------------------------------------------------------------------

/** A new element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Set text only where it differs: a live region tells each change. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Children of `parent` by key, each made once and filled anew: what has the focus keeps it. */
function keyed(parent, items, keyOf, create, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const name = keyOf(item);
    const child = known.get(name) || create(item);
    known.delete(name);
    child.dataset.key = name;
    fill(child, item);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] || null);
  });
  for (const gone of known.values()) gone.remove();
}

function facts(list, pairs) {
  const told = pairs.filter(([, value]) => value !== null);
  keyed(list, told, ([name]) => name, ([name]) => make("div", {}, make("dt", {}, name), make("dd")),
    (child, [, value]) => say(child.lastChild, value));
}

const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  for (; number >= 1024 && place < units.length - 1; place += 1) number /= 1024; // as `agentcache ls` counts
  return `${place && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[place]}`;
}

const ms = (number) => (number < 10 ? `${number.toFixed(1)} ms` : number < 10000 ? `${Math.round(number)} ms` : `${(number / 1000).toFixed(1)} s`);

function age(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  for (const [size, name] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) {
    if (past >= size) return `${count(Math.floor(past / size), name)} ago`;
  }
  return past < 5 ? "just now" : `${Math.floor(past)} seconds ago`;
}

// -- the server -------------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** A request with the key, if there is one. Refused: the server says no, in its own words. */
async function call(method, path, body, signal) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(body && { "Content-Type": "application/json" }) };
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(response.status, said?.error?.message || `${method} ${path}: ${response.status}`);
}

/** Server-sent events of a response: [name, data]. Unlike EventSource, fetch can send a key. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (text + value).split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const lines = event.split("\n");
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      if (field("data")) yield [field("event"), field("data")];
    }
  }
}

async function follow() {
  for (;;) {
    try {
      for await (const [name, data] of events(await call("GET", "/events"))) {
        if (name !== "status") continue;
        say($("connection"), "Live: updates by itself");
        status = JSON.parse(data);
        show();
      }
    } catch (error) {
      if (error.code === 401) {
        say($("connection"), "A key is needed");
        await askForKey(error.message);
        continue;
      }
      if (error.code) say($("failed"), error.message);
    }
    say($("connection"), "Not connected: trying again");
    await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

function askForKey(why) {
  const form = $("key-form");
  say($("key-why"), key ? why : "This server asks for a key.");
  form.hidden = false;
  $("key").focus();
  return new Promise((given) => {
    form.onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value;
      sessionStorage.setItem("key", key);
      $("key").value = "";
      form.hidden = true;
      given();
    };
  });
}

/** A button waits: it is not disabled, for then it would lose the focus. */
function busy(button, waits) {
  button.setAttribute("aria-disabled", waits);
}

/** Do what a button asks for, and tell how it went. */
async function act(button, work, done) {
  if (button.getAttribute("aria-disabled") === "true") return;
  busy(button, true);
  say($("said"), "");
  say($("failed"), "");
  try {
    await work();
    say($("said"), done);
  } catch (error) {
    say($("failed"), error.message);
  }
  busy(button, false);
}

// -- the status -------------------------------------------------------------------------------------------------------

function show() {
  say($("version"), status.version);
  keyed($("models"), status.models, (model) => model.model, makeModel, fillModel);
  const { requests, tokens } = status;
  facts($("totals"), [
    ["Requests running", String(requests.running)],
    ["Requests remembered", String(requests.known)],
    ["Prompt tokens from the cache", tokens.prompt ? `${(100 * tokens.hit_share).toFixed(1)} % of ${tokens.prompt.toLocaleString("en")}` : "none yet"],
  ]);
  keyed($("groups"), status.groups, (group) => `${group.namespace}/${group.name}`, makeGroup, fillGroup);
  $("no-groups").hidden = status.groups.length > 0;
  const mine = status.groups.filter((group) => group.namespace === status.namespace && group.status !== "pinned");
  keyed($("group"), [{ name: "" }, ...mine], (group) => group.name, (group) => make("option", { value: group.name }), (option, group) =>
    say(option, group.name || "none: the question alone"));
  keyed($("requests"), status.last, (record) => record.id, () => make("li"), fillRequest);
  $("no-requests").hidden = status.last.length > 0;
  $("legend").hidden = !status.last.length;
}

function makeModel() {
  return make("li", {}, make("h3"), make("p", { class: "phase" }), make("progress", { "aria-label": "Loading the model" }), make("dl", { class: "facts" }));
}

function fillModel(item, model) {
  const [title, phase, progress, list] = item.children;
  say(title, model.model);
  const words = { ready: "Ready", unloaded: "Not loaded: the next request loads it", failed: `Failed: ${model.phase}`, loading: `Loading: ${model.phase}` };
  say(phase, words[model.state] + (model.state === "loading" ? `, ${Math.round(model.loading_seconds)} s so far` : ""));
  phase.classList.toggle("error", model.state === "failed");
  progress.hidden = model.state !== "loading";
  const { memory, disk } = model;
  facts(list, [
    ["Device", model.device],
    ["In memory", memory && `${bytes(memory.bytes)} of ${bytes(memory.budget_bytes)}: ${count(memory.pages, "page")}, ${memory.pinned_pages} pinned`],
    ["On disk", memory && (disk ? `at most ${bytes(disk.budget_bytes)} in ${disk.folder}` : "nothing is written")],
  ]);
}

function makeGroup(group) {
  const path = `/tools/${encodeURIComponent(group.name)}`;
  const pin = make("button", { type: "button", class: "pin" }, "");
  pin.addEventListener("click", () => {
    const pinned = pin.dataset.pinned === "true";
    act(pin, () => call("PATCH", path, { pinned: !pinned }), pinned ? `${group.name} may be evicted now.` : `${group.name} is pinned.`);
  });
  const remove = make("button", { type: "button", class: "delete" }, "Delete");
  remove.addEventListener("click", () => {
    if (confirm(`Delete the tool group "${group.name}" from memory and from disk?`)) {
      act(remove, () => call("DELETE", path), `${group.name} is deleted.`);
    }
  });
  return make("li", {}, make("div", { class: "head" }, make("h3", {}, group.name), make("div", { class: "row" }, pin, remove)),
    make("dl", { class: "facts" }));
}

function fillGroup(item, group) {
  const [pin, remove] = item.querySelectorAll("button");
  pin.hidden = remove.hidden = group.namespace !== status.namespace;
  pin.dataset.pinned = group.pinned;
  say(pin, group.pinned ? "Release the pin" : "Pin");
  pin.setAttribute("aria-label", `${pin.textContent}: ${group.name}`);
  remove.setAttribute("aria-label", `Delete ${group.name}`);
  const tier = { memory: group.pinned ? "memory, pinned" : "memory", disk: "disk" }[group.tier] || "computed when asked";
  facts(item.lastChild, [
    ["Namespace", group.namespace === status.namespace ? null : group.namespace],
    ["Tokens", group.prefix_tokens === null ? "unknown" : group.prefix_tokens.toLocaleString("en")],
    ["Size", group.bytes === null ? "unknown" : bytes(group.bytes)],
    ["Tier", tier],
    ["Hits", `${group.hits} of ${count(group.requests, "request")}`],
    ["Made", group.created === null ? "not yet" : age(group.created)],
    ["Tools", group.tools.length ? group.tools.join(", ") : "none"],
  ]);
}

// -- requests ---------------------------------------------------------------------------------------------------------

/** Start of the tail: of the last turn, which is new in each prompt. */
function tailStart(receipt) {
  return receipt.spans.filter((span) => span.kind === "turn").pop()?.start ?? receipt.prompt_tokens - 1;
}

/** Tokens of a prompt by bucket. */
function buckets(receipt) {
  const cached = receipt.cached_tokens - receipt.segment_tokens;
  const disk = Math.min(receipt.disk_tokens, cached);
  const tail = Math.min(receipt.computed_tokens, receipt.prompt_tokens - tailStart(receipt));
  return { memory: cached - disk, disk, segment: receipt.segment_tokens, computed: receipt.computed_tokens - tail, tail };
}

function bar(receipt) {
  const tokens = buckets(receipt);
  const parts = BUCKETS.filter(([name]) => tokens[name] > 0);
  const said = `${count(receipt.prompt_tokens, "prompt token")}: ${parts.map(([name, words]) => `${tokens[name].toLocaleString("en")} ${words}`).join(", ")}`;
  const drawn = make("div", { class: "bar", role: "img", "aria-label": said }, ...parts.map(([name, words]) => {
    const part = make("span", { class: name, title: `${tokens[name]} ${words}` });
    part.style.flexGrow = tokens[name];
    return part;
  }));
  return [drawn, make("p", { "aria-hidden": true }, said)];
}

/** Why tokens were computed: the reason in words, linked to its line, and what would have helped. */
function reasons(receipt) {
  const lines = receipt.refusals.map(({ reason, start, stop, detail }) => {
    const words = $(reason)?.lastChild.textContent || "";
    const where = stop > start ? `${count(stop - start, "token")} from ${start.toLocaleString("en")} on: ` : "";
    const expected = reason === "DIVERGED" && start >= tailStart(receipt) ? ". Expected: the tail is new" : "";
    return make("li", {}, where, make("a", { href: `#${reason}` }, reason), `: ${words}${detail ? ` (${detail})` : ""}${expected}`);
  });
  const missed = receipt.missed;
  if (missed) lines.push(make("li", {}, `The prompt moved: ${missed.cause}, by ${missed.writer}; ${count(missed.cost_tokens, "token")}. ${missed.fix}`));
  return make("ul", { class: "why" }, ...lines);
}

function fillRequest(item, record) {
  if (item.dataset.state !== record.state) {
    item.dataset.state = record.state;
    const receipt = record.receipt;
    const times = receipt && `first token after ${ms(receipt.ttft_ms)}, ${count(receipt.completion_tokens, "token")} in ${ms(receipt.decode_ms)} more`;
    const began = make("time", { datetime: new Date(record.began * 1000).toISOString() }, new Date(record.began * 1000).toLocaleTimeString());
    const title = make("h3", {}, began, ` ${record.group || record.path} `, make("small", {}, record.group ? record.path : record.model));
    const head = make("div", { class: "head" }, title, make("p", { class: "times" }, times || record.state));
    const off = receipt?.refusals.some((refusal) => refusal.reason === "REUSE_OFF");
    if (off) title.append(make("small", {}, " reuse off"));
    item.replaceChildren(head, ...(receipt ? [...bar(receipt), reasons(receipt)] : []));
    if (record.error) item.append(make("p", { class: "error" }, record.error));
  }
}

// -- questions --------------------------------------------------------------------------------------------------------

/** Ask once, streaming into a panel. Returns the answer and its receipt. */
async function ask(panel, reuse, signal) {
  const [, times, answer, failed] = panel.children;
  const group = $("group").value;
  const question = $("question").value;
  const begun = group ? { group, question } : { messages: [{ role: "user", content: question }] };
  const path = group ? "/query" : "/v1/chat/completions";
  say(times, "Waiting for the first token …");
  answer.setAttribute("aria-busy", "true");
  const start = performance.now();
  let first = null;
  let receipt = null;
  try {
    const body = { ...begun, reuse, stream: true, max_tokens: 256, temperature: 0 };
    for await (const [, data] of events(await call("POST", path, body, signal))) {
      if (data === "[DONE]") continue;
      const said = JSON.parse(data);
      receipt = said.x_agentcache?.receipt ?? receipt;
      if (said.error) throw new Refused(0, said.error.message);
      const text = pieces(said.choices[0]?.delta || {});
      if (text && first === null) {
        first = performance.now() - start;
        say(times, `First token after ${ms(first)} …`);
      }
      if (text) answer.append(text);
    }
    const total = performance.now() - start;
    const cost = receipt ? `: ${receipt.cached_tokens.toLocaleString("en")} tokens cached, ${receipt.computed_tokens.toLocaleString("en")} computed` : "";
    say(times, `First token after ${ms(first ?? total)}, all after ${ms(total)}${cost}`);
    return { text: answer.textContent, first: first ?? total, receipt };
  } catch (error) {
    say(times, "");
    say(failed, error.name === "AbortError" ? "Stopped." : error.message);
    throw error;
  } finally {
    answer.removeAttribute("aria-busy");
  }
}

/** Text of a delta: of the answer, of the thought before it, and of calls of tools. */
function pieces(delta) {
  const calls = (delta.tool_calls || []).map((call) => (call.function.name ? `\n→ ${call.function.name} ` : "") + (call.function.arguments || ""));
  return (delta.reasoning_content || "") + (delta.content || "") + calls.join("");
}

function verdict(on, off) {
  const same = on.text === off.text ? "The same answer both ways." : "The answers differ.";
  const ratio = off.first / on.first;
  if (!on.receipt?.cached_tokens) return `${same} Nothing was cached yet: ask again.`;
  const short = `Reuse made the first token no sooner: ${count(on.receipt.prompt_tokens, "token")} are quickly computed.`;
  return `${same} ${ratio >= 1.05 ? `With reuse the first token came ${ratio.toFixed(1)} times sooner.` : short}`;
}

$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  busy($("send"), true);
  busy($("stop"), false);
  say($("verdict"), "");
  for (const panel of [$("with"), $("without")]) {
    for (const part of [...panel.children].slice(1)) say(part, "");
  }
  try {
    const on = await ask($("with"), null, asking.signal);
    const off = await ask($("without"), "off", asking.signal);
    say($("verdict"), verdict(on, off));
  } catch (error) {
    if (error.code === undefined && error.name !== "AbortError" && !(error instanceof TypeError)) throw error;
  }
  asking = null;
  busy($("send"), false);
  busy($("stop"), true);
});
$("stop").addEventListener("click", () => asking?.abort());

// -- the start --------------------------------------------------------------------------------------------------------

for (const [name, , words] of BUCKETS) $("legend").append(make("li", {}, make("i", { class: name }), words));
say($("curl"), `curl ${location.origin}/tools -H 'Content-Type: application/json' -d '{"name": "weather", "system": "You are a helpful assistant.",
  "tools": [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]}'`);
setInterval(() => status && show(), 5000);  // ages
follow();
