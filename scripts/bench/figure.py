"""What a figure is, and what it comes to: lines with a value, a limit and every raw sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from measure import median, spread

if TYPE_CHECKING:
    from world import World

__all__ = ["Figure", "Line", "at_least", "at_most", "ratio", "told"]


@dataclass(frozen=True)
class Line:
    """One line of the table. ``limit`` None: reported, not judged. ``sense``: "<=" or ">=". ``commit``: what was measured."""

    figure: str
    what: str
    value: float
    unit: str
    detail: str = ""
    limit: float | None = None
    sense: str = "<="
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    commit: str = ""

    @property
    def verdict(self) -> str:
        """``pass``, ``miss`` or ``report``. A value that is no number is a miss."""
        if self.limit is None:
            return "report"
        good = self.value <= self.limit if self.sense == "<=" else self.value >= self.limit
        return "pass" if good else "miss"

    @property
    def goal(self) -> str:
        """The limit as it is printed."""
        return "" if self.limit is None else f"{self.sense} {self.limit:g}{unit_suffix(self.unit)}"

    @property
    def shown(self) -> str:
        """The value as it is printed."""
        digits = 0 if self.unit == "MB" else 3 if abs(self.value) < 10 else 1
        return f"{self.value:.{digits}f}{unit_suffix(self.unit)}"

    @property
    def spread(self) -> str:
        """Of the series of samples that scatters most: the middle half over the median."""
        widest = max(map(spread, self.samples.values()), default=0.0)
        return f"{widest:.0%}" if widest else ""

    def as_dict(self) -> dict[str, object]:
        """For the JSON of raw numbers."""
        return {**asdict(self), "verdict": self.verdict}


def unit_suffix(unit: str) -> str:
    return {"ratio": "", "times": "x"}.get(unit, f" {unit}")


def at_most(
    figure: str,
    what: str,
    value: float,
    unit: str,
    limit: float,
    detail: str = "",
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Line:
    """A line that passes while *value* <= *limit*."""
    return Line(figure, what, value, unit, detail, limit, "<=", samples or {})


def at_least(
    figure: str,
    what: str,
    value: float,
    unit: str,
    limit: float,
    detail: str = "",
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Line:
    """A line that passes while *value* >= *limit*."""
    return Line(figure, what, value, unit, detail, limit, ">=", samples or {})


def told(
    figure: str,
    what: str,
    value: float,
    unit: str,
    detail: str = "",
    samples: Mapping[str, Sequence[float]] | None = None,
) -> Line:
    """A line that is reported without a limit."""
    return Line(figure, what, value, unit, detail, None, "<=", samples or {})


def ratio(samples: Mapping[str, Sequence[float]], upper: str, lower: str) -> float:
    """Median of *upper* over median of *lower*."""
    return median(samples[upper]) / median(samples[lower])


@dataclass(frozen=True)
class Figure:
    """One figure: its name, what it asks, and the function that measures it.

    ``must``: a miss fails the whole run. ``docstring`` of the function says what is measured and why it is fair.
    """

    name: str
    title: str
    measure: Callable[[World], list[Line]]
    must: bool = False

    @property
    def method(self) -> str:
        """How it is measured, for the document."""
        return " ".join((self.measure.__doc__ or "").split())
