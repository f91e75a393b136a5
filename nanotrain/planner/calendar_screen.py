"""Output of `nanotrain plan --run`: lines on the calendar of a run, or their values."""

from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from typing import Any

from nanotrain.errors import ConfigError
from nanotrain.planner.run_calendar import (
    DAY_S,
    RunConditions,
    SimulatedRuns,
    best_interval,
    goodput,
    needed_spares,
    simulate,
)
from nanotrain.quantities import count_of

LABELS = {
    "steps": "steps",
    "stragglers": "stragglers",
    "evaluation": "evaluation",
    "saves": "saves",
    "lost_work": "lost work",
    "detection": "detection",
    "restarts": "restarts",
    "spare_waits": "waits for a host",
}
SHOWN_SHARE = 5e-5  # addends with a larger share of the time have a line


@dataclass(frozen=True)
class RunCalendar:
    """A simulated run with its dates and cost."""

    conditions: RunConditions
    runs: SimulatedRuns
    start: date
    gpu_hour_price: float | None = None

    @classmethod
    def of(
        cls, conditions: RunConditions, *, start: date, gpu_hour_price: float | None = None
    ) -> "RunCalendar":
        """The calendar of a run under given conditions.

        Raises:
            ConfigError: the run makes no progress, or ends after the year 9999.
        """
        runs = simulate(conditions)
        days_left = (date.max - start).days
        if runs.late_s / DAY_S >= days_left:
            raise ConfigError(
                f"the run takes {runs.late_s / DAY_S:.3g} days",
                why=f"from {start:%Y-%m-%d} it ends after the year 9999",
                fix="lower --train-tokens or --train-iters, --repair-hours, or --start-date, "
                "or raise --spare-hosts",
            )
        return cls(conditions, runs, start, gpu_hour_price)

    @property
    def num_paid_gpus(self) -> int:
        """GPUs of the run and of its spare hosts."""
        run = self.conditions
        return run.num_gpus + run.spare_hosts * run.gpus_per_host

    def gpu_hours(self, seconds: float) -> float:
        """GPU-hours of a run of some seconds, spare hosts included."""
        return self.num_paid_gpus * seconds / 3600

    def text(self) -> str:
        """The lines of the screen."""
        run = self.conditions
        runs = self.runs
        lines = [
            f"calendar    {run.num_steps:,} steps of {run.step_s:.3f} s on {run.num_gpus:,} GPUs "
            f"and {count_of(run.spare_hosts, 'spare host')}, from {self.start:%Y-%m-%d}"
        ]
        mean_s = float(runs.seconds.mean())
        for name, seconds in runs.addends.means().items():
            if seconds > SHOWN_SHARE * mean_s:
                share = seconds / mean_s
                lines.append(f"  {LABELS[name]:<22}{seconds / DAY_S:>9.2f} days{share:>7.1%}")
        lines += [
            f"goodput     {runs.goodput:.1%} of the time is steps",
            f"failures    {self._failures_text()}",
            self._date_line("median", runs.median_s),
            self._date_line("90 %", runs.late_s),
            f"saves       {self._saves_text()}",
            f"spares      {self._spares_text()}",
        ]
        return "\n".join(lines)

    def values(self) -> dict[str, Any]:
        """The calendar as plain values: seconds, dates, shares."""
        runs = self.runs
        run = self.conditions
        ends = {"median": runs.median_s, "late": runs.late_s}
        values: dict[str, Any] = {
            "conditions": asdict(run),
            "seconds": runs.addends.means(),
            "goodput": runs.goodput,
            "failures": dict(runs.failures),
            "between_failures_s": run.between_failures_s if run.rates.sum() else None,
            "best_save_interval": best_interval(run),
            "needed_spare_hosts": needed_spares(run),
        }
        for name, seconds in ends.items():
            values[f"{name}_days"] = seconds / DAY_S
            values[f"{name}_date"] = self._end(seconds).isoformat()
            values[f"{name}_gpu_hours"] = self.gpu_hours(seconds)
            if self.gpu_hour_price is not None:
                values[f"{name}_cost"] = self.gpu_hours(seconds) * self.gpu_hour_price
        return values

    def _end(self, seconds: float) -> date:
        return self.start + timedelta(seconds=seconds)

    def _date_line(self, name: str, seconds: float) -> str:
        """The date at which the run ends, and its cost."""
        hours = self.gpu_hours(seconds)
        line = f"{name:<12}{self._end(seconds):%Y-%m-%d}, {seconds / DAY_S:,.1f} days, "
        line += f"{hours:,.0f} GPU-hours"
        if self.gpu_hour_price is not None:
            line += f", cost {hours * self.gpu_hour_price:,.0f}"
        return line

    def _failures_text(self) -> str:
        """The mean number of failures of a run, and of each kind."""
        counts = self.runs.failures
        total = sum(counts.values())
        if not total:
            return "none"
        kinds = ", ".join(f"{name} {number:,.1f}" for name, number in counts.items() if number)
        hours = self.conditions.between_failures_s / 3600
        return f"{total:,.1f}, one in {hours:,.1f} hours: {kinds}"

    def _saves_text(self) -> str:
        """The interval of the run, and the best one."""
        run = self.conditions
        best = best_interval(run)
        every = f"every {run.save_interval:,} steps" if run.save_interval else "at the end"
        text = f"{every}, {run.save_stall_s:.1f} s each"
        share = goodput(replace(run, save_interval=best))
        return f"{text}; best: every {best:,} steps, goodput {share:.1%} in the long run"

    def _spares_text(self) -> str:
        """The spare hosts of the run, and how many have a host ready for 99 % of failures."""
        run = self.conditions
        hosts = count_of(run.spare_hosts, "host")
        if not needed_spares(run):
            return f"{hosts}; none is needed: no host is ever in repair"
        needed = count_of(needed_spares(run), "host")
        hours = run.repair_s / 3600
        return f"{hosts}; with {needed} 99 % of failed hosts are replaced at once, {hours:g} h each"
