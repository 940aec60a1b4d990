"use strict";
// The page's own functions in Node, with as much of a document as they use.
// node page_in_node.js FOLDER SCRIPT... < code: runs the code after the scripts, and prints its value (or
// what it promises) as JSON. Nobody answers `fetch`, unless the code replaces it; timers do not run.

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

class Node {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
    this.className = "";
    this.style = {};
    this.listeners = {};
    this.text = "";
  }
  append(...nodes) {
    for (const node of nodes) this.children.push(node instanceof Node ? node : Object.assign(new Node("#text"), { text: String(node) }));
  }
  added(tag) {
    const node = new Node(tag);
    this.append(node);
    return node;
  }
  createTHead() { return this.added("thead"); }
  createTBody() { return this.added("tbody"); }
  insertRow() { return this.added("tr"); }
  insertCell() { return this.added("td"); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
  querySelector(tag) { return this.all(tag)[0] || this.added(tag); }
  set textContent(text) {
    this.children = [];
    this.text = String(text);
  }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  all(tag) { return this.children.flatMap((child) => [...(child.tag === tag ? [child] : []), ...child.all(tag)]); }
}

const byId = {};
const document = { createElement: (tag) => new Node(tag), getElementById: (id) => (byId[id] ??= new Node(id)) };
const timers = [];
const context = vm.createContext({
  Node,
  document,
  console,
  timers,
  window: new Node("window"),
  location: { hash: "" },
  fetch: () => new Promise(() => {}),
  setTimeout: (call) => timers.push(call),
  clearTimeout: () => {},
});
const [folder, ...scripts] = process.argv.slice(2);
for (const name of scripts) vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), context, { filename: name });
Promise.resolve(vm.runInContext(fs.readFileSync(0, "utf8"), context, { filename: "code" }))
  .then((value) => process.stdout.write(JSON.stringify(value)));
