"""Intervals for means and for paired differences, by the bootstrap over examples.

The statistic is the mean over strata (tasks) of the means within them, so that each task counts alike however many
examples it has; without strata it is the plain mean. Examples are drawn with replacement within each stratum and the
interval is made of percentiles of the resampled means (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapters 8 and 13).

Departure: of a stratum's m examples, m − 1 are drawn, not m (Rao and Wu, Resampling inference with complex survey data,
1988). Drawing m understates the variance of a mean by (m − 1)/m, which is half for a task of two examples; drawing
m − 1 has the right variance at every m.

An interval over examples says nothing of the spread between training seeds; `Bootstrap.average_units` draws seeds too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvpolicy.config.settings import InnerShare, Positive, Settings
from kvpolicy.errors import InputError
from kvpolicy.seeds import derive_seed

# A difference of at most this share of the largest value is a tie but for rounding.
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

    def as_row(self, name: str) -> dict[str, Any]:
        """The mean under a name, with `ci_low` and `ci_high`, which are None without them, and `n`."""
        low, high = self.ends
        return {name: self.mean, "ci_low": low, "ci_high": high, "n": self.n}

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign is established; never where a stratum has one example, whose spread is unknown."""
        return self.smallest_stratum > 1 and (self.low > 0.0 or self.high < 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Resamples:
    """Bootstrap means of many columns, all from the same draws.

    Attributes:
        mean: The statistic of each column.
        deviation: How far each resample's is from it.
        n: Examples.
        smallest_stratum: Examples in the smallest stratum.
        rounding: What is no more than this is taken for 0.
        confidence: Share of the bootstrap means inside an interval.
    """

    mean: Float[np.ndarray, "column"]
    deviation: Float[np.ndarray, "resample column"]
    n: int
    smallest_stratum: int
    rounding: float
    confidence: float

    def differences(self, first: Int[np.ndarray, "pair"], second: Int[np.ndarray, "pair"]) -> "Resamples":
        """Columns `first` minus columns `second`, paired: they share their draws."""
        return replace(
            self,
            mean=self.mean[first] - self.mean[second],
            deviation=self.deviation[:, first] - self.deviation[:, second],
        )

    def intervals(self) -> list[Interval]:
        """The percentile interval of each column."""
        tail = (1.0 - self.confidence) / 2.0
        low, high = np.quantile(self.deviation, (tail, 1.0 - tail), axis=0)
        ends = (self._rounded(self.mean + end).tolist() for end in (0.0, low, high))
        return [
            Interval(mean=mean, low=low, high=high, n=self.n, smallest_stratum=self.smallest_stratum)
            for mean, low, high in zip(*ends, strict=True)
        ]

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
class Bootstrap(Settings):
    """How intervals are made."""

    seed: int
    """Of the draws: of two calls with the same seed and strata, both meet the same resamples."""
    num_resamples: Positive = 2000
    """Bootstrap means to draw."""
    confidence: InnerShare = 0.95
    """Share of the bootstrap means inside an interval."""

    def mean(self, values: Float[np.ndarray, "example"], *, strata: Sequence[str] | None = None) -> Interval:
        """Interval for the mean of one value an example, as `resample`."""
        return self.resample(values[:, np.newaxis], strata=strata).intervals()[0]

    def resample(
        self, values: Float[np.ndarray, "example column"], *, strata: Sequence[str] | None = None
    ) -> Resamples:
        """Bootstrap means of many columns, one matrix product for all of them.

        Every column meets the same resamples, so a column that holds the difference of two others has the interval of
        their paired difference.

        Args:
            values: One row an example, one column a quantity.
            strata: The stratum of each example, such as its task; None for one stratum.

        Raises:
            InputError: If there are no examples, a value is not finite or strata do not match.
        """
        num_examples = values.shape[0]
        if not num_examples:
            raise InputError("bootstrap: no examples, expected at least one")
        if num_bad := int(np.count_nonzero(~np.isfinite(values))):
            raise InputError(f"bootstrap: {num_bad} of {values.size} values are not finite; leave out failed examples")
        if strata is not None and len(strata) != num_examples:
            raise InputError(f"bootstrap: {len(strata)} strata for {num_examples} examples, expected one each")
        _, members, sizes = np.unique(
            np.zeros(num_examples) if strata is None else np.asarray(strata), return_inverse=True, return_counts=True
        )
        wide = values.astype(np.float64)
        mean = (1.0 / (sizes.size * sizes[members])) @ wide
        weights = _resample_weights(members, sizes, self.num_resamples, np.random.default_rng(self.seed))
        # About the mean: a column of equal values then has an interval of no width, not one of rounding errors.
        return Resamples(
            mean=mean,
            deviation=weights @ (wide - mean),
            n=num_examples,
            smallest_stratum=int(sizes.min()),
            rounding=_ROUNDING * float(np.abs(wide).max(initial=0.0)),
            confidence=self.confidence,
        )

    def average_units(self, resamples: Resamples, groups: Mapping[str, Int[np.ndarray, "unit _"]]) -> Resamples:
        """Means over units that are themselves a sample, such as training seeds: each resample draws units as well.

        Units and examples are crossed, every unit being evaluated on every example, and are drawn independently of each
        other (Owen, The pigeonhole bootstrap, 2007; again one unit fewer is drawn than there are). Effects of units and
        effects of examples have their right weight. The noise of single pairs of the two counts up to three times, so
        an interval is rather too wide for that. With few units it is too narrow: percentiles over three seeds
        understate the tails.

        Args:
            resamples: Columns, one for each unit of each quantity.
            groups: Name to the columns of a group: a row for each unit, a column for each quantity. All quantities of a
                group meet the same draws of its units; groups draw independently. A single unit is taken as it is.

        Returns:
            A column for each quantity of each group, in that order.
        """
        means, deviations = [], []
        for name, columns in groups.items():
            num_units = columns.shape[0]
            mean = resamples.mean[columns].mean(axis=0)
            generator = np.random.default_rng(derive_seed(self.seed, "units", name))
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
