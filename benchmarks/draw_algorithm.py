"""Draw the pictures of docs/algorithm.md from one decoded prompt of the shipped model.

    python benchmarks/draw_algorithm.py

Decodes a held-out prompt with the shipped order drafter and by standard decoding, chooses an instructive pass by itself and writes
`draft_graph.png`, `verification_walk.png` and `canvas.png` to docs/images.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

import spot_dlm as spot
from spot_dlm.decode import decode_steps
from spot_dlm.draft_graph import DraftGraph
from spot_dlm.drafters import build_drafter
from spot_dlm.sequence import BlockStarted, Committed, Pass
from spot_dlm.state import MASKED, BlockState
from spot_dlm.tasks import FAMILY_TASKS, load_prompts

IMAGES = Path(__file__).parents[1] / "docs" / "images"
DEEPEST = 5
"""Deeper graphs are drawn too, but not preferred: their boxes become narrow."""
BLUE, ORANGE, GREEN, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#8c8c8c", "#222222"  # Okabe and Ito's colours
WIDTH, DPI = 8.0, 150
MONO = "DejaVu Sans Mono"
TokenText = Callable[[int], str]


@dataclass(frozen=True)
class Walk:
    """One pass: its graph, the accepted nodes (the root first) and the target's state at which the walk left the graph."""

    graph: DraftGraph
    path: list[int]
    leaving: BlockState
    number: int = 0

    @property
    def merged(self) -> list[int]:
        """Nodes with several parents."""
        return [node for node in range(len(self.graph)) if len(parents(self.graph, node)) > 1]

    @property
    def branchings(self) -> int:
        """Number of nodes with several children."""
        return int((np.bincount(self.graph.edges[:, 0], minlength=len(self.graph)) > 1).sum())

    @property
    def qualifies(self) -> bool:
        """Whether the pass shows all that the pictures are about: branches, merging, two accepted guesses, and a guess that failed."""
        return self.branchings >= 2 and bool(self.merged) and len(self.path) > 2 and not self.leaving.is_complete

    @property
    def interest(self) -> tuple[int, ...]:
        """How instructive the pass is; tuples compare."""
        through = len(set(self.path) & set(self.merged))
        shallow = int(self.graph.depths.max() <= DEEPEST)
        return int(self.qualifies), shallow, int(through > 0), min(self.branchings, 3), len(self.path), len(self.graph), -self.number


@dataclass(frozen=True)
class Trajectory:
    """A decoded prompt: its walks, and of every block the first state and the commits."""

    walks: list[Walk]
    starts: dict[int, BlockState]
    commits: list[Committed]


def parents(graph: DraftGraph, node: int) -> list[int]:
    """Return a node's parents, in the order of the edges."""
    return graph.edges[graph.edges[:, 1] == node, 0].tolist()


def committed(before: np.ndarray, after: np.ndarray) -> list[tuple[int, int]]:
    """Return (position, token) of what `after` holds and `before` does not."""
    at = np.flatnonzero((before == MASKED) & (after != MASKED))
    return [(int(i), int(after[i])) for i in at]


def walk_of(event: Pass) -> Walk:
    """Return a pass as a walk."""
    states = [t.state for t in event.acceptance.transitions]
    found = [event.graph.find(state) for state in states[:-1]]
    return Walk(event.graph, [0, *(node for node in found if node is not None)], states[-1], event.number)


def choose(walks: Sequence[Walk]) -> Walk:
    """Return the most instructive pass; where none qualifies, the best there is.

    Raises:
        ValueError: if there is no pass.
    """
    if not walks:
        raise ValueError("no pass to draw")
    return max(walks, key=lambda walk: walk.interest)


def decode(target: spot.Target, prompt: str, drafter: spot.Drafter, nodes: int) -> Trajectory:
    """Decode a prompt under the standard rule at temperature 0."""
    walks: list[Walk] = []
    starts: dict[int, BlockState] = {}
    commits: list[Committed] = []
    for event in decode_steps(target, prompt, drafter, spot.DecodeParams(nodes=nodes)):
        if isinstance(event, BlockStarted):
            starts[event.state.block] = event.state
        elif isinstance(event, Pass):
            walks.append(walk_of(event))
            commits += event.committed
    return Trajectory(walks, starts, commits)


def token_text(target: spot.Target) -> TokenText:
    """Return how a token is shown: visible spaces and line ends, the end token by name."""

    def text(token: int) -> str:
        if token in target.spec.stop_ids:
            return "<end>"
        plain = target.decode([token])
        return plain.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{RETURN SYMBOL}").replace("\t", "\\t") or f"#{token}"

    return text


def clip(text: str, length: int) -> str:
    """Return at most `length` characters."""
    return text if len(text) <= length else text[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


def commits_text(before: np.ndarray, after: np.ndarray, text: TokenText, room: int) -> str:
    """Return what one edge commits: token at position."""
    found = committed(before, after)
    return clip(
        " ".join(
            f"\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}{clip(text(t), room - 5 - len(str(i)))}"
            f"\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} at {i}"
            for i, t in found
        ),
        room,
    )


def lay_out(graph: DraftGraph) -> np.ndarray:
    """Return the height of every node: each depth is a centred column, ordered so that neighbours stand near each other."""
    depths = graph.depths
    height = np.zeros(len(graph))
    columns = [np.flatnonzero(depths == d) for d in range(int(depths.max()) + 1)]
    for column in columns:
        height[column] = (len(column) - 1) / 2 - np.arange(len(column))
    for sweep in range(6):
        downwards = sweep % 2 == 0
        here, there = (1, 0) if downwards else (0, 1)
        for column in columns if downwards else columns[::-1]:
            wish = []
            for node in column:
                near = graph.edges[graph.edges[:, here] == node, there]
                wish.append(height[near].mean() if len(near) else height[node])
            order = column[np.argsort(-np.array(wish), kind="stable")]
            height[order] = (len(column) - 1) / 2 - np.arange(len(column))
    return height


def node_lines(graph: DraftGraph, node: int, text: TokenText, room: int, most: int = 3) -> list[str]:
    """Return a node's label: the commit of every edge that leads to it."""
    if node == 0:
        return ["root"]
    above = sorted(parents(graph, node), key=lambda p: -graph.reach[p])
    lines = [commits_text(graph.canvases[p], graph.canvases[node], text, room) for p in above]
    lines = lines or [commits_text(graph.canvases[0], graph.canvases[node], text, room)]
    return lines if len(lines) <= most else [*lines[: most - 1], f"+{len(lines) - most + 1} more"]


def draw_strip(ax: Axes, canvas: np.ndarray, text: TokenText, title: str) -> None:
    """Draw a canvas as a row of cells, masked positions empty, their numbers below."""
    room = max(2, int(WIDTH * 0.94 * 72 / len(canvas) / 4.4))
    for i, token in enumerate(canvas.tolist()):
        ax.add_patch(Rectangle((i, 0), 1, 1, facecolor="white" if token == MASKED else "#dce9f3", edgecolor=GREY, linewidth=0.6))
        if token != MASKED:
            ax.text(i + 0.5, 0.5, clip(text(token), room), ha="center", va="center", fontsize=7, family=MONO, color=INK, parse_math=False)
    ax.set_xlim(-0.03, len(canvas) + 0.03)
    ax.set_ylim(-0.03, 1.03)
    ax.set_yticks([])
    ax.set_xticks(np.arange(len(canvas)) + 0.5, [str(i) for i in range(len(canvas))], fontsize=7)
    ax.tick_params(length=0)
    ax.set_frame_on(False)
    ax.set_title(title, fontsize=9, loc="left", color=INK)


def draw_graph(walk: Walk, text: TokenText, path: Path, accepted: bool = False) -> None:
    """Draw a pass's draft graph; with `accepted` the walk through it and the state at which it left.

    Args:
        walk: the pass.
        text: how a token is shown.
        path: the picture.
        accepted: show the verification walk instead of reach as colour.
    """
    graph, height, depths = walk.graph, lay_out(walk.graph), walk.graph.depths
    end = walk.path[-1]
    column = height[depths == depths[end] + 1]
    out_x = int(depths[end]) + 1
    out_y = 0.0
    if len(column):
        out_y = float(column.max() + 1 if height[end] > 0 else column.min() - 1)
    num_columns = max(int(depths.max()), out_x) + 1
    top, bottom = max(float(height.max()), out_y) + 0.5, min(float(height.min()), out_y) - 0.45
    size = (WIDTH, 1.4 + 0.74 * (top - bottom))
    figure = plt.figure(figsize=size)
    strip = figure.add_axes((0.03, 1 - 0.6 / size[1], 0.94, 0.27 / size[1]))
    draw_strip(strip, graph.canvases[0], text, f"The root (certain next state) of pass {walk.number}: its canvas, positions below")
    ax = figure.add_axes((0.01, 0.42 / size[1], 0.98, 1 - 1.3 / size[1]))
    ax.set_xlim(-0.52, num_columns - 0.48)
    ax.set_ylim(bottom, top)
    ax.axis("off")
    half, room = 0.36, int(0.72 * WIDTH * 0.98 / num_columns * 72 / 5.1)
    on_path = set(zip(walk.path, walk.path[1:], strict=False))
    for parent, child in graph.edges.tolist():
        taken = accepted and (parent, child) in on_path
        colour, width = (BLUE, 2.6) if taken else (GREY, 0.9)
        ax.plot(
            [depths[parent] + half, depths[child] - half], [height[parent], height[child]], color=colour, linewidth=width, zorder=1 + taken
        )
    for node in range(len(graph)):
        share = float(np.clip(graph.reach[node], 0, 1))
        fill = colormaps["Blues"](0.04 + 0.5 * share)
        if accepted:
            fill = (0.72, 0.85, 0.94, 1.0) if node in walk.path else (0.95, 0.95, 0.95, 1.0)
        _box(
            ax, depths[node], height[node], half, node_lines(graph, node, text, room), f"{graph.reach[node]:.2f}", fill, node in walk.merged
        )
    if accepted:
        ax.plot([depths[end] + half, out_x - half], [height[end], out_y], color=GREEN, linewidth=2, linestyle="--", zorder=1)
        added = commits_text(graph.canvases[end], walk.leaving.canvas, text, room)
        _box(ax, out_x, out_y, half, [added], "complete" if walk.leaving.is_complete else "next root", "white", False, dashed=True)
    for depth in range(num_columns if accepted else int(depths.max()) + 1):
        ax.text(depth, top - 0.02, f"depth {depth}", ha="center", va="bottom", fontsize=8, color="#555555")
    figure.legend(handles=_legend(accepted), loc="lower center", ncols=4, fontsize=8, frameon=False, borderpad=0.1, handlelength=1.6)
    _save(figure, path)


def _box(
    ax: Axes,
    x: float,
    y: float,
    half: float,
    lines: list[str],
    below: str,
    fill: str | tuple[float, ...],
    merged: bool,
    dashed: bool = False,
) -> None:
    """Draw one node: what was committed, a line for every parent, and its reach."""
    tall = 0.17 + 0.105 * (len(lines) + 1) / 2
    edge = GREEN if dashed else ORANGE if merged else INK
    ax.add_patch(
        FancyBboxPatch(
            (x - half, y - tall),
            2 * half,
            2 * tall,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=fill,
            edgecolor=edge,
            linewidth=2.4 if merged or dashed else 0.9,
            linestyle="--" if dashed else "-",
            zorder=3,
        )
    )
    step = 2 * tall / (len(lines) + 1.4)
    for i, line in enumerate([*lines, below]):
        last = i == len(lines)
        ax.text(
            x,
            y + tall - step * (i + 0.7),
            line,
            ha="center",
            va="center",
            fontsize=8,
            family=None if last else MONO,
            color="#444444" if last else INK,
            style="italic" if last else "normal",
            zorder=4,
            parse_math=False,
        )


def _legend(accepted: bool) -> list[Patch | Line2D]:
    merged = Patch(facecolor="white", edgecolor=ORANGE, linewidth=2.4, label="merged: a line for each last commit")
    if not accepted:
        blues = colormaps["Blues"]
        few, many = (Patch(facecolor=blues(0.04 + 0.5 * r), edgecolor=INK, label=f"reach {r:g}") for r in (0.1, 1.0))
        return [few, many, merged]
    return [
        Line2D([], [], color=BLUE, linewidth=2.6, label="accepted"),
        Line2D([], [], color=GREY, linewidth=0.9, label="not taken"),
        Line2D([], [], color=GREEN, linewidth=2, linestyle="--", label="the target's own next state"),
        merged,
    ]


def draw_canvas(start: BlockState, orders: Mapping[str, Sequence[Committed]], text: TokenText, path: Path) -> None:
    """Draw one block's canvas after every pass, a panel for each decoder, coloured by the pass that committed a position.

    Args:
        start: the block's first state.
        orders: the block's commits by decoder, in order.
        text: how a token is shown.
        path: the picture.
    """
    length = len(start.canvas)
    passes = {name: sorted({c.decode_pass for c in order}) for name, order in orders.items()}
    most = max(len(p) for p in passes.values())
    final = start.canvas.copy()
    for commit in next(iter(orders.values())):
        final[commit.position - start.block * length] = commit.token
    labels = ["" if t == MASKED else clip(text(t), 9) for t in final.tolist()]
    figure, axes = plt.subplots(1, len(orders), figsize=(WIDTH, 1.45 + 0.19 * most), sharey=True, squeeze=False, layout="constrained")
    for ax, (name, order) in zip(axes[0], orders.items(), strict=True):
        count = len(passes[name])
        rows = {number: row for row, number in enumerate(passes[name])}
        for i, token in enumerate(start.canvas.tolist()):
            ax.add_patch(
                Rectangle((i, 0), 1, count, facecolor="#f4f4f4" if token == MASKED else "#cccccc", edgecolor="white", linewidth=0.6)
            )
        for commit in order:
            i, row = commit.position - start.block * length, rows[commit.decode_pass]
            share = row / max(count - 1, 1)
            colour = colormaps["cividis"](0.1 + 0.85 * share)
            ax.add_patch(Rectangle((i, row), 1, count - row, facecolor=colour, edgecolor="white", linewidth=0.6))
            ink = "white" if share < 0.5 else "black"
            ax.text(i + 0.5, row + 0.52, str(commit.step), ha="center", va="center", fontsize=7, color=ink)
        for row in range(count + 1):
            ax.plot([0, length], [row, row], color="white" if 0 < row < count else GREY, linewidth=0.6, zorder=2)
        ax.set_xlim(0, length)
        ax.set_ylim(most, 0)
        ax.set_xticks(np.arange(length) + 0.5, labels, rotation=90, fontsize=8, family=MONO, parse_math=False)
        ax.set_yticks(np.arange(most) + 0.5, [str(row + 1) for row in range(most)], fontsize=7)
        ax.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
        ax.set_frame_on(False)
        ax.set_xlabel(f"{name}: {count} passes", fontsize=9, color=INK)
    axes[0][0].set_ylabel("canvas after pass", fontsize=9, color=INK)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Decode, choose and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=FAMILY_TASKS, default="json")
    parser.add_argument("--number", type=int, default=0, help="which held-out prompt of the task")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--drafter", default="order")
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = spot.load_target()
    text = token_text(target)
    prompt = load_prompts(args.task, limit=args.number + 1)[args.number]
    drafted = decode(target, prompt.prompt, build_drafter(args.drafter), args.nodes)
    standard = decode(target, prompt.prompt, build_drafter("root"), 1)
    if [(c.position, c.token) for c in drafted.commits] != [(c.position, c.token) for c in standard.commits]:
        raise RuntimeError(f"{prompt.id}: standard and speculative decoding differ; nothing drawn")
    walk = choose(drafted.walks)
    block = walk.graph.block
    draw_graph(walk, text, args.out / "draft_graph.png")
    draw_graph(walk, text, args.out / "verification_walk.png", accepted=True)
    orders = {
        name: [c for c in trajectory.commits if c.block == block]
        for name, trajectory in (("standard", standard), (f"speculative, {args.nodes} rows per pass", drafted))
    }
    draw_canvas(drafted.starts[block], orders, text, args.out / "canvas.png")
    kind = "instructive" if walk.qualifies else "best available (none has branches, merging, two accepted guesses and a failed one)"
    print(f"{prompt.id}: {prompt.prompt}")
    print(f"pass {walk.number} of {len(drafted.walks)}, block {block}, {kind}: {len(walk.graph)} nodes, {len(walk.path) - 1} accepted")


if __name__ == "__main__":
    main()
