"""Intervals for means and for paired differences, by the bootstrap over examples.

The statistic is the mean over strata (tasks) of the means within them, so that each task counts alike however many
examples it has; without strata it is the plain mean. Examples are drawn with replacement within each stratum and the
interval is made of percentiles of the resampled means (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapters 8 and 13).

Departure: of a stratum's m examples, m − 1 are drawn, not m (Rao and Wu, Resampling inference with complex survey data,
1988). Drawing m understates the variance of a mean by (m − 1)/m, which is half for a task of two examples; drawing
m − 1 has the right variance at every m.

An interval over examples says nothing of the spread between training seeds; `average_units` draws seeds as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from kvpolicy.errors import InputError
from kvpolicy.seeds import derive_seed

# Of the largest value: a difference that is no more than this is what rounding left of a tie.
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its uncertainty.

    Attributes:
        mean: The statistic.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Examples.
        smallest_stratum: Examples in the smallest stratum. A stratum of one adds nothing to the interval's width.
    """

    mean: float
    low: float
    high: float
    n: int
    smallest_stratum: int

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """Both ends; none where a stratum has one example, whose spread is unknown."""
        return (None, None) if self.smallest_stratum == 1 else (self.low, self.high)

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is established; never where a stratum has one example, whose spread is unknown."""
        return self.smallest_stratum > 1 and (self.low > 0.0 or self.high < 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class IntervalTable:
    """The intervals of many columns, all from the same resamples.

    Attributes:
        mean: The statistic of each column.
        low: Lower ends.
        high: Upper ends.
        n: Examples.
        smallest_stratum: Examples in the smallest stratum.
    """

    mean: Float[np.ndarray, "column"]
    low: Float[np.ndarray, "column"]
    high: Float[np.ndarray, "column"]
    n: int
    smallest_stratum: int

    def interval(self, column: int) -> Interval:
        """The interval of one column."""
        return Interval(
            mean=float(self.mean[column]),
            low=float(self.low[column]),
            high=float(self.high[column]),
            n=self.n,
            smallest_stratum=self.smallest_stratum,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Resamples:
    """Bootstrap means of many columns, all from the same draws.

    Attributes:
        mean: The statistic of each column.
        deviation: How far each resample's is from it.
        n: Examples.
        smallest_stratum: Examples in the smallest stratum.
        rounding: What is no more than this is taken for 0.
    """

    mean: Float[np.ndarray, "column"]
    deviation: Float[np.ndarray, "resample column"]
    n: int
    smallest_stratum: int
    rounding: float

    def differences(self, first: Int[np.ndarray, "pair"], second: Int[np.ndarray, "pair"]) -> "Resamples":
        """Columns `first` minus columns `second`, paired: they share their draws."""
        return replace(
            self,
            mean=self.mean[first] - self.mean[second],
            deviation=self.deviation[:, first] - self.deviation[:, second],
        )

    def intervals(self, confidence: float) -> IntervalTable:
        """Percentile intervals with this share of the bootstrap means inside."""
        tail = (1.0 - confidence) / 2.0
        low, high = np.quantile(self.deviation, (tail, 1.0 - tail), axis=0)
        return IntervalTable(
            mean=self._rounded(self.mean),
            low=self._rounded(self.mean + low),
            high=self._rounded(self.mean + high),
            n=self.n,
            smallest_stratum=self.smallest_stratum,
        )

    def share_above_zero(self) -> Float[np.ndarray, "column"]:
        """Share of the resamples in which a column is above 0; where it is 0, half of them.

        Half also where a stratum has one example: resamples that hardly differ, or not at all, would be certain.
        """
        if self.smallest_stratum == 1:
            return np.full(self.mean.shape, 0.5)
        signs: np.ndarray = np.sign(self._rounded(self.mean + self.deviation)).mean(axis=0)
        return 0.5 + 0.5 * signs

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) <= self.rounding, 0.0, values)


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made.

    Attributes:
        seed: Of the draws.
        num_resamples: Bootstrap means to draw.
        confidence: Share of the bootstrap means inside an interval.
    """

    seed: int
    num_resamples: int = 2000
    confidence: float = 0.95

    def resample(
        self, values: Float[np.ndarray, "example column"], *, strata: Sequence[str] | None = None
    ) -> "Resamples":
        """Bootstrap means of many columns, as `resample_means`."""
        return resample_means(values, strata=strata, seed=self.seed, num_resamples=self.num_resamples)

    def mean(self, values: Float[np.ndarray, "example"], *, strata: Sequence[str] | None = None) -> "Interval":
        """Interval for a mean, as `bootstrap_mean`."""
        return bootstrap_mean(values, strata=strata, **asdict(self))


def bootstrap_mean(
    values: Float[np.ndarray, "example"],
    *,
    strata: Sequence[str] | None = None,
    seed: int,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval for a mean.

    Args:
        values: One value an example.
        strata: The stratum of each example, such as its task; None for one stratum.
        seed: Of the resamples. Calls with the same seed and strata share them.
        num_resamples: Bootstrap means to draw.
        confidence: Share of the bootstrap means inside the interval.

    Returns:
        The mean and its interval.

    Raises:
        InputError: If there are no examples, a value is not finite, strata do not match or a parameter is out of range.
    """
    table = bootstrap_table(
        values[:, np.newaxis], strata=strata, seed=seed, num_resamples=num_resamples, confidence=confidence
    )
    return table.interval(0)


def paired_difference(
    a: Float[np.ndarray, "example"],
    b: Float[np.ndarray, "example"],
    *,
    strata: Sequence[str] | None = None,
    seed: int,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval for the mean of a − b over the same examples.

    Args:
        a: One value an example.
        b: The other method's value of the same examples, in the same order.
        strata: The stratum of each example; None for one stratum.
        seed: Of the resamples.
        num_resamples: Bootstrap means to draw.
        confidence: Share of the bootstrap means inside the interval.

    Returns:
        The mean difference and its interval.

    Raises:
        InputError: If the lengths differ, or as in `bootstrap_mean`.
    """
    if a.shape != b.shape:
        raise InputError(f"paired difference: {a.size} and {b.size} values, expected one pair an example")
    return bootstrap_mean(a - b, strata=strata, seed=seed, num_resamples=num_resamples, confidence=confidence)


def bootstrap_table(
    values: Float[np.ndarray, "example column"],
    *,
    strata: Sequence[str] | None = None,
    seed: int,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> IntervalTable:
    """Intervals for many columns at once, one matrix product for all of them.

    Every column meets the same resamples, so a column that holds the difference of two others has the interval of their
    paired difference.

    Args:
        values: One row an example, one column a quantity.
        strata: The stratum of each example; None for one stratum.
        seed: Of the resamples.
        num_resamples: Bootstrap means to draw for each column.
        confidence: Share of the bootstrap means inside the interval.

    Returns:
        The mean and the interval of each column.

    Raises:
        InputError: As in `bootstrap_mean`.
    """
    _check_confidence(confidence)
    return resample_means(values, strata=strata, seed=seed, num_resamples=num_resamples).intervals(confidence)


def resample_means(
    values: Float[np.ndarray, "example column"], *, strata: Sequence[str] | None = None, seed: int, num_resamples: int
) -> Resamples:
    """Bootstrap means of many columns, one matrix product for all of them.

    Args:
        values: One row an example, one column a quantity.
        strata: The stratum of each example; None for one stratum.
        seed: Of the resamples.
        num_resamples: Bootstrap means to draw for each column.

    Raises:
        InputError: As in `bootstrap_mean`.
    """
    num_examples = values.shape[0]
    _check(values, strata, num_resamples)
    _, members, sizes = np.unique(
        np.zeros(num_examples) if strata is None else np.asarray(strata), return_inverse=True, return_counts=True
    )
    wide = values.astype(np.float64)
    mean = (1.0 / (sizes.size * sizes[members])) @ wide
    weights = _resample_weights(members, sizes, num_resamples, np.random.default_rng(seed))
    # About the mean: a column of equal values then has an interval of no width, not one of rounding errors.
    return Resamples(
        mean=mean,
        deviation=weights @ (wide - mean),
        n=num_examples,
        smallest_stratum=int(sizes.min()),
        rounding=_ROUNDING * float(np.abs(wide).max(initial=0.0)),
    )


def average_units(resamples: Resamples, groups: Mapping[str, Int[np.ndarray, "unit _"]], *, seed: int) -> Resamples:
    """Means over units that are themselves a sample, such as training seeds: each resample draws units as well.

    Units and examples are crossed, every unit having judged every example, and are drawn independently of each other
    (Owen, The pigeonhole bootstrap, 2007; again one unit fewer is drawn than there are). What the units have in common
    and what the examples have in common is weighed rightly; noise that belongs to a single pair of the two counts up to
    three times, so an interval is rather too wide for that. With a handful of units it is too narrow in another way:
    percentiles of three seeds know nothing of the tails that Student's t has for them.

    Args:
        resamples: Columns, one for each unit of each quantity.
        groups: Name to the columns of a group: a row for each unit, a column for each quantity. All quantities of a
            group meet the same draws of its units; groups draw independently. A single unit is taken as it is.
        seed: Of the draws.

    Returns:
        A column for each quantity of each group, in that order.
    """
    means, deviations = [], []
    for name, columns in groups.items():
        num_units = columns.shape[0]
        mean = resamples.mean[columns].mean(axis=0)
        generator = np.random.default_rng(derive_seed(seed, "units", name))
        one_stratum, size = np.zeros(num_units, dtype=int), np.array([num_units])
        weights = _resample_weights(one_stratum, size, len(resamples.deviation), generator)
        of_units = resamples.deviation[:, columns] + (resamples.mean[columns] - mean)
        means.append(mean)
        deviations.append(np.einsum("ru,ruc->rc", weights, of_units))
    return replace(resamples, mean=np.concatenate(means), deviation=np.concatenate(deviations, axis=1))


def _resample_weights(
    members: np.ndarray, sizes: np.ndarray, num_resamples: int, generator: np.random.Generator
) -> Float[np.ndarray, "resample example"]:
    """How much each example weighs in each resampled statistic; every row adds up to 1."""
    weights = np.empty((num_resamples, members.size))
    for stratum, size in enumerate(sizes):
        draws = max(1, int(size) - 1)
        counts = generator.multinomial(draws, np.full(size, 1.0 / size), size=num_resamples)
        weights[:, members == stratum] = counts / (draws * sizes.size)
    return weights


def _check(values: np.ndarray, strata: Sequence[str] | None, num_resamples: int) -> None:
    num_examples = values.shape[0]
    if not num_examples:
        raise InputError("bootstrap: no examples, expected at least one")
    num_bad = int(np.count_nonzero(~np.isfinite(values)))
    if num_bad:
        raise InputError(f"bootstrap: {num_bad} of {values.size} values are not finite; leave out failed examples")
    if strata is not None and len(strata) != num_examples:
        raise InputError(f"bootstrap: {len(strata)} strata for {num_examples} examples, expected one each")
    if num_resamples < 1:
        raise InputError(f"bootstrap: num_resamples is {num_resamples}, expected at least 1")


def _check_confidence(confidence: float) -> None:
    if not (math.isfinite(confidence) and 0.0 < confidence < 1.0):
        raise InputError(f"bootstrap: confidence is {confidence}, expected a share between 0 and 1, such as 0.95")
