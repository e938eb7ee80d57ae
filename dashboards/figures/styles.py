"""The look of each method and the names of settings and metrics, the same in every figure and table.

Colours are Paul Tol's "muted" scheme, which stays apart under the common colour-vision deficiencies; every method
has a marker of its own as well, so that no figure depends on colour alone. A method that is not listed gets a style
from a digest of its name: the same one in every figure, whatever else is drawn.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from kvpolicy.names import LEARNED, SETTINGS
from kvpolicy.results.comparisons import is_heuristic
from kvpolicy.results.metrics import ANALYSES, METRICS

_COMPRESSED = dict(zip(SETTINGS, ("before", "after"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Style:
    """One method's line: a colour, a marker in matplotlib's and plotly's words, a dash, a width in points."""

    colour: str
    marker: str
    symbol: str
    dash: str = "solid"
    width: float = 1.3
    band_alpha: float = 0.10


_STYLES = {
    LEARNED: Style(colour="#D55E00", marker="o", symbol="circle", width=3.0, band_alpha=0.25),
    "kvp_heads": Style(colour="#E69F00", marker="d", symbol="diamond-tall", width=2.2, band_alpha=0.15),
    "oracle": Style(colour="#000000", marker="", symbol="line-ew", dash="dash", width=1.8, band_alpha=0.08),
    "full": Style(colour="#555555", marker="", symbol="line-ew", dash="dot", width=1.8, band_alpha=0.08),
    "judgeq": Style(colour="#009E73", marker="*", symbol="star"),
    "random": Style(colour="#A6A6A6", marker="x", symbol="x-thin-open"),
    "streaming_llm": Style(colour="#88CCEE", marker="s", symbol="square"),
    "knorm": Style(colour="#999933", marker="^", symbol="triangle-up"),
    "keydiff": Style(colour="#332288", marker="D", symbol="diamond"),
    "lagkv": Style(colour="#DDCC77", marker="v", symbol="triangle-down"),
    "expected_attention": Style(colour="#0072B2", marker=">", symbol="triangle-right"),
    "snapkv": Style(colour="#117733", marker="P", symbol="cross"),
    "pyramidkv": Style(colour="#CC6677", marker="p", symbol="pentagon"),
    "adakv": Style(colour="#AA4499", marker="h", symbol="hexagon"),
    "tova": Style(colour="#882255", marker="<", symbol="triangle-left"),
    "h2o": Style(colour="#44AA99", marker="X", symbol="x"),
}
_SPARE_COLOURS = ("#6699CC", "#661100", "#BBCC33", "#EE99AA", "#225555")
_SPARE_MARKERS = (("8", "octagon"), ("H", "hexagon2"), ("1", "y-down-open"), ("+", "cross-thin-open"))


def style_of(method: str) -> Style:
    """The style of a method; an unknown one's depends on its name alone."""
    if method in _STYLES:
        return _STYLES[method]
    place = crc32(method.encode())
    marker, symbol = _SPARE_MARKERS[place // len(_SPARE_COLOURS) % len(_SPARE_MARKERS)]
    return Style(colour=_SPARE_COLOURS[place % len(_SPARE_COLOURS)], marker=marker, symbol=symbol)


def method_order(method: str) -> tuple[int, str]:
    """Sort key: the learned policy, its bounds, the listed heuristics, then the others by name."""
    names = list(_STYLES)
    return (names.index(method) if method in _STYLES else len(names), method)


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in the order of tables, each once."""
    return sorted(set(methods), key=method_order)


def made_from(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Methods of curves that are made from something that was trained, each with the kind of artifact that it is."""
    return {row["method"]: row["policy_set_id"].rpartition("-")[0] for row in rows if row["policy_set_id"]}


def heuristics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Methods of curves that are made from nothing that was trained, and do not know the future."""
    trained = made_from(rows)
    return in_order(row["method"] for row in rows if is_heuristic(row["method"], trained))


def metric_order(metric: str) -> tuple[int, str]:
    """Sort key: fidelity first, then as listed, then the others by name."""
    names = list(METRICS)
    return (names.index(metric) if metric in names else len(names), metric)


def competed_for(metrics: Collection[str]) -> list[str]:
    """Metrics that methods compete for; fidelity over the answer alone only without that over question and answer."""
    return [name for name in metrics if name not in ANALYSES and not (name == "kl_answer" and "kl" in metrics)]


def place_label(benchmark: str, setting: str) -> str:
    """A benchmark and a setting in a few words."""
    return f"{benchmark}, {setting.replace('_', '-')}"


def setting_label(setting: str) -> str:
    """A setting in words."""
    name = setting.replace("_", "-")
    return f"{name} (compressed {_COMPRESSED[setting]} the question)" if setting in _COMPRESSED else setting


def metric_label(metric: str) -> str:
    """A metric in words, with its unit."""
    return METRICS[metric].label if metric in METRICS else metric


def short_metric(metric: str) -> str:
    """A metric without its unit."""
    return (metric in METRICS and METRICS[metric].short) or metric_label(metric).split(" (")[0]
