// Follows changes: asks for the page anew when the driver says that there is another one, and replaces what differs, so that
// focus, scrolling, selections and what is being typed stay. Without this script the page can be reloaded.
"use strict";
(() => {
  const following = document.getElementById("following");
  const form = document.getElementById("filter");
  const say = (text) => { if (following.textContent !== text) following.textContent = text; };

  // sync makes an element look like another one, and keeps what they share.
  const sync = (old, now) => {
    if (old.hasAttribute("data-keep")) return;
    for (const { name } of [...old.attributes]) if (!now.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of now.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const ids = new Set([...now.children].map((e) => e.id).filter(Boolean));
    const byID = new Map([...old.children].filter((e) => e.id).map((e) => [e.id, e]));
    let at = old.firstChild;
    for (const child of [...now.childNodes]) {
      while (at && at.id && !ids.has(at.id)) { // it is gone; so the ones after it stay where they are
        const gone = at;
        at = at.nextSibling;
        gone.remove();
      }
      let match = child.id ? byID.get(child.id) : at && !at.id && at.nodeName === child.nodeName ? at : null;
      byID.delete(child.id); // what is wrong twice has one id
      if (match && match.nodeName !== child.nodeName) match = null;
      if (!match) {
        old.insertBefore(document.importNode(child, true), at);
        continue;
      }
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      if (match.nodeType === Node.ELEMENT_NODE) sync(match, child);
      else if (match.data !== child.data) match.data = child.data;
    }
    while (at) {
      const gone = at;
      at = at.nextSibling;
      gone.remove();
    }
  };

  const replace = (text) => {
    const now = new DOMParser().parseFromString(text, "text/html");
    const [main, footer] = ["main", "footer"].map((name) => now.querySelector(name));
    if (!main || !footer) return;
    const focused = document.activeElement;
    document.title = now.title;
    sync(document.querySelector("main"), main);
    sync(document.querySelector("footer"), footer);
    if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  };

  // refresh brings the page up to date. One runs at a time; what is asked for meanwhile runs after it.
  let running = false, again = false;
  const refresh = async () => {
    again = true;
    if (running) return;
    running = true;
    try {
      while (again) {
        again = false;
        const answer = await fetch(location.href, { cache: "no-store", redirect: "error" });
        replace(await answer.text());
      }
    } catch {
      say("No connection; trying again");
    } finally {
      running = false;
    }
  };

  let stream = null, retry = 0;
  const stop = () => {
    clearTimeout(retry);
    if (stream) stream.close();
    stream = null;
  };
  const start = () => {
    stop();
    stream = new EventSource("./events");
    stream.onopen = () => say("Follows changes");
    stream.onmessage = (event) => {
      if (event.data !== document.querySelector("main").dataset.version) refresh();
    };
    stream.addEventListener("again", start); // streams end after a while; nothing is wrong
    stream.onerror = () => {
      say("No connection; trying again");
      if (stream.readyState === EventSource.CLOSED) retry = setTimeout(() => { refresh(); start(); }, 10000);
    };
  };
  // A page that nobody sees needs no stream; browsers have few for one address.
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  window.addEventListener("pagehide", stop);
  window.addEventListener("pageshow", (event) => { if (event.persisted) start(); });
  if (document.hidden) say("");
  else start();

  // The filter works while it is being typed; the address is that of what is shown.
  if (form) {
    const show = () => {
      const fields = new URLSearchParams(new FormData(form));
      for (const [name, value] of [...fields]) if (!value.trim()) fields.delete(name);
      history.replaceState(null, "", "./?" + fields);
      refresh();
    };
    let typed = 0;
    form.addEventListener("input", () => {
      clearTimeout(typed);
      typed = setTimeout(show, 150);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      clearTimeout(typed);
      show();
    });
  }
})();
