// The server's answers, and its notices of what changed. One page holds the stream for all pages of this browser: a
// browser opens six connections to a host, and each stream would take one of them for good.

/** @param {string} name @param {Record<string, any>} [parameters] */
export async function get(name, parameters = {}, signal = undefined) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  const answer = await fetch(`/api/${name}${query ? `?${query}` : ""}`, { signal, credentials: "same-origin" });
  if (answer.status === 401) throw new Error("this page has no token any more: open the address that `k3rl dashboard` printed");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

export function fileAddress(name, parameters) {
  return `/export/${name}?${new URLSearchParams(parameters)}`;
}

const hearers = new Set();
let connected = false;

/** Calls with the ids of runs whose files grew, and with null where anything may have changed. Returns how to stop. */
export function onNotice(hearer) {
  hearers.add(hearer);
  return () => hearers.delete(hearer);
}

function tell(runs) {
  for (const hearer of [...hearers]) hearer(runs);
}

export function listen(onStatus) {
  const say = (status) => {
    connected = status;
    onStatus(status);
  };
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("k3rl-notices") : null;
  if (channel && navigator.locks) {
    channel.onmessage = (message) => {
      if (message.data.runs !== undefined) tell(message.data.runs);
      if (message.data.status !== undefined) say(message.data.status);
      if (message.data.ask && leads) channel.postMessage({ status: connected });
    };
    let leads = false;
    channel.postMessage({ ask: true });
    navigator.locks.request("k3rl-notices", () => {
      leads = true;
      tell(null);
      return follow(
        (runs) => { tell(runs); channel.postMessage({ runs }); },
        (status) => { say(status); channel.postMessage({ status }); },
      );
    });
  } else {
    setInterval(() => tell(null), 2000); // no secure context: the page asks
    say(true);
  }
}

/** Never ends: the lock is the page's until it is closed. */
function follow(hear, say) {
  return new Promise(() => {
    const source = new EventSource("/api/events");
    let lost = false;
    source.addEventListener("hello", () => {
      say(true);
      if (lost) hear(null); // something may have been missed
      lost = false;
    });
    source.addEventListener("changed", (event) => hear(JSON.parse(event.data).runs));
    source.onerror = () => {
      lost = true;
      say(false);
    };
  });
}
