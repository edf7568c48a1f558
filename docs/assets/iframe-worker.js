// Browsers start no worker for a page from disk, and the site's search is one: a frame with the same messages stands in.
(() => {
  if (location.protocol !== "file:") return;
  const inside = `
    addEventListener("error", (event) => parent.console.error(event.message));
    const postMessage = (data) => parent.dispatchEvent(new MessageEvent("message", { data, source: window }));
    const importScripts = (...addresses) => addresses.reduce((before, src) => before.then(() => new Promise((done, failed) => {
      const script = Object.assign(document.createElement("script"), { src, onload: done, onerror: failed });
      document.head.append(script);
    })), Promise.resolve());`;
  class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.onmessage = null;
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(frame);
      const place = new URL(address, document.baseURI).href.replace(/"/g, "%22");
      frame.contentDocument.open();
      frame.contentDocument.write(`<!doctype html><html><head></head><body><script>${inside}<\/script><script src="${place}"><\/script></body></html>`);
      frame.contentDocument.close();
      this.frame = frame;
      this.ready = new Promise((done) => { frame.onload = done; });
      addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.onmessage?.(copy);
        this.dispatchEvent(copy);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() { this.frame.remove(); }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
})();
