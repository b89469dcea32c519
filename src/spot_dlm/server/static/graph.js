// Draws the draft graph of a pass: time goes to the right (downwards where that takes less room), the way that was taken comes first.
import { visible } from "/page/run.js";

const SPACE = "http://www.w3.org/2000/svg";
const NARROW = 560; // pixels
const LANE = 36; // the narrowest that still shows something of a token

/** Draws a pass; `colour` is the number of its colour. */
export function drawGraph(element, pass, colour) {
  if (!pass) return element.replaceChildren();
  const nodes = placed(withBonus(pass));
  const depth = Math.max(...nodes.map((n) => n.depth)) + 1;
  const rows = Math.max(...nodes.map((n) => n.row)) + 1;
  const width = element.clientWidth || 600;
  const isDown = width < NARROW || (rows > 8 && rows > depth && rows * LANE < width);
  const step = isDown ? 40 : Math.min(110, Math.max(62, (width - 4) / depth));
  const lane = isDown ? Math.min(110, Math.max(width < NARROW ? 48 : LANE, (width - 4) / rows)) : 34;
  const box = { width: (isDown ? lane : step) - (isDown ? 8 : 22), height: 24 };
  const centre = (n) =>
    isDown ? { x: 2 + n.row * lane + lane / 2, y: 14 + n.depth * step } : { x: 2 + n.depth * step + box.width / 2, y: 16 + n.row * lane };
  const svg = make("svg", {
    width: isDown ? 4 + rows * lane : 4 + depth * step - 20,
    height: isDown ? 4 + depth * step - 12 : 4 + rows * lane,
    role: "img",
    "aria-label": told(pass),
  });
  for (const node of nodes) {
    node.parents.forEach((parent, i) => svg.append(edge(centre(nodes[parent]), centre(node), box, isDown, i > 0, isTaken(nodes[parent]) && isTaken(node) && (node.kind === "bonus" || i === node.way))));
  }
  for (const node of nodes) svg.append(...shape(node, centre(node), box, colour));
  element.style.minHeight = `${Math.min(Math.max(parseFloat(element.style.minHeight) || 0, Number(svg.getAttribute("height"))), 416)}px`;
  element.replaceChildren(svg);
}

/** Says in words what a pass did. */
export function told(pass) {
  if (!pass) return "";
  const guesses = pass.nodes.length - 1;
  const right = pass.nodes.filter((n) => n.accepted).length - 1;
  const committed = `It committed ${count(pass.committed.length, "position")}.`;
  if (!guesses) return `Pass ${pass.number + 1} had nothing to check: no guess was made. ${committed}`;
  return `Pass ${pass.number + 1} checked ${count(guesses, "guess", "guesses")}: ${right} ${right === 1 ? "was" : "were"} right, ${guesses - right} not. ${committed}`;
}

function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

const isTaken = (node) => node.kind !== "failed";

/** Returns the nodes and, behind the last accepted one, the step that the model took itself. */
function withBonus(pass) {
  const nodes = pass.nodes.map((n, i) => ({ ...n, kind: i === 0 ? "root" : n.accepted ? "taken" : "failed" }));
  const steps = [];
  for (const token of pass.committed) {
    if (steps.at(-1)?.block === token.block && steps.at(-1)?.step === token.step) steps.at(-1).tokens.push(token);
    else steps.push({ block: token.block, step: token.step, tokens: [token] });
  }
  const last = nodes.reduce((best, n, i) => (n.accepted && n.depth >= nodes[best].depth ? i : best), 0);
  if (steps.length === pass.steps) nodes.push({ kind: "bonus", depth: nodes[last].depth + 1, parents: [last], reach: 2, tokens: steps.at(-1).tokens });
  return nodes;
}

/** Gives every node a row: a first child shares its parent's, what was taken comes first, then what was likelier. */
function placed(nodes) {
  const children = nodes.map(() => []);
  for (const [i, node] of nodes.entries()) {
    const taken = node.parents.findIndex((p) => isTaken(nodes[p]));
    node.way = isTaken(node) && taken >= 0 ? taken : 0;
    if (node.parents.length) children[node.parents[node.way]].push(i);
  }
  let row = 0;
  const visit = (i) => {
    nodes[i].row = row;
    const order = children[i].sort((a, b) => isTaken(nodes[b]) - isTaken(nodes[a]) || nodes[b].reach - nodes[a].reach);
    order.forEach((child, k) => {
      if (k) row += 1;
      visit(child);
    });
  };
  nodes.forEach((node, i) => {
    if (node.row !== undefined || node.parents.length) return;
    if (i) row += 1;
    visit(i);
  });
  return nodes;
}

function edge(from, to, box, isDown, isMore, isWay) {
  const [a, b] = isDown ? [{ x: from.x, y: from.y + 12 }, { x: to.x, y: to.y - 12 }] : [{ x: from.x + box.width / 2, y: from.y }, { x: to.x - box.width / 2, y: to.y }];
  const half = isDown ? (a.y + b.y) / 2 : (a.x + b.x) / 2;
  const bend = isDown ? `${a.x} ${half} ${b.x} ${half}` : `${half} ${a.y} ${half} ${b.y}`;
  return make("path", { class: `edge${isWay ? " taken" : isMore ? " more" : ""}`, d: `M${a.x} ${a.y}C${bend} ${b.x} ${b.y}` });
}

function shape(node, { x, y }, box, colour) {
  const tone = node.kind === "taken" || node.kind === "bonus" ? ` p${colour}` : "";
  const text = node.kind === "root" ? "now" : node.tokens.map((t) => visible(t.text, t.token_id).replace(/\u00a0/g, "\u2423")).join(" ") || "\u2013";
  const most = Math.max(1, Math.floor((box.width - 6) / 7.3));
  const rect = make("rect", {
    class: `node ${node.kind}${tone}`, x: x - box.width / 2, y: y - box.height / 2, width: box.width, height: box.height, rx: node.kind === "bonus" ? 12 : 5,
  });
  const label = make("text", { class: `name ${node.kind}${tone}`, x, y });
  const letters = [...text];
  label.textContent = letters.length > most ? `${letters.slice(0, Math.max(1, most - 1)).join("")}\u2026` : text;
  const title = make("title", {});
  const where = (node.tokens ?? []).map((t) => `\u201c${visible(t.text, t.token_id)}\u201d at position ${t.position}`).join(", ");
  const kinds = { root: "where the pass begins", taken: "guess that was right", failed: "guess that was not", bonus: "the model's own next step" };
  title.textContent = `${kinds[node.kind]}${where ? `: ${where}` : ""}${node.kind === "taken" || node.kind === "failed" ? ` (expected ${Math.round(100 * node.reach)} %)` : ""}`;
  rect.append(title);
  return [rect, label];
}

function make(name, attributes) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
