// Draws the canvas of a run as it was after some pass, changing only the boxes that differ. Text goes in as text.
import { colourOf, visible } from "/page/run.js";

/** A canvas in an element of the page. */
export class Canvas {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.boxes = []; // {position, span, key, end}, in order
    this.at = new Map();
  }

  draw(run, passes) {
    const guesses = guessesOf(run.passes[Math.min(passes, run.passes.length) - 1]);
    for (const position of run.cells.keys()) if (!this.at.has(position)) this.#insert(position, run);
    let committed = 0;
    for (const box of this.boxes) {
      const cell = run.cells.get(box.position);
      const isCommitted = cell.pass !== undefined && cell.pass < passes;
      committed += isCommitted;
      if (isCommitted) this.#show(box, cell, run, passes);
      else this.#open(box, cell, guesses.get(box.position), passes);
    }
    const text = `Canvas after pass ${Math.min(passes, run.passes.length)}: ${committed} of ${this.boxes.length} positions committed`;
    if (this.element.ariaLabel !== text) this.element.ariaLabel = text;
  }

  #insert(position, run) {
    const span = document.createElement("span");
    let place = this.boxes.length;
    while (place && this.boxes[place - 1].position > position) place--;
    this.element.insertBefore(span, this.boxes[place]?.span ?? null);
    const box = { position, span, key: "", isFirst: place > 0 && run.cells.get(this.boxes[place - 1].position).block !== run.cells.get(position).block };
    this.boxes.splice(place, 0, box);
    this.at.set(position, box);
  }

  #show(box, cell, run, passes) {
    const isNew = cell.pass === Math.min(passes, run.passes.length) - 1 && passes <= run.passes.length;
    const beyond = run.ids && box.position >= run.ids.length;
    const name = `cell p${colourOf(cell.inBlock, run.length)}${isNew ? " new" : ""}${beyond ? " beyond" : ""}`;
    this.#set(box, name, visible(cell.text, cell.id), cell.text?.includes("\n") && !beyond, cell.pass + 1);
  }

  #open(box, cell, guess, passes) {
    box.span.hidden = cell.after > passes;
    if (guess) this.#set(box, "cell open guess", visible(guess.text, guess.token_id), false, 0);
    else this.#set(box, "cell open", "\u00b7", false, 0);
  }

  #set(box, name, text, breaks, pass) {
    const key = `${name}|${text}|${pass}`;
    if (box.key === key) return;
    box.key = key;
    const { span } = box;
    if (pass) span.hidden = false;
    span.className = box.isFirst ? `${name} first` : name;
    span.textContent = text;
    span.title = pass ? `position ${box.position}, pass ${pass}` : `position ${box.position}, open`;
    if (pass) span.dataset.pass = pass;
    else delete span.dataset.pass;
    if (Boolean(box.end) === Boolean(breaks)) return;
    if (breaks) span.after((box.end = document.createElement("br")));
    else {
      box.end.remove();
      box.end = null;
    }
  }
}

/** Returns the likeliest guess at every position that a pass did not take. */
function guessesOf(pass) {
  const found = new Map();
  for (const node of pass?.nodes ?? []) {
    if (node.accepted) continue;
    for (const token of node.tokens) {
      if (!(found.get(token.position)?.reach >= node.reach)) found.set(token.position, { ...token, reach: node.reach });
    }
  }
  return found;
}
