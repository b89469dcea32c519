// One answer as it is decoded: what every pass committed, so that the canvas after any pass can be drawn. Knows nothing of the page.

export const COLOURS = 8;

/** Collects the documents of a stream (docs/serving.md: spot.return_passes). */
export class Run {
  constructor() {
    this.passes = []; // documents of passes, with `shown`: positions committed up to them
    this.cells = new Map(); // position -> {after: passes before it was open, block, pass, step, text, id, inBlock}
    this.blocks = new Map(); // number -> {first: pass that first committed in it}
    this.length = 1; // of the longest block
    this.text = "";
    this.counts = this.ids = this.steps = this.seed = this.usage = null;
    this.over = false;
    this.committed = 0;
    this.transitions = 0;
  }

  take(document) {
    this.seed = document.spot?.seed ?? this.seed;
    this.usage = document.usage ?? this.usage;
    const choice = document.choices[0];
    if (!choice) return;
    this.text += choice.delta?.content ?? choice.text ?? "";
    const seen = choice.spot ?? {};
    if (seen.block) this.#open(seen.block);
    if (seen.pass) this.#advance(seen.pass);
    if (seen.counts) this.counts = seen.counts;
    if (seen.token_ids) {
      this.ids = seen.token_ids;
      this.steps = seen.commit_steps;
    }
  }

  #open(block) {
    this.length = Math.max(this.length, block.masked.length);
    for (const position of block.masked) if (!this.cells.has(position)) this.cells.set(position, { after: this.passes.length, block: block.number });
    this.#commit(block.committed);
  }

  #advance(pass) {
    this.#commit(pass.committed);
    this.transitions += pass.steps;
    this.passes.push({ ...pass, total: this.committed, transitions: this.transitions });
  }

  #commit(commits) {
    const pass = this.passes.length;
    for (const { position, text, token_id, block, step } of commits) {
      if (!this.blocks.has(block)) this.blocks.set(block, { first: pass });
      const cell = this.cells.get(position) ?? { after: pass, block };
      Object.assign(cell, { block, pass, step, text, id: token_id, inBlock: pass - this.blocks.get(block).first + 1 });
      this.cells.set(position, cell);
      this.committed += 1;
    }
  }

  /** Figures after so many passes; at the very end they are the server's own. */
  figures(passes) {
    const at = Math.min(passes, this.passes.length);
    const last = this.passes[at - 1];
    const isEnd = this.counts && at === this.passes.length;
    const tokens = isEnd ? this.counts.tokens : last?.total ?? 0;
    return { passes: at, tokens, transitions: last?.transitions ?? 0, tpf: at ? tokens / at : 0, isEnd: Boolean(isEnd) };
  }
}

/** Returns from which pass of a block on each colour is used: 1, 2, 3, ... and wider towards the block's length. */
export function thresholds(length) {
  const found = [1];
  while (found.length < COLOURS) found.push(Math.max(found.at(-1) + 1, Math.round(length ** (found.length / COLOURS))));
  return found;
}

/** Returns the number of the colour for the n-th pass of a block. */
export function colourOf(inBlock, length) {
  return thresholds(length).findLastIndex((first) => first <= inBlock);
}

/** Says how two finished answers compare, and where they part. */
export function compare(ours, theirs) {
  if (!ours.ids || !theirs.ids) return null;
  const size = Math.max(ours.ids.length, theirs.ids.length);
  for (let i = 0; i < size; i++) if (ours.ids[i] !== theirs.ids[i]) return { same: false, what: "token", at: i };
  for (let i = 0; i < size; i++) if (ours.steps[i] !== theirs.steps[i]) return { same: false, what: "order", at: i };
  return { same: true, size };
}

/** Returns a token's text so that it can be seen, and can do nothing to what stands around it. */
export function visible(text, id) {
  if (text === null) return "\u220e";
  if (text === "") return `<${id}>`;
  return text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/[\p{C}\u2028\u2029]/gu, "\u25af").replace(/ /g, "\u00a0");
}
