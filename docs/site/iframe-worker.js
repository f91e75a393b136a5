// Search in pages that are opened from disk: browsers start no Worker from a file, so its program runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), {hidden: true});
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      const program = Object.assign(this.inner.document.createElement("script"), {src: url});
      this.isReady = new Promise(resolve => { program.onload = resolve; });
      this.inner.document.head.append(program);
    }
    postMessage(data) {
      this.isReady.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
