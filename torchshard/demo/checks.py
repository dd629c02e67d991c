"""What the demo has to show: a measured number beside the largest that is allowed."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One line of the closing table; passed if `measured` is a number and at most `allowed`."""

    what: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether it is in tolerance."""
        return self.measured <= self.allowed  # false for NaN


@dataclass
class Report:
    """All checks, in the order in which they were made."""

    checks: list[Check] = field(default_factory=list)

    def add(self, what: str, measured: float, allowed: float) -> None:
        """Add one."""
        self.checks.append(Check(what, measured, allowed))

    @property
    def passed(self) -> bool:
        """Whether there are checks and all passed."""
        return bool(self.checks) and all(c.passed for c in self.checks)

    def __str__(self) -> str:
        from tabulate import tabulate

        rows = [(c.what, f"{c.measured:.3g}", f"{c.allowed:.3g}", "ok" if c.passed else "FAILED") for c in self.checks]
        return str(tabulate(rows, ["check", "measured", "allowed", ""], disable_numparse=True))
