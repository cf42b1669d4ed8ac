"""A Timeline as a picture (SVG, PNG, PDF): a row of bars for each rank, and below it what the rank holds.

Colours are Okabe and Ito's, which the colour-blind tell apart, and differ in brightness too; text and lines are of a grey that
can be read on white and on black, and the background is left clear.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdcompiler.core.errors import CompileError
from pdcompiler.core.events import Kind
from pdcompiler.core.explanation import amount
from pdcompiler.timeline_text import seconds

if TYPE_CHECKING:
    from pdcompiler.timeline import Timeline

GREY = "#767676"
COLOURS: dict[Kind, tuple[str, str, str]] = {
    "F": ("#0072B2", "white", "forward (F)"),
    "B": ("#E69F00", "black", "backward (B)"),
    "W": ("#009E73", "black", "weights' gradient (W)"),
    "other": ("#CC79A7", "black", "adds up, packs"),
    "message": ("#56B4E9", "black", "sends, takes a message"),
}
EXPOSED = "waits for a message under way"
BAR, INCHES_PER_RANK, WIDTH = 0.62, 0.55, 14.0
FITS = 0.011
"""Of the width, a bar that holds its number."""


def save(timeline: Timeline, path: str | Path) -> None:
    """Draw and write. Raises CompileError for a format that is none of a picture's."""
    from matplotlib.figure import Figure  # late: it takes long to import, and only pictures need it

    if Path(path).suffix.lower() not in (".svg", ".png", ".pdf"):
        raise CompileError(f"{path} is no picture", ways_out=("a path that ends with .svg, .png or .pdf",))
    ranks = len(timeline.ranks)
    rows = 2 if timeline.held else 1
    figure = Figure(figsize=(WIDTH, 1.3 + INCHES_PER_RANK * ranks * (1 if rows == 1 else 1.35)), layout="constrained")
    axes: Any = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=(1, 0.35)[:rows])
    _bars(timeline, axes[0][0])
    if timeline.held:
        _bytes(timeline, axes[1][0])
    axes[-1][0].set_xlabel("milliseconds", color=GREY)
    for axis in axes.flat:
        axis.tick_params(colors=GREY)
        axis.set_facecolor("none")
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    figure.savefig(path, transparent=True, dpi=150)


def _bars(timeline: Timeline, axis: Any) -> None:
    finish = timeline.finish or 1.0
    for rank, events in enumerate(timeline.ranks):
        for kind, (colour, _, _) in COLOURS.items():
            found = [event for event in events if event.kind == kind]
            spans = [(event.start * 1e3, event.seconds * 1e3) for event in found]
            axis.broken_barh(spans, (rank - BAR / 2, BAR), facecolors=colour, edgecolors="white", linewidth=0.4)
        waits = [(e.end - e.exposed, e.exposed) for e in events if e.kind == "wait" and e.exposed]
        spans = [(start * 1e3, length * 1e3) for start, length in waits]
        axis.broken_barh(spans, (rank - BAR / 2, BAR), facecolors="none", edgecolors=GREY, hatch="////", linewidth=0.0)
        for event in events:
            if event.kind in ("F", "B", "W") and event.seconds > FITS * finish:
                colour = COLOURS[event.kind][1]
                middle = (event.start + event.end) * 500
                axis.text(middle, rank, str(event.microbatch), color=colour, ha="center", va="center", fontsize=8)
    axis.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axis.set_ylim(len(timeline.ranks) - 0.5, -0.5)
    axis.set_xlim(0, finish * 1e3)
    bubble = sum(timeline.bubble) / (finish * max(len(timeline.ranks), 1))
    axis.set_title(f"{timeline.source}: {seconds(finish)}, bubble {bubble:.0%}", color=GREY, loc="left", fontsize=11)
    _legend(timeline, axis)


def _legend(timeline: Timeline, axis: Any) -> None:
    from matplotlib.patches import Patch

    kinds = {event.kind for events in timeline.ranks for event in events}
    shown = [Patch(facecolor=colour, label=label) for kind, (colour, _, label) in COLOURS.items() if kind in kinds]
    if any(event.exposed for events in timeline.ranks for event in events):
        shown.append(Patch(facecolor="none", edgecolor=GREY, hatch="////", label=EXPOSED))
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(shown)}
    axis.legend(handles=shown, frameon=False, labelcolor=GREY, fontsize=9, **place)


def _bytes(timeline: Timeline, axis: Any) -> None:
    """What each rank holds; the fullest moment is written at the line's end."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    styles = ("-", "--", ":", "-.")
    for rank, held in enumerate(timeline.held):
        times, sizes = [time * 1e3 for time, _ in held], [size for _, size in held]
        colour = [colour for colour, _, _ in COLOURS.values()][rank % len(COLOURS)]
        label = f"rank {rank}, most {amount(max(sizes))}B"
        style = styles[rank // len(COLOURS) % len(styles)]
        axis.step(times, sizes, where="post", color=colour, linestyle=style, linewidth=1.2, label=label)
    axis.set_ylim(bottom=0)
    most = max(size for held in timeline.held for _, size in held)
    axis.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(max(most, 4) / 4))))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{amount(size)}B"))
    axis.set_ylabel("held", color=GREY)
    columns = min(len(timeline.held), 4)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=columns, frameon=False, labelcolor=GREY, fontsize=8)
